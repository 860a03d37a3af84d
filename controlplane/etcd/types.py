"""What an etcd store holds and how it changes, as frozen data. Keys are text, values are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of one key. `lease` is 0 when the key has none."""

    value: bytes
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix, as they were at one revision of the store."""

    entries: Mapping[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that was written, or deleted (its value is None); an expired lease deletes, too."""

    key: str
    value: bytes | None
    mod_revision: int = field(default=0, compare=False)  # of the change; changes are known by what they say


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in their order; whoever has seen them has seen everything up to `revision`.

    All changes of one revision are in the same batch. Without changes it only says that nothing happened up
    to there; the first batch of a watch is such a one: the watch stands.
    """

    revision: int
    changes: tuple[KeyChange, ...] = ()


def encode_key(key: str) -> bytes:
    """The bytes of a key."""
    return key.encode()


def decode_key(key: bytes) -> str:
    """The text of a key. Bytes that are not UTF-8 become `\\xNN`, which no key of ours has."""
    return key.decode(errors="backslashreplace")


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all keys that begin with `prefix`, which has a byte below 0xff."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes((trimmed[-1] + 1,))
