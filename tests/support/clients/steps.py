"""The steps that every client runs, and their results."""

from __future__ import annotations

import json
from dataclasses import dataclass

STEPS = (
    "login",
    "wrong_password",
    "ping",
    "query_text",
    "query_prepared",
    "transactions",
    "rows_text",
    "rows_prepared",
    "blob_text",
    "blob_prepared",
    "multi",
    "batch",
    "cursor",
    "load_data",
    "change_user",
    "reset",
    "kill",
    "cut",
)
"""The steps in their order. tests/support/clients/python/script.py documents each step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `is_ok` is None if the client does not support the step; `detail` has the reason."""

    step: str
    is_ok: bool | None
    detail: str
    seconds: float

    @classmethod
    def parse(cls, line: str) -> StepResult:
        """Parse the JSON line that a client prints. Raises ValueError or KeyError if it is invalid."""
        result = json.loads(line)
        return cls(result["step"], result["ok"], result["detail"], result["seconds"])

    @property
    def label(self) -> str:
        """The text in the table that matrix.py prints."""
        return {True: "ok", None: "n/a", False: "FAILED"}[self.is_ok]


def compare_results(expected: list[StepResult], actual: list[StepResult]) -> list[str]:
    """Return the differences, one line per step. Times are not compared."""
    actual_by_step = {outcome.step: outcome for outcome in actual}
    lines = []
    for want in expected:
        have = actual_by_step.get(want.step)
        if have is None:
            lines.append(f"{want.step}: was not run")
        elif (have.is_ok, have.detail) != (want.is_ok, want.detail):
            lines.append(f"{want.step}: {have.label} ({have.detail}), not {want.label} ({want.detail})")
    return lines
