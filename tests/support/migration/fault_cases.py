"""Failures during a migration: the expected result of each fault in each step, and a table of results.

The steps are those of filters/migration/src/timeouts.rs. Its step `enter` is divided into `login`, `states`
and `switch`, in which the target sends its last OK.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MIGRATION_STEPS = ("connect", "tls", "wait", "export", "login", "states", "switch", "undo")

OUTCOME_TABLE = """
target: refused                          unreachable a a a a a a a
target: silent                           slow slow b b slow slow c d
target: byte by byte, late               migrates migrates b b migrates migrates migrates d
target: FIN                              unreachable unreachable unreachable unreachable unreachable ends ends d
target: RST                              unreachable unreachable unreachable unreachable unreachable ends ends d
target: unreachable                      unreachable unreachable unreachable unreachable unreachable unreachable ends d
target: ERR                              invalid unreachable invalid invalid denied not_restored ERR-1053 d
target: garbage                          invalid unreachable invalid invalid invalid invalid invalid d
target: wrong certificate                e unreachable e e e e e e
target: expired token                    e e e e denied e e e
target: older, rejects states            e e e e e not_restored e e
target: dies during a statement          c c c c c c ends d
target: unreachable, another available   migrates migrates migrates migrates migrates migrates migrates d
old node: sends bytes                    served served f lost migrates migrates migrates migrates
old node: ERR 1053 and FIN               ERR-1053 ERR-1053 ERR-1053 ends ends ends ends ends
old node: FIN                            ends ends ends ends ends ends ends ends
old node: RST                            ends ends ends ends ends ends ends ends
old node: unreachable, ERR 1053 and FIN  ERR-1053 ERR-1053 ERR-1053 ends migrates migrates migrates migrates
old node: unreachable, FIN               ends ends ends lost migrates migrates migrates migrates
old node: unreachable, RST               ends ends ends lost migrates migrates migrates migrates
old node: byte by byte                   g g migrates migrates g g g denied
old node: late                           g g migrates slow g g g denied
old node: ERR 8146                       g g f refused g g g denied
old node: has no certificate             e e e no_token e e e e
old node: unreadable states              e e e states e e e e
client: FIN                              ends ends ends ends ends ends ends ends
client: RST                              ends ends ends ends ends ends ends ends
client: COM_QUIT                         ends ends ends ends ends ends ends ends
client: pipelined commands               migrates migrates migrates migrates migrates migrates migrates denied
client: 20 MiB statement                 migrates migrates migrates migrates migrates migrates migrates denied
client: 10 MiB result, unread            migrates migrates migrates h h h h h
Envoy: SIGTERM                           ends ends ends ends ends ends ends ends
Envoy: cluster replaced                  migrates migrates migrates migrates migrates migrates migrates denied
Envoy: listener removed                  ends ends ends ends ends ends ends ends
Envoy: no descriptors                    migrates migrates migrates migrates migrates migrates migrates denied
Envoy: drain deadline                    ERR-1053 ERR-1053 ends ERR-1053 ERR-1053 ERR-1053 i ERR-1053
"""  # noqa: E501
"""One line per fault, with a result per step (see `FailureCase`) or the letter of a reason to skip the case.

In a fault, `unreachable` means that the node closes its port before it ends the connection. If a node ends an
idle connection but still listens, Envoy assumes a KILL and ends the session.
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

_STAY_REASONS = {"unreachable", "slow", "invalid", "denied", "not_restored", "refused", "no_token", "states"}


@dataclass(frozen=True)
class FailureCase:
    """One fault in one step.

    `result`: `migrates`; `ends` (by FIN, without an error); `ERR-nnnn` (the client gets this error and the
    session ends); `served` (the session stays, with any result of the migration); `lost` (like ERR-1053, and
    the migration counts as lost). Other results are reasons for which the session stays.
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
        """The counted reason of the failed migration. Empty if no failure is counted."""
        return self.result if self.result in _STAY_REASONS or self.result == "lost" else ""

    def __str__(self) -> str:
        return f"{self.fault.partition(': ')[2]} - {self.step}"


def _parse_table() -> Iterator[tuple[str, list[str]]]:
    for line in OUTCOME_TABLE.strip().splitlines():
        fault, results = re.split(r"  +", line, maxsplit=1)
        yield fault, results.split()


def failure_cases(side: str, *faults: str) -> list[FailureCase]:
    """Return the cases of one side, by default with all of its faults."""
    return [
        FailureCase(fault, step, result)
        for fault, results in _parse_table()
        for step, result in zip(MIGRATION_STEPS, results, strict=True)
        if fault.startswith(f"{side}: ")
        and result not in SKIP_REASONS
        and (not faults or fault.partition(": ")[2] in faults)
    ]


def format_results(passed: Mapping[tuple[str, str], bool]) -> Iterable[str]:
    """Yield the lines of the result table. `passed`: whether an executed case passed, by fault and step."""
    yield f"{'':41}{''.join(f'{step:10}' for step in MIGRATION_STEPS)}".rstrip()
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
        yield f"{fault:41}{''.join(f'{cell:10}' for cell in cells)}".rstrip()
    for letter in sorted(used_letters):
        yield f"- {letter}: {SKIP_REASONS[letter]}"
