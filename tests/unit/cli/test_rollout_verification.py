"""The parts of `tidevoy rollout` for verified rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.schemas.verifications import VerificationDetails
from cli.main import run
from cli.rollouts import plan_lines
from controlplane.model.comparison import Comparison, VerificationReport
from controlplane.verification.verdict import judge, shorten_report
from tests.support.controlplane.cli_process import fake_http
from tests.support.controlplane.comparisons import (
    SAME,
    comparison_with,
    digest_comparison,
    upgrade_with_problems,
)

SPEC: dict[str, Any] = {
    "nodes": ["a:1"],
    "action": "restart",
    "max_unavailable": 1,
    "drain_deadline_seconds": 60,
    "on_deadline": "keep",
    "return_deadline_seconds": 90,
    "healthy_for_seconds": 10,
    "version": "",
    "failure_budget": 0,
    "selector": "all",
    "verify": "replay:monday",
    "verify_ratio": 2.0,
}


def details_of(comparison: Comparison) -> dict[str, Any]:
    """Return the answer of the REST call."""
    report = VerificationReport("a:1", "b:1", 1.0, "monday", 1.5, comparison, judge(comparison))
    return VerificationDetails.model_validate(shorten_report(report)).model_dump(mode="json")


def test_plan_names_the_comparison() -> None:
    assert plan_lines({"spec": SPEC})[4:6] == [
        "4. compare it with an old node, on reads of monday; pause if a statement takes 2 times as long or"
        " has a new error",
        "5. undrain it, and let it warm up",
    ]


def test_start_sends_the_capture_and_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"spec": SPEC, "warnings": [], "problems": [], "problems_despite_force": []}
    requests = fake_http(monkeypatch, lambda _: plan)
    start = ["rollout", "start", "--nodes", "all", "--dry-run"]
    assert run([*start, "--verify", "replay:monday", "--verify-ratio", "2"]) == 0
    body = json.loads(requests[0].content)
    assert (body["verify"], body["verify_ratio"]) == ("replay:monday", 2.0)
    assert run([*start, "--verify", "replay:monday", "--verify-ratio", "inf"]) == 2
    assert run(start) == 0
    assert "verify" not in json.loads(requests[1].content), "older control planes would reject it"


def test_resume_may_skip_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"id": "r-1", "phase": "running", "reason": "", "created_by": "anna", "spec": SPEC, "steps": []}
    requests = fake_http(monkeypatch, lambda _: answer)
    assert run(["rollout", "resume", "r-1", "--skip-verification"]) == 0
    assert run(["rollout", "resume", "r-1"]) == 0
    assert [str(request.url.raw_path, "ascii") for request in requests] == [
        "/v1/rollouts/r-1/resume?skip_verification=true",
        "/v1/rollouts/r-1/resume",
    ]


def test_verification_shows_the_comparison_and_fails_if_the_node_is_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = fake_http(monkeypatch, lambda _: details_of(upgrade_with_problems()))
    page = tmp_path / "page.html"
    assert run(["rollout", "verification", "r-1", "a:1", "--html", str(page)]) == 1
    assert requests[0].url.raw_path == b"/v1/rollouts/r-1/verifications/a%3A1"
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("a:1 compared with b:1, on reads of the capture monday, 1970-01-01 ")
    assert shown[2].split()[:2] == ["ERROR", "ONLY"]
    assert any(line.startswith("new error 1146 (7 times)") for line in shown)
    assert "<h1>Comparison of b:1 (old) and a:1 (new)</h1>" in page.read_text()


def test_verification_prints_json_of_a_node_that_has_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = details_of(comparison_with(digest_comparison(SAME, 1.0)))
    fake_http(monkeypatch, lambda _: answer)
    assert run(["rollout", "verification", "r-1", "a:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
