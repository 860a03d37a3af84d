"""Failures during a migration: every step with every fault, the expected results, and their table.

The steps are those of filters/session/src/limits.rs, `enter` in its two halves, and the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MIGRATION_STEPS = ("connect", "tls", "wait", "export", "login", "states", "switch", "undo")

OUTCOME_TABLE = """
target: refused                   gone a a a a a a a
target: silent                    slow slow b b slow slow c d
target: byte by byte, late        moves moves b b moves moves moves d
target: FIN                       gone gone gone gone gone ends ends d
target: RST                       gone gone gone gone gone ends ends d
target: gone                      gone gone gone gone gone gone ends d
target: ERR                       invalid gone invalid invalid denied not_restored ERR-1053 d
target: garbage                   invalid gone invalid invalid invalid invalid invalid d
target: wrong certificate         e gone e e e e e e
target: expired token             e e e e denied e e e
target: older, rejects states     e e e e e not_restored e e
target: dies during a statement   c c c c c c ends d
target: gone, another available   moves moves moves moves moves moves moves d
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
old node: unreadable states       e e e states e e e e
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
Envoy: drain deadline             ERR-1053 ERR-1053 ends ERR-1053 ERR-1053 ERR-1053 i ERR-1053
"""
"""One line per fault. A letter is the reason to skip the case, else it is the result (see `FailureCase`).

A node that is `gone` has closed its port before. If it listens, a KILL has ended the idle connection.
"""

SKIP_REASONS: Mapping[str, str] = {
    "a": "a connection can only be refused before it is established",
    "b": "no data is expected from the target in this step",
    "c": "the session is not there yet, or from then on the failure is the session's own",
    "d": "the target was already given up",
    "e": "it is checked in one step only",
    "f": "what the old node sends in this step is the response to the client's statement",
    "g": "the old node gets no request in this step",
    "h": "a session does not migrate before its last response was read",
    "i": "the order of the two events is undefined",
}

_STAY_REASONS = {"gone", "slow", "invalid", "denied", "not_restored", "refused", "no_token", "states"}


@dataclass(frozen=True)
class FailureCase:
    """One fault in one step.

    `result`: `moves`; `ends` (by FIN, without an error); `ERR-nnnn` (the client gets this error and the
    session ends); `served` (the session continues where it is, whatever the migration's result); `lost` (like
    ERR-1053, and the migration counts as lost); otherwise the session stays for this reason (`gone`:
    unreachable).
    """

    fault: str
    step: str
    result: str

    @property
    def outcome(self) -> str:
        """The result in the printed table."""
        if self.result in _STAY_REASONS or self.result == "served":
            return "stays"
        return "ERR 1053" if self.result == "lost" else self.result.replace("-", " ")

    @property
    def reason(self) -> str:
        """The reason of the failed migration; empty: it did not fail, or is not counted."""
        if self.result == "gone":
            return "unreachable"
        return self.result if self.result in _STAY_REASONS or self.result == "lost" else ""

    def __str__(self) -> str:
        return f"{self.fault.partition(': ')[2]} - {self.step}"


def _parse_table() -> Iterator[tuple[str, list[str]]]:
    for line in OUTCOME_TABLE.strip().splitlines():
        fault, results = re.split(r"  +", line, maxsplit=1)
        yield fault, results.split()


def failure_cases(side: str, *faults: str) -> list[FailureCase]:
    """Return the cases of one side; with `faults`, only these."""
    return [
        FailureCase(fault, step, result)
        for fault, results in _parse_table()
        for step, result in zip(MIGRATION_STEPS, results, strict=True)
        if fault.startswith(f"{side}: ")
        and result not in SKIP_REASONS
        and (not faults or fault.partition(": ")[2] in faults)
    ]


def format_results(passed: Mapping[tuple[str, str], bool]) -> Iterable[str]:
    """Yield the lines of the result table. `passed`: by fault and step, of the executed cases."""
    yield f"{'':34}{''.join(f'{step:10}' for step in MIGRATION_STEPS)}".rstrip()
    used_letters: set[str] = set()
    for fault, results in _parse_table():
        if not any(passed_fault == fault for passed_fault, _ in passed):
            continue
        cells = []
        for step, result in zip(MIGRATION_STEPS, results, strict=True):
            if result in SKIP_REASONS:
                used_letters.add(result)
                cells.append(f"- {result}")
            elif (has_passed := passed.get((fault, step))) is None:
                cells.append("not run")
            else:
                cells.append(FailureCase(fault, step, result).outcome if has_passed else "FAILED")
        yield f"{fault:34}{''.join(f'{cell:10}' for cell in cells)}".rstrip()
    for letter in sorted(used_letters):
        yield f"- {letter}: {SKIP_REASONS[letter]}"
