"""Frozen data types of an etcd store's contents and changes. Keys are text, values are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of one key. `lease` is 0 if the key has none."""

    value: bytes
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix at one revision of the store."""

    entries: Mapping[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that was written, or deleted (its value is None), also by an expired lease."""

    key: str
    value: bytes | None
    mod_revision: int = field(default=0, compare=False)  # of the change; not part of its identity


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in order; after them, everything up to `revision` is known.

    All changes of one revision are in the same batch. A batch without changes only says that nothing changed
    up to `revision`; the first batch of a watch is empty and says that the watch is established.
    """

    revision: int
    changes: tuple[KeyChange, ...] = ()


def encode_key(key: str) -> bytes:
    """Return the bytes of a key."""
    return key.encode()


def decode_key(key: bytes) -> str:
    """Return the text of a key. Bytes that are not UTF-8 become `\\xNN`, which no Tidevoy key contains."""
    return key.decode(errors="backslashreplace")


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`, which must have a byte below 0xff."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes((trimmed[-1] + 1,))
