"""The audit of dependencies reports findings, and reports what it could not check as skipped."""

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


def test_reports_vulnerabilities() -> None:
    bad = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2"]}]}
    worse = {"name": "b", "version": "2", "vulns": [{"id": "GHSA-2", "fix_versions": []}]}
    outcome = parse_pip_audit("x", {"dependencies": [bad, worse, {"name": "c", "version": "3", "vulns": []}]})
    assert outcome == AuditResult("x", ("a 1: PYSEC-1, fixed in 1.1", "b 2: GHSA-2"))
    assert outcome.lines()[0] == "FOUND   x"


def test_reports_packages_without_data() -> None:
    skipped = [{"name": name, "skip_reason": "not found"} for name in "abcde"]
    outcome = parse_pip_audit("x", {"dependencies": [*skipped, {"name": "f", "version": "3", "vulns": []}]})
    assert outcome.lines() == ["SKIPPED x: no data for 5 of 6 packages: a, b, c ..."]
    assert not has_failed([outcome], strict=False)
    assert has_failed([outcome], strict=True)


def test_reports_denied_crates_and_unreachable_database() -> None:
    assert parse_cargo_deny("x", 0, "advisories ok") == AuditResult("x")
    denied = parse_cargo_deny("x", 4, "error[vulnerability]: a hole\n  ┌─ Cargo.lock\nerror[yanked]: b\n")
    assert denied.findings == ("error[vulnerability]: a hole", "error[yanked]: b")
    assert has_failed([denied], strict=False)
    unreachable = parse_cargo_deny(
        "x", 1, "[ERROR] failed to fetch advisory database\nCould not resolve host\n"
    )
    assert (unreachable.findings, unreachable.skip_reason) == ((), "Could not resolve host")


def test_tool_timeout_skips_only_its_check() -> None:
    timed_out = _run(["sleep", "60"], timeout_seconds=0.1)
    outcome = parse_cargo_deny("x", timed_out.returncode, timed_out.stderr)
    assert (outcome.findings, outcome.skip_reason) == ((), "no result within 0.1 s")


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
def test_evaluates_license_expressions(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def test_reads_license_from_package_metadata() -> None:
    assert license_expression("MIT", "whatever", ["BSD License"]) == "MIT"
    assert license_expression(None, None, ["MIT License", "Apache Software License"]) == "MIT OR Apache-2.0"
    assert license_expression(None, "3-Clause BSD License\nand its text", []) == "BSD-3-Clause"
    assert license_expression(None, None, []) == ""


def test_licenses_of_installed_dependencies_are_allowed() -> None:
    assert check_licenses().findings == ()
