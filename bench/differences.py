"""What the side-by-side benchmark found of its peers: figures, ratios, and which differences count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import comparison, targets

Table = Mapping[str, Any]  # one of the document's `tables`
Peer = Mapping[str, Any]  # one of a table's `peers`

NONE = "none"  # what a difference is called that is no greater than that within the A/A pair

_DIGITS = {name: digits for name, _, digits in comparison.FIGURES}


@dataclass(frozen=True, slots=True)
class Range:
    """Median and extremes of what the rounds gave for one figure, or for the ratio of one."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, kept: Mapping[str, float]) -> Range:
        """As the document has it."""
        return cls(kept["median"], kept["min"], kept["max"])


def figure(peer: Peer, name: str) -> Range | None:
    """A figure of a peer; None when it has none."""
    kept = peer["figures"].get(name)
    return Range.of(kept) if kept else None


def ratio(peer: Peer, name: str) -> Range | None:
    """The ratio of a peer's figure to the reference's of the same round; None when it has none."""
    kept = peer["ratios"].get(name)
    return Range.of(kept) if kept else None


def number(value: float, name: str) -> str:
    """A value of this figure, with its digits."""
    return f"{value:,.{_DIGITS[name]}f}"


def peer_named(table: Table, name: str) -> Peer | None:
    """The peer of this name; None when it had no part in the table."""
    return next((peer for peer in table["peers"] if peer["name"] == name), None)


def chance(table: Table, name: str) -> float:
    """How far the ratio of the A/A pair was from 1 in any round; infinite when there was no such pair."""
    again = peer_named(table, table["again"])
    spread = ratio(again, name) if again is not None else None
    return math.inf if spread is None else targets.chance((spread.low, spread.high))


def counts(table: Table, peer: Peer, name: str) -> bool:
    """Whether a peer differs from the reference by more than chance makes."""
    found = ratio(peer, name)
    return found is not None and abs(found.median - 1) > chance(table, name)


def in_words(table: Table, peer: Peer | None, name: str) -> str:
    """The ratio, with `none` before it when that is no difference; `-` when there is none."""
    found = ratio(peer, name) if peer is not None else None
    if peer is None or found is None:
        return "-"
    return f"{found.median:.2f}" if counts(table, peer, name) else f"{NONE} ({found.median:.2f})"


def present(peers: Iterable[Peer], part: str) -> list[tuple[str, str]]:
    """Names and heads of the figures that any of the peers has under `part` (`figures` or `ratios`)."""
    found = {name for peer in peers for name in peer[part]}
    return [(name, head) for name, head, _ in comparison.FIGURES if name in found]


def compared(table: Table) -> Iterator[Peer]:
    """The peers that are compared with the reference: neither itself nor its second run."""
    return (peer for peer in table["peers"] if peer["name"] not in (table["reference"], table["again"]))


def title(table: Table) -> str:
    """Workload and setting."""
    workers = "1 worker" if table["workers"] == 1 else f"{table['workers']} workers"
    return f"{table['workload']}; {table['threads']:,} clients, {workers}"


def one_of_each_workload(tables: Sequence[Table]) -> list[Table]:
    """Of each workload the table with the fewest workers, and of those the one with the most clients."""
    best: dict[str, Table] = {}
    for table in tables:
        seen = best.setdefault(table["workload"], table)
        if (table["workers"], -table["threads"]) < (seen["workers"], -seen["threads"]):
            best[table["workload"]] = table
    return list(best.values())
