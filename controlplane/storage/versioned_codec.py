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

_DEEP = 3  # levels down to a node of a plan, or to a step of a rollout


class Unusable(Exception):
    """Why what was found cannot be used, to be put after "because"."""


class Envelope(Generic[T]):
    """Frozen dataclasses of one shape, as bytes and back.

    `version` is the format's. A new field that has a default needs no new version: what is older lacks it.
    With more fields than `shape` it was written by a newer Tidevoy and is treated as foreign, so that nothing
    in it is lost without a word. `upgrades` make this format's content of an older one's, by its version.
    """

    def __init__(
        self, kind: str, version: int, shape: type[T], upgrades: Upgrades = MappingProxyType({})
    ) -> None:
        self._upgrades = upgrades
        self._kind, self._version, self._shape = kind, version, TypeAdapter(shape)

    def seal(self, value: T, by: str = "") -> bytes:
        """The value as bytes; `by` names who writes it, so that equal values can be told apart."""
        content = _canonical(_plain(value))
        named = {"by": by} if by else {}
        head = json.dumps(
            {"tidevoy": self._kind, "version": self._version, **named, "sha256": _checksum(content)}
        )
        return head[:-1].encode() + b', "content": ' + content + b"}\n"

    def open(self, raw: bytes) -> T:
        """The value that these bytes stand for. Unusable."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            raise Unusable("it is not JSON, so it is torn or was not written by Tidevoy") from None
        if (
            not isinstance(document, dict)
            or document.get("tidevoy") != self._kind
            or "content" not in document
        ):
            raise Unusable(f"it does not hold {self._kind} of Tidevoy")
        version = document.get("version")
        if version not in (self._version, *self._upgrades):
            raise Unusable(f"it has format {version}, and this Tidevoy reads {self._version}")
        content = document["content"]
        try:
            is_whole = document.get("sha256") == _checksum(_canonical(content))
        except ValueError:  # a number that JSON does not have, and Python reads all the same
            is_whole = False
        if not is_whole:
            raise Unusable("its checksum does not match, so it is torn or was edited")
        if version != self._version:
            content = self._upgrades[version](content)
        try:
            value = self._shape.validate_python(content)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            raise Unusable(f"{'.'.join(map(str, first['loc']))} in it has no valid value") from None
        if not _holds_all(_plain(value), content):
            raise Unusable("a newer Tidevoy wrote things to it that this one does not know")
        return value


def _plain(value: Any) -> Any:
    """Dataclasses and collections as what JSON knows. Scalars come first: a plan has 100,000 of them."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return [_plain(item) for item in sorted(value)]
    return {key: _plain(item) for key, item in value.items()}


def _holds_all(whole: Any, part: Any) -> bool:
    """Whether every key of `part` is in `whole` too, at every level."""
    if isinstance(part, dict):
        return all(key in whole and _holds_all(whole[key], item) for key, item in part.items())
    if isinstance(part, list):
        return all(_holds_all(one, other) for one, other in zip(whole, part, strict=True))
    return True


def _canonical(content: Any) -> bytes:
    # Lone surrogates, which JSON from PD may hold, have no UTF-8 form: they become question marks.
    return _dumped(content, _DEEP).encode("utf-8", "replace")


def _dumped(content: Any, deep: int) -> str:
    """JSON with sorted keys, so many levels of it put together here.

    `json.dumps` lets no other thread run before it is done: a plan of 5,000 nodes at once would hold up the
    event loop for a tenth of a second.
    """
    if deep and isinstance(content, dict):
        items = (f"{_dumped(key, 0)}:{_dumped(content[key], deep - 1)}" for key in sorted(content))
        return f"{{{','.join(items)}}}"
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
