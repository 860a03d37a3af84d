"""Rules for statements in the settings, and how they are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from controlplane.config import rule_checks
from controlplane.config.loader import read_settings
from controlplane.config.rule_checks import RuleEngineUnavailable, check_rules, try_request
from controlplane.config.schema import translate_error
from controlplane.config.settings import Settings
from controlplane.config.statement_rules import StatementRuleSettings
from controlplane.errors import ConfigErrors
from controlplane.model.rules import RuleSource, StatementRule, effective_rules
from tests.support.controlplane.rule_engine import replace_rule_engine

LOG = {"name": "a", "log": True}


def rule(**fields: Any) -> StatementRule:
    return StatementRuleSettings.model_validate({"name": "a", **fields}).as_rule


def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    program = tmp_path / "tidevoy-rules"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/input\n{script}\n")
    program.chmod(0o755)
    replace_rule_engine(monkeypatch, program)


@pytest.mark.parametrize(
    ("fields", "definition"),
    [
        ({"log": True}, {"log": True}),
        ({"block": {}, "user": "u", "enabled": True}, {"block": {}, "user": ["u"]}),
        ({"block": {"code": 1105}, "continue": False}, {"block": {"code": 1105}, "continue": False}),
        ({"limit": {"per_second": 2, "by": "user"}}, {"limit": {"per_second": 2.0, "by": ["user"]}}),
        (
            {"rewrite": {"tables": {"a": "b"}}, "client": "::1"},
            {"rewrite": {"tables": {"a": "b"}}, "client": ["::1/128"]},
        ),
    ],
)
def test_rule_is_stored_without_defaults(fields: dict[str, Any], definition: dict[str, Any]) -> None:
    stored = rule(**fields)
    assert (stored.name, stored.definition) == ("a", {"name": "a", **definition})
    again = StatementRuleSettings.model_validate(stored.definition)
    assert again.as_rule == stored


@pytest.mark.parametrize(
    ("fields", "path", "problem"),
    [
        ({"name": "A b"}, "name", "not allowed"),
        ({"log": False}, "", "no actions"),
        ({"block": {}}, "", "2 actions"),
        ({"colour": 1}, "colour", "no such setting"),
        ({"log": False, "block": {"code": 2013}}, "block.code", "client libraries"),
        ({"log": False, "block": {"message": "a\nb"}}, "block.message", "control characters"),
        ({"log": False, "limit": {}}, "limit", "allows everything"),
        (
            {"log": False, "limit": {"concurrent": 1, "client_prefix": 8}},
            "limit.client_prefix",
            "needs client",
        ),
        ({"log": False, "rewrite": {"text": "a", "replace": "b"}}, "rewrite", "unclear"),
        ({"client": ["10.0.0.1/8"]}, "client.0", "host bits"),
        ({"commands": "run"}, "commands.0", "'run' is not allowed"),
    ],
)
def test_unusable_rules_are_rejected(fields: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate({"statements": {"rules": [LOG | {"name": "first"}, LOG | fields]}})
    (error,) = raised.value.errors(include_url=False)
    invalid = translate_error(Settings, error)
    assert ".".join(map(str, invalid.path[3:])) == path
    assert problem in invalid.problem
    assert invalid.remedy


def test_names_are_unique() -> None:
    with pytest.raises(ValidationError, match="a is listed twice"):
        Settings.model_validate({"statements": {"rules": [LOG, LOG]}})


def test_rules_of_the_api_come_first_and_replace_those_of_the_settings() -> None:
    one, two, three = (StatementRule(name, f'{{"name": "{name}"}}') for name in ("one", "two", "three"))
    other_two = StatementRule("two", "{}")
    assert effective_rules([three, other_two], [one, two]) == (
        (RuleSource.API, three),
        (RuleSource.API, other_two),
        (RuleSource.SETTINGS, one),
    )


def test_without_the_program_only_rules_without_patterns_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_rule_engine(monkeypatch, None)
    assert check_rules([rule(log=True), rule(block={}, user="u"), rule(limit={"concurrent": 1})]) == []
    problems = check_rules(
        [rule(log=True), rule(log=True, pattern="x"), rule(rewrite={"tables": {"a": "b"}})]
    )
    assert [problem.path for problem in problems] == [(1, "pattern"), (2, "rewrite")]
    assert "tidevoy-rules is not installed; install Tidevoy's wheel" in problems[0].problem
    with pytest.raises(
        RuleEngineUnavailable, match="rules cannot be checked: tidevoy-rules is not installed"
    ):
        try_request([rule(log=True)], {"statement": "select 1"})
    file = tmp_path / "tidevoy.yaml"
    file.write_text(json.dumps({"statements": {"rules": [LOG | {"normalized": "x"}]}}))
    with pytest.raises(ConfigErrors, match=r"statements\.rules\.0\.normalized: rules cannot be checked"):
        read_settings(file, {})


def test_problems_have_place_and_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = {"index": 1, "rule": "a", "key": "limit.wait", "reason": "too long", "position": None}
    errors = [error, error | {"key": "pattern", "reason": "unclosed group", "position": 7}]
    fake_engine(monkeypatch, tmp_path, f"echo '{json.dumps({'errors': errors, 'results': []})}'")
    problems = check_rules([rule(log=True), rule(log=True)])
    assert [(problem.path, problem.problem) for problem in problems] == [
        ((1, "limit", "wait"), "too long"),
        ((1, "pattern"), "unclosed group at character 7"),
    ]
    assert json.loads((tmp_path / "input").read_text()) == {"rules": [LOG, LOG], "requests": []}
    assert check_rules([]) == []


def test_problem_of_all_rules_together_has_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = {"index": None, "rule": "", "key": "pattern", "reason": "too large", "position": None}
    fake_engine(monkeypatch, tmp_path, f"echo '{json.dumps({'errors': [error], 'results': []})}'")
    (problem,) = check_rules([rule(log=True)])
    assert (problem.place, problem.path, problem.problem) == (None, (), "too large")
    file = tmp_path / "tidevoy.yaml"
    file.write_text(json.dumps({"statements": {"rules": [LOG]}}))
    with pytest.raises(ConfigErrors, match=r"statements\.rules: too large; use fewer or simpler patterns"):
        read_settings(file, {})


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo broken >&2; exit 3", "broken"),
        ("exit 3", "exit code 3"),
        ("sleep 9", "longer"),
        ("echo no", "Expecting"),
    ],
)
def test_failures_of_the_program_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, problem: str
) -> None:
    monkeypatch.setattr(rule_checks, "_TIMEOUT_SECONDS", 0.5)
    fake_engine(monkeypatch, tmp_path, f"exec 2>&1; {script}" if script.startswith("sleep") else script)
    with pytest.raises(RuleEngineUnavailable, match=problem):
        try_request([rule(log=True)], {"statement": "select 1"})
