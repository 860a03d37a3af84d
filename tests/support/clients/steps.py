"""The steps that every client runs, and what it tells of each."""

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
"""In this order; what each does is said in tests/support/clients/python/script.py."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of one client. `ok` None: the client cannot do that, and `detail` says why."""

    step: str
    is_ok: bool | None
    detail: str
    seconds: float

    @classmethod
    def parse(cls, line: str) -> StepResult:
        """From the line of JSON that a client prints. ValueError or KeyError when it is none."""
        said = json.loads(line)
        return cls(said["step"], said["ok"], said["detail"], said["seconds"])

    @property
    def label(self) -> str:
        """As a table shows it."""
        return {True: "ok", None: "n/a", False: "FAILED"}[self.is_ok]


def compare_results(expected: list[StepResult], actual: list[StepResult]) -> list[str]:
    """What came out otherwise than it should, one line a step; times may differ."""
    told = {outcome.step: outcome for outcome in actual}
    lines = []
    for want in expected:
        have = told.get(want.step)
        if have is None:
            lines.append(f"{want.step}: was not run")
        elif (have.is_ok, have.detail) != (want.is_ok, want.detail):
            lines.append(f"{want.step}: {have.label} ({have.detail}), not {want.label} ({want.detail})")
    return lines
