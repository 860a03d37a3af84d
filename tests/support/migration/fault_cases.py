"""What may fail while a session moves: every step with every way, what comes of it, and the table of that.

The steps are those of filters/session/src/limits.rs, `enter` in its two halves, and the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MIGRATION_STEPS = ("connect", "tls", "wait", "export", "login", "states", "switch", "undo")

OUTCOME_TABLE = """
target: refused                   gone a a a a a a a
target: says nothing              slow slow b b slow slow c d
target: byte by byte, late        moves moves b b moves moves moves d
target: FIN                       gone gone gone gone gone ends ends d
target: RST                       gone gone gone gone gone ends ends d
target: gone                      gone gone gone gone gone gone ends d
target: ERR                       invalid gone invalid invalid denied not_restored ERR-1053 d
target: garbage                   invalid gone invalid invalid invalid invalid invalid d
target: wrong certificate         e gone e e e e e e
target: expired token             e e e e denied e e e
target: older, refuses states     e e e e e not_restored e e
target: dies under a statement    c c c c c c ends d
target: gone, another is there    moves moves moves moves moves moves moves d
old node: sends bytes             served served f lost moves moves moves moves
old node: ERR 1053 and FIN        ERR-1053 ERR-1053 ERR-1053 ends ends ends ends ends
old node: FIN                     ends ends ends ends ends ends ends ends
old node: RST                     ends ends ends ends ends ends ends ends
old node: gone, ERR 1053 and FIN  ERR-1053 ERR-1053 ERR-1053 ends moves moves moves moves
old node: gone, FIN               ends ends ends lost moves moves moves moves
old node: gone, RST               ends ends ends lost moves moves moves moves
old node: byte by byte            g g moves moves g g g denied
old node: late                    g g moves slow g g g denied
old node: ERR 8146                g g f refused g g g denied
old node: has no certificate      e e e no_token e e e e
old node: states nobody can read  e e e states e e e e
client: FIN                       ends ends ends ends ends ends ends ends
client: RST                       ends ends ends ends ends ends ends ends
client: COM_QUIT                  ends ends ends ends ends ends ends ends
client: pipelined commands        moves moves moves moves moves moves moves denied
client: 20 MiB statement          moves moves moves moves moves moves moves denied
client: 10 MiB result, unread     moves moves moves h h h h h
Envoy: SIGTERM                    ends ends ends ends ends ends ends ends
Envoy: cluster replaced           moves moves moves moves moves moves moves denied
Envoy: listener removed           ends ends ends ends ends ends ends ends
Envoy: no descriptors             moves moves moves moves moves moves moves denied
Envoy: deadline of the drain      ERR-1053 ERR-1053 ends ERR-1053 ERR-1053 ERR-1053 i ERR-1053
"""
"""One line for each way to fail. A letter says why there is nothing to try, else the result (see `Case`).

A node that is `gone` has closed its port before. If it listens, a KILL has ended the idle connection.
"""

SKIP_REASONS: Mapping[str, str] = {
    "a": "a connection can be refused only before it is there",
    "b": "nothing is expected of the target then",
    "c": "the session is not there yet, or it is the session's own affair from then on",
    "d": "the target was given up before that",
    "e": "it is looked at in one step only",
    "f": "what the old node says then is the answer to the client's statement",
    "g": "nothing is asked of the old node then",
    "h": "a session does not depart before its last answer was read",
    "i": "which of them comes first is open",
}

_STAY_REASONS = {"gone", "slow", "invalid", "denied", "not_restored", "refused", "no_token", "states"}


@dataclass(frozen=True)
class FailureCase:
    """What is tried.

    `result`: `moves`; `ends` (by FIN, without a word); `ERR-nnnn` (the client is told so, it ends);
    `served` (it goes on where it is, whatever comes of the move); `lost` (as ERR-1053, and the move is
    counted as lost); else it stays for this reason (`gone`: unreachable).
    """

    fault: str
    step: str
    result: str

    @property
    def outcome(self) -> str:
        """As it is told."""
        if self.result in _STAY_REASONS or self.result == "served":
            return "stays"
        return "ERR 1053" if self.result == "lost" else self.result.replace("-", " ")

    @property
    def reason(self) -> str:
        """Of the move that failed; empty: it did not, or nobody counts it."""
        if self.result == "gone":
            return "unreachable"
        return self.result if self.result in _STAY_REASONS or self.result == "lost" else ""

    def __str__(self) -> str:
        return f"{self.fault.partition(': ')[2]} - {self.step}"


def _parse_table() -> Iterator[tuple[str, list[str]]]:
    for line in OUTCOME_TABLE.strip().splitlines():
        way, results = re.split(r"  +", line, maxsplit=1)
        yield way, results.split()


def failure_cases(side: str, *faults: str) -> list[FailureCase]:
    """Those of one side; with `ways`, only these."""
    return [
        FailureCase(way, step, result)
        for way, results in _parse_table()
        for step, result in zip(MIGRATION_STEPS, results, strict=True)
        if way.startswith(f"{side}: ")
        and result not in SKIP_REASONS
        and (not faults or way.partition(": ")[2] in faults)
    ]


def format_results(passed: Mapping[tuple[str, str], bool]) -> Iterable[str]:
    """Lines that tell what came of them. `passed`: by way and step, of those that were tried."""
    yield f"{'':34}{''.join(f'{step:10}' for step in MIGRATION_STEPS)}".rstrip()
    used: set[str] = set()
    for way, results in _parse_table():
        if not any(tried == way for tried, _ in passed):
            continue
        cells = []
        for step, result in zip(MIGRATION_STEPS, results, strict=True):
            if result in SKIP_REASONS:
                used.add(result)
                cells.append(f"- {result}")
            elif (tried := passed.get((way, step))) is None:
                cells.append("not run")
            else:
                cells.append(FailureCase(way, step, result).outcome if tried else "FAILED")
        yield f"{way:34}{''.join(f'{cell:10}' for cell in cells)}".rstrip()
    for letter in sorted(used):
        yield f"- {letter}: {SKIP_REASONS[letter]}"
