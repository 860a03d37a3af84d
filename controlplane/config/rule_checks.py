"""Check rules for statements with the engine that the module has: the program `tidevoy-rules`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from controlplane.config.schema import InvalidSetting, SettingPath
from controlplane.config.settings import Settings
from controlplane.errors import TidevoyError
from controlplane.model.rules import StatementRule
from controlplane.programs import find_program, how_to_install

PROGRAM = "tidevoy-rules"

_TIMEOUT_SECONDS = 10.0
WITHOUT_ENGINE = "until then, use rules without patterns"
"""The remedy if rules with patterns cannot be checked."""

# What only the engine can check.
_KEYS_WITH_PATTERNS = ("pattern", "normalized", "rewrite")


class RuleProblem(NamedTuple):
    """Why a rule cannot be used. `key` is empty for the rule as a whole.

    `place` is its index in the list; None: each rule can be used, but not all of them together.
    """

    place: int | None
    key: str
    problem: str
    remedy: str = "see docs/operate/rules.md"

    @property
    def path(self) -> SettingPath:
        if self.place is None:
            return ()
        return (self.place, *self.key.split(".")) if self.key else (self.place,)


class RuleEngineUnavailable(TidevoyError):
    """The program that judges statements is not installed, or does not work."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"rules cannot be checked: {problem}; {remedy}")


def check_rules(rules: Sequence[StatementRule]) -> list[RuleProblem]:
    """Return the problems of rules. Without the engine, only rules without patterns have none."""
    try:
        return run_engine_checks(rules)
    except RuleEngineUnavailable as error:
        # The rules that need no engine were checked as settings.
        return [
            RuleProblem(index, key, str(error), WITHOUT_ENGINE)
            for index, rule in enumerate(rules)
            for key in _KEYS_WITH_PATTERNS
            if key in rule.definition
        ]


def run_engine_checks(rules: Sequence[StatementRule]) -> list[RuleProblem]:
    """Return the problems of rules, of each one and of all together. Raises RuleEngineUnavailable.

    Runs a program, which may take seconds for thousands of rules.
    """
    return [_to_problem(error) for error in _run(rules, [])["errors"]] if rules else []


def needs_engine(rule: StatementRule) -> bool:
    """Return whether only the engine can check the rule."""
    return not rule.definition.keys().isdisjoint(_KEYS_WITH_PATTERNS)


def try_request(
    rules: Sequence[StatementRule], request: Mapping[str, Any]
) -> tuple[list[RuleProblem], dict[str, Any]]:
    """Return the problems of rules, and what would happen to a request; with problems, this is unknown.

    Raises RuleEngineUnavailable.
    """
    answer = _run(rules, [request])
    problems = [_to_problem(error) for error in answer["errors"]]
    return problems, {} if problems else answer["results"][0]


def check_settings(settings: Settings) -> list[InvalidSetting]:
    """Return the problems of the rules in the settings."""
    return [
        InvalidSetting(("statements", "rules", *problem.path), problem.problem, problem.remedy)
        for problem in check_rules(settings.statements.rule_list)
    ]


def _to_problem(error: Mapping[str, Any]) -> RuleProblem:
    if error["index"] is None:
        return RuleProblem(None, "", error["reason"], "use fewer or simpler patterns")
    place = f" at character {error['position']}" if error["position"] else ""
    return RuleProblem(error["index"], error["key"], f"{error['reason']}{place}")


def _run(rules: Sequence[StatementRule], requests: Sequence[Mapping[str, Any]]) -> Any:
    program = find_program(PROGRAM)
    if program is None:
        raise RuleEngineUnavailable(f"{PROGRAM} is not installed", how_to_install(PROGRAM))
    texts = ",".join(rule.text for rule in rules)
    try:
        result = subprocess.run(
            [program],
            input=f'{{"rules": [{texts}], "requests": {json.dumps(list(requests))}}}'.encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        if result.returncode == 0:
            return json.loads(result.stdout)
        problem = result.stderr.decode(errors="replace").strip() or f"exit code {result.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"{program} took longer than {_TIMEOUT_SECONDS:g} s"
    except (OSError, ValueError) as error:
        problem = f"{program}: {error}"
    raise RuleEngineUnavailable(problem, "use fewer or simpler patterns, or install Tidevoy again")
