"""What a module has counted on one node, as a row of numbers with a place for each series.

There is a row for each Envoy and node: half a million of them for 5,000 nodes and 100 Envoys. So a row is
small, and is made into `Traffic` only for those who look at it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from controlplane.model.traffic import (
    BOUNDS,
    COMMANDS,
    CONNECT_FAILURES,
    DIRECTIONS,
    ERRORS,
    LOGIN_FAILURES,
    MOVES,
    NO_BUCKETS,
    PIN_REASONS,
    STATES,
    Moves,
    Traffic,
)

Row: TypeAlias = "array[float]"
"""The latest values, by place; -1 where nothing was ever told. Doubles, as Envoy sends them."""

_NEVER = -1.0
_BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
_MOVES = {f"{result}/{why}": (result, why) for result, why in MOVES}
_ALONE = ("",)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is counted: the label beside `node`, and the values that it may have.

    With a second label (`also`) a word is both values with a slash between them.
    """

    label: str = ""
    words: tuple[str, ...] = _ALONE
    also: str = ""


FAMILIES: Mapping[str, Family] = {
    "sessions": Family("state", STATES),
    "sessions_pinned": Family("reason", PIN_REASONS),
    "logins": Family(),
    "login_failures": Family("reason", LOGIN_FAILURES),
    "connect_failures": Family("reason", CONNECT_FAILURES),
    "commands": Family("kind", COMMANDS),
    "command_seconds_bucket": Family("le", _BUCKETS),
    "command_microseconds": Family(),
    "errors": Family("class", ERRORS),
    "bytes": Family("direction", DIRECTIONS),
    "migrations": Family("result", tuple(_MOVES), also="reason"),
    "migration_seconds_bucket": Family("le", _BUCKETS),
    "migration_microseconds": Family(),
}


def _laid_out() -> tuple[dict[tuple[str, str], int], dict[str, slice]]:
    places: dict[tuple[str, str], int] = {}
    spans = {}
    for name, family in FAMILIES.items():
        spans[name] = slice(len(places), len(places) + len(family.words))
        places |= {(name, word): len(places) + index for index, word in enumerate(family.words)}
    return places, spans


PLACES, _SPANS = _laid_out()
"""Where in a row a series stands, by its family and word."""
_SESSIONS, _MIGRATIONS = _SPANS["sessions"], _SPANS["migrations"]
_COMMAND_SECONDS, _MOVE_SECONDS = _SPANS["command_seconds_bucket"], _SPANS["migration_seconds_bucket"]
_ALL_COMMANDS = PLACES["command_seconds_bucket", "+Inf"]


_NOTHING: Row = array("d", (_NEVER,)) * len(PLACES)
_NO_MOVES = _NOTHING[_MIGRATIONS]


class Tally:
    """What the module in one Envoy has told, by node.

    Rows that others may hold are never changed, but replaced.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.fresh: set[str] = set()  # nodes whose rows nobody else holds
        self._sessions: dict[str, int] = {}  # of nodes that have some
        self._moves: dict[str, Moves] = {}  # likewise

    def note(self, node: str, place: int, value: float) -> None:
        """The latest value of a series."""
        if node not in self.fresh:
            self.rows[node] = self.rows.get(node, _NOTHING)[:]
            self.fresh.add(node)
        self.rows[node][place] = value

    def keep(self, known: Set[str]) -> None:
        """Forget all other nodes."""
        for node in self.rows.keys() - known:
            del self.rows[node]
            for part in (self._sessions, self._moves):
                part.pop(node, None)
            self.fresh.discard(node)

    def all(self) -> Mapping[str, Row]:
        """All that was told up to now."""
        for node in self.fresh:
            told = self.rows[node]
            self._sessions[node] = int(sum(count for count in told[_SESSIONS] if count > 0))
            if not self._sessions[node]:
                del self._sessions[node]
            if told[_MIGRATIONS] != _NO_MOVES:
                self._moves[node] = _moves(told)
        self.fresh.clear()
        return dict(self.rows)

    def sessions(self) -> Mapping[str, int]:
        """Sessions in all states, of nodes that have some, as of the last time that `all` was asked."""
        return {node: count for node, count in self._sessions.items() if node}

    def moves(self) -> Mapping[str, Moves]:
        """Tries to move sessions away from nodes, of those that have some, as of then too."""
        return dict(self._moves)


def latency(rows: Mapping[str, Row]) -> Mapping[str, Row]:
    """What `traffic` needs of an earlier time: the latencies of nodes that had commands."""
    return {node: told[_COMMAND_SECONDS] for node, told in rows.items() if told[_ALL_COMMANDS] >= 0}


def traffic(told: Row, then: Row | None) -> Traffic:
    """All that was told. `then`: the latency of a while ago; None: there was none."""
    now = _buckets(told[_COMMAND_SECONDS])
    before = NO_BUCKETS if then is None else _buckets(then)
    return Traffic(
        sessions=_counts("sessions", told),
        pinned=_counts("sessions_pinned", told),
        logins=_count("logins", told),
        login_failures=_counts("login_failures", told),
        connect_failures=_counts("connect_failures", told),
        commands=_counts("commands", told),
        buckets=now,
        seconds=_count("command_microseconds", told) / 1e6,
        recent=tuple(max(0, late - early) for late, early in zip(now, before, strict=True)),
        errors=_counts("errors", told),
        bytes=_counts("bytes", told),
        moves=_moves(told),
        move_buckets=_buckets(told[_MOVE_SECONDS]),
        move_seconds=_count("migration_microseconds", told) / 1e6,
    )


def _moves(told: Row) -> Moves:
    each = zip(_MOVES.values(), told[_MIGRATIONS], strict=True)
    return MappingProxyType({key: int(count) for key, count in each if count >= 0})


def _counts(name: str, told: Row) -> Mapping[str, int]:
    each = zip(FAMILIES[name].words, told[_SPANS[name]], strict=True)
    return MappingProxyType({word: int(count) for word, count in each if count >= 0})


def _count(name: str, told: Row) -> int:
    return max(0, int(told[_SPANS[name].start]))


def _buckets(counts: Row) -> tuple[int, ...]:
    """Cumulative counts. Envoy reads one counter after the other, so a later one may lag: it never may."""
    cumulative, most = [], 0
    for count in counts:
        most = max(most, int(count))
        cumulative.append(most)
    return tuple(cumulative)
