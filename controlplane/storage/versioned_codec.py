"""Encode and decode one value with format version and checksum, so that a reader detects damage.

The encoding is JSON: `{"tidevoy": <kind>, "version": <format>, "sha256": <of the content>, "content": ...}`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

_CHUNK_DEPTH = 3  # levels down to a node of a plan, or to a step of a rollout


class DecodeError(Exception):
    """Encoded data is unusable; the message continues "because ..."."""


class WrittenByNewer(DecodeError):
    """A newer Tidevoy wrote the data, so this version must not discard it."""


class VersionedCodec(Generic[T]):
    """Encodes frozen dataclasses of one type as bytes, and decodes them.

    `version` is the format version. A new field with a default needs no new version, because data without the
    field stays readable. Data of another format version is rejected. Data with more fields than `value_type`
    was written by a newer Tidevoy, and is rejected too, so that nothing in it is lost silently.
    """

    def __init__(self, kind: str, version: int, value_type: type[T]) -> None:
        self._kind, self._version = kind, version
        # Inside a tuple, the dataclass and all dataclasses in it use the config of the adapter.
        self._adapter = TypeAdapter(tuple[value_type], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]

    def encode(self, value: T, writer: str = "") -> bytes:
        """Return the value as bytes; `writer` makes encodings of equal values distinguishable."""
        content = _canonical_json(_to_json_types(value))
        writer_field = {"by": writer} if writer else {}
        header = json.dumps(
            {"tidevoy": self._kind, "version": self._version, **writer_field, "sha256": _checksum(content)}
        )
        return header[:-1].encode() + b', "content": ' + content + b"}\n"

    def decode(self, raw: bytes) -> T:
        """Return the value encoded in these bytes. Raises DecodeError, or its subclass WrittenByNewer."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            raise DecodeError("it is not JSON, so it is truncated or was not written by Tidevoy") from None
        if (
            not isinstance(document, dict)
            or document.get("tidevoy") != self._kind
            or "content" not in document
        ):
            raise DecodeError(f"it does not contain Tidevoy's {self._kind}")
        version = document.get("version")
        if version != self._version:
            is_newer = isinstance(version, int) and version > self._version
            error = WrittenByNewer if is_newer else DecodeError
            raise error(f"it has format {version}, and this Tidevoy reads {self._version}")
        content = document["content"]
        try:
            checksum_matches = document.get("sha256") == _checksum(_canonical_json(content))
        except ValueError:  # NaN or infinity, which JSON does not have but Python reads
            checksum_matches = False
        if not checksum_matches:
            raise DecodeError("its checksum does not match, so it is damaged or was edited")
        try:
            value: T = self._adapter.validate_python((content,))[0]
            return value
        except ValidationError as invalid:
            # The checksum matches, so the data is not damaged: another version wrote it.
            errors = invalid.errors(include_url=False)
            if any(error["type"] == "unexpected_keyword_argument" for error in errors):
                raise WrittenByNewer(
                    "a newer Tidevoy wrote fields to it that this version does not know"
                ) from None
            location = ".".join(map(str, errors[0]["loc"][1:])) or "the top level"
            raise WrittenByNewer(
                f"another Tidevoy wrote a value that this version does not know, at {location}"
            ) from None


def _to_json_types(value: Any) -> Any:
    """Convert dataclasses and collections to JSON types. Scalars are checked first: a plan has 100,000."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        return {name: _to_json_types(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_to_json_types(item) for item in value]
    if isinstance(value, frozenset):
        return [_to_json_types(item) for item in sorted(value)]
    return {key: _to_json_types(item) for key, item in value.items()}


def _canonical_json(content: Any) -> bytes:
    # Lone surrogates, which JSON from PD may contain, have no UTF-8 form: they become question marks.
    return _dump_in_chunks(content, _CHUNK_DEPTH).encode("utf-8", "replace")


def _dump_in_chunks(content: Any, depth: int) -> str:
    """Return JSON with sorted keys; the outer `depth` levels are joined in Python.

    `json.dumps` blocks all other threads until it is done: for a plan of 5,000 nodes in one call, it would
    block the event loop for a tenth of a second.
    """
    if depth and isinstance(content, dict):
        items = (
            f"{_dump_in_chunks(key, 0)}:{_dump_in_chunks(content[key], depth - 1)}" for key in sorted(content)
        )
        return f"{{{','.join(items)}}}"
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
