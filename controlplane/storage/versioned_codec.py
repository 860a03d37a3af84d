"""How one value is written down so that a reader knows whether it can trust it.

It is JSON: `{"tidevoy": <kind>, "version": <format>, "sha256": <of the content>, "content": ...}`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
Upgrades = Mapping[int, Callable[[Any], Any]]

_CHUNK_DEPTH = 3  # levels down to a node of a plan, or to a step of a rollout


class DecodeError(Exception):
    """Why what was found cannot be used, to be put after "because"."""


class VersionedCodec(Generic[T]):
    """Frozen dataclasses of one shape, as bytes and back.

    `version` is the format's. A new field that has a default needs no new version: what is older lacks it.
    With more fields than `shape` it was written by a newer Tidevoy and is treated as foreign, so that nothing
    in it is lost without a word. `upgrades` make this format's content of an older one's, by its version.
    """

    def __init__(
        self, kind: str, version: int, value_type: type[T], upgrades: Upgrades = MappingProxyType({})
    ) -> None:
        self._upgrades = upgrades
        self._kind, self._version, self._adapter = kind, version, TypeAdapter(value_type)

    def encode(self, value: T, writer: str = "") -> bytes:
        """The value as bytes; `by` names who writes it, so that equal values can be told apart."""
        content = _canonical_json(_to_json_types(value))
        writer_field = {"by": writer} if writer else {}
        header = json.dumps(
            {"tidevoy": self._kind, "version": self._version, **writer_field, "sha256": _checksum(content)}
        )
        return header[:-1].encode() + b', "content": ' + content + b"}\n"

    def decode(self, raw: bytes) -> T:
        """The value that these bytes stand for. Unusable."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            raise DecodeError("it is not JSON, so it is torn or was not written by Tidevoy") from None
        if (
            not isinstance(document, dict)
            or document.get("tidevoy") != self._kind
            or "content" not in document
        ):
            raise DecodeError(f"it does not hold {self._kind} of Tidevoy")
        version = document.get("version")
        if version not in (self._version, *self._upgrades):
            raise DecodeError(f"it has format {version}, and this Tidevoy reads {self._version}")
        content = document["content"]
        try:
            checksum_matches = document.get("sha256") == _checksum(_canonical_json(content))
        except ValueError:  # a number that JSON does not have, and Python reads all the same
            checksum_matches = False
        if not checksum_matches:
            raise DecodeError("its checksum does not match, so it is torn or was edited")
        if version != self._version:
            content = self._upgrades[version](content)
        try:
            value = self._adapter.validate_python(content)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            raise DecodeError(f"{'.'.join(map(str, first['loc']))} in it has no valid value") from None
        if not _contains_all_keys(_to_json_types(value), content):
            raise DecodeError("a newer Tidevoy wrote things to it that this one does not know")
        return value


def _to_json_types(value: Any) -> Any:
    """Dataclasses and collections as what JSON knows. Scalars come first: a plan has 100,000 of them."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        return {name: _to_json_types(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_to_json_types(item) for item in value]
    if isinstance(value, frozenset):
        return [_to_json_types(item) for item in sorted(value)]
    return {key: _to_json_types(item) for key, item in value.items()}


def _contains_all_keys(superset: Any, subset: Any) -> bool:
    """Whether every key of `part` is in `whole` too, at every level."""
    if isinstance(subset, dict):
        return all(
            key in superset and _contains_all_keys(superset[key], item) for key, item in subset.items()
        )
    if isinstance(subset, list):
        return all(_contains_all_keys(one, other) for one, other in zip(superset, subset, strict=True))
    return True


def _canonical_json(content: Any) -> bytes:
    # Lone surrogates, which JSON from PD may hold, have no UTF-8 form: they become question marks.
    return _dump_in_chunks(content, _CHUNK_DEPTH).encode("utf-8", "replace")


def _dump_in_chunks(content: Any, depth: int) -> str:
    """JSON with sorted keys, so many levels of it put together here.

    `json.dumps` lets no other thread run before it is done: a plan of 5,000 nodes at once would hold up the
    event loop for a tenth of a second.
    """
    if depth and isinstance(content, dict):
        items = (
            f"{_dump_in_chunks(key, 0)}:{_dump_in_chunks(content[key], depth - 1)}" for key in sorted(content)
        )
        return f"{{{','.join(items)}}}"
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
