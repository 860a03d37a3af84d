"""What the audit makes of what its tools say: nothing that was not looked at passes for good."""

from __future__ import annotations

import pytest

from tests.support.dependency_audit import (
    AuditResult,
    _run,
    check_licenses,
    has_failed,
    is_allowed,
    license_expression,
    parse_cargo_deny,
    parse_pip_audit,
)


def test_weaknesses_are_found() -> None:
    bad = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2"]}]}
    worse = {"name": "b", "version": "2", "vulns": [{"id": "GHSA-2", "fix_versions": []}]}
    outcome = parse_pip_audit("x", {"dependencies": [bad, worse, {"name": "c", "version": "3", "vulns": []}]})
    assert outcome == AuditResult("x", ("a 1: PYSEC-1, mended in 1.1", "b 2: GHSA-2"))
    assert outcome.lines()[0] == "FOUND   x"


def test_what_the_list_does_not_have_is_told() -> None:
    left_out = [{"name": name, "skip_reason": "not found"} for name in "abcde"]
    outcome = parse_pip_audit("x", {"dependencies": [*left_out, {"name": "f", "version": "3", "vulns": []}]})
    assert outcome.lines() == ["SKIPPED x: the list has nothing on 5 of 6 packages: a, b, c ..."]
    assert not has_failed([outcome], strict=False)
    assert has_failed([outcome], strict=True)


def test_crates_that_are_refused_are_found_and_a_list_that_is_away_is_told() -> None:
    assert parse_cargo_deny("x", 0, "advisories ok") == AuditResult("x")
    refused = parse_cargo_deny("x", 4, "error[vulnerability]: a hole\n  ┌─ Cargo.lock\nerror[yanked]: b\n")
    assert refused.findings == ("error[vulnerability]: a hole", "error[yanked]: b")
    assert has_failed([refused], strict=False)
    away = parse_cargo_deny("x", 1, "[ERROR] failed to fetch advisory database\nCould not resolve host\n")
    assert (away.findings, away.skip_reason) == ((), "Could not resolve host")


def test_a_tool_that_waits_for_a_network_that_is_away_ends_the_check_and_nothing_else() -> None:
    hung = _run(["sleep", "60"], timeout_seconds=0.1)
    outcome = parse_cargo_deny("x", hung.returncode, hung.stderr)
    assert (outcome.findings, outcome.skip_reason) == ((), "no answer within 0.1 s")


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND BSD-3-Clause", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR (MIT AND ISC)", True),
        ("GPL-3.0-only OR AGPL-3.0-only", False),
        ("", False),
    ],
)
def test_licences(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def test_where_packages_tell_their_licence() -> None:
    assert license_expression("MIT", "whatever", ["BSD License"]) == "MIT"
    assert license_expression(None, None, ["MIT License", "Apache Software License"]) == "MIT OR Apache-2.0"
    assert license_expression(None, "3-Clause BSD License\nand its text", []) == "BSD-3-Clause"
    assert license_expression(None, None, []) == ""


def test_what_is_installed_with_us_may_be_given_on() -> None:
    assert check_licenses().findings == ()
