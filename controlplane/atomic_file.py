"""One value kept in one file that is always whole: a reader finds the old value or the new one.

The file is JSON: `{"tidevoy": <kind>, "version": <format>, "sha256": <of the content>, "content": ...}`. What
is found there and cannot be used is moved aside and reported; nothing is deleted or overwritten unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from controlplane.cancellation import uninterrupted

T = TypeVar("T")
Upgrades = Mapping[int, Callable[[Any], Any]]


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What a file held: its value, or None when there is no file or its content could not be used."""

    value: T | None
    damage: str = ""  # what could not be used, and where it was put, as a sentence


class AtomicFile(Generic[T]):
    """A file that holds one frozen dataclass. Only one process may write it (see `controlplane.state`).

    `version` is the format's. A new field that has a default needs no new version: older files lack it. A
    file with more fields than `shape` was written by a newer Tidevoy and is treated as foreign, so that
    nothing in it is lost without a word. `upgrades` make this format's content of an older one's, by its
    version.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        version: int,
        shape: type[T],
        upgrades: Upgrades = MappingProxyType({}),
    ) -> None:
        self.path = path
        self._upgrades = upgrades
        self._kind, self._version, self._shape = kind, version, TypeAdapter(shape)
        self._writing = asyncio.Lock()

    async def read(self) -> Kept[T]:
        """The value, as of the last write. OSError when the file cannot be read at all or not moved aside."""
        return await asyncio.to_thread(self._read)

    async def write(self, value: T) -> None:
        """Returns when the value is on disk for good. OSError, and then the file is as it was.

        A cancelled write is finished first: a thread that still writes while the next write begins could
        bring back an older value.
        """
        async with self._writing:
            await uninterrupted(asyncio.to_thread(self._write, value))

    def _read(self) -> Kept[T]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return Kept(None)
        try:
            return Kept(self._decode(raw))
        except _Unusable as unusable:
            aside = self._move_aside()
            return Kept(None, f"{self.path} could not be used, because {unusable}; it is kept as {aside}")

    def _decode(self, raw: bytes) -> T:
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            raise _Unusable("it is not JSON, so it is torn or was not written by Tidevoy") from None
        if (
            not isinstance(document, dict)
            or document.get("tidevoy") != self._kind
            or "content" not in document
        ):
            raise _Unusable(f"it does not hold {self._kind} of Tidevoy")
        version = document.get("version")
        if version not in (self._version, *self._upgrades):
            raise _Unusable(f"it has format {version}, and this Tidevoy reads {self._version}")
        content = document["content"]
        if document.get("sha256") != _checksum(_canonical(content)):
            raise _Unusable("its checksum does not match, so it is torn or was edited")
        if version != self._version:
            content = self._upgrades[version](content)
        try:
            value = self._shape.validate_python(content)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            raise _Unusable(f"{'.'.join(map(str, first['loc']))} in it has no valid value") from None
        if not _holds_all(_plain(value), content):
            raise _Unusable("a newer Tidevoy wrote things to it that this one does not know")
        return value

    def _write(self, value: T) -> None:
        content = _canonical(_plain(value))
        head = json.dumps({"tidevoy": self._kind, "version": self._version, "sha256": _checksum(content)})
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(head[:-1].encode() + b', "content": ' + content + b"}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(self.path.parent)

    def _move_aside(self) -> Path:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{number}")
        os.rename(self.path, aside)
        _sync_directory(self.path.parent)
        return aside


class _Unusable(Exception):
    """Why the content of a file cannot be used, to be put after "because"."""


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
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(path: Path) -> None:
    """Makes a rename durable: syncing a file does not sync the directory that names it, see fsync(2)."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
