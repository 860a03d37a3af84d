"""Contents and changes of an etcd store as frozen data. Keys are text, values are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of one key. `lease` is 0 if the key has no lease."""

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
    """A key that was written, or (if `value` is None) deleted, possibly because its lease expired."""

    key: str
    value: bytes | None
    mod_revision: int = field(default=0, compare=False)  # not compared: it does not identify the change


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """All changes after the previous batch and up to `revision`, in order.

    A batch without changes means that nothing changed up to `revision`. The first batch of a watch has no
    changes and means that the watch is established.
    """

    revision: int
    changes: tuple[KeyChange, ...] = ()


def decode_key(key: bytes) -> str:
    """Return the text of a key. Bytes that are not UTF-8 become `\\xNN`, which no Tidevoy key contains."""
    return key.decode(errors="backslashreplace")


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix. The prefix must contain a byte below 0xff."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes((trimmed[-1] + 1,))
