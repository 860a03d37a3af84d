"""The rules for statements that operators set: validates them, and stores them with the intents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controlplane.config.rule_checks import (
    WITHOUT_ENGINE,
    RuleEngineUnavailable,
    RuleProblem,
    check_rules,
    needs_engine,
    run_engine_checks,
    try_request,
)
from controlplane.config.schema import format_path
from controlplane.config.statements import MAX_RULES
from controlplane.engine.node_operations import NodeOperations
from controlplane.engine.planner import Planner
from controlplane.errors import ConfigError, ConfigErrors, InvalidRules, RuleExists, UnknownRule
from controlplane.intents import changes as intent_changes
from controlplane.intents.repository import IntentRepository
from controlplane.model.rules import StatementRule, effective_rules

# The intents and the plan contain the rules, and PD stores values of a limited size.
_MAX_CHARACTERS = 256 * 1024


class RuleOperations:
    """Each operation stores all rules, and returns when they are published, or after 2 s.

    Each raises InvalidRules if a rule cannot be used, and StateUnavailable or VersionConflict if the rules
    cannot be stored; then nothing has changed.
    """

    def __init__(self, intents: IntentRepository, planner: Planner, operations: NodeOperations) -> None:
        self._intents = intents
        self._planner = planner
        self._operations = operations

    async def replace(self, rules: Sequence[StatementRule]) -> None:
        """Set all rules."""
        names: set[str] = set()
        for index, rule in enumerate(rules):
            if rule.name in names:
                raise InvalidRules([(f"rules.{index}.name", f"{rule.name} is the name of another rule, too")])
            names.add(rule.name)
        await self._set(tuple(rules), self._intents.current.rules, changed=rules, place="rules")

    async def add(self, rule: StatementRule, before: str | None = None) -> None:
        """Add a rule at the end, or before another one. Raises RuleExists or UnknownRule."""
        known = self._intents.current.rules
        names = [other.name for other in known]
        if rule.name in names:
            raise RuleExists(rule.name)
        index = len(known) if before is None else self._index(known, before)
        await self._set((*known[:index], rule, *known[index:]), known, changed=[rule], place="rule")

    async def remove(self, name: str) -> None:
        """Remove a rule. Raises UnknownRule."""
        known = self._intents.current.rules
        index = self._index(known, name)
        await self._set((*known[:index], *known[index + 1 :]), known, changed=(), place="name")

    async def check(
        self, request: Mapping[str, Any], rules: Sequence[StatementRule] | None = None
    ) -> dict[str, Any]:
        """Return what would happen to a request with these rules; None: with those in force.

        Raises RuleEngineUnavailable.
        """
        if rules is None:
            in_force = effective_rules(self._intents.current.rules, self._planner.policy.rules)
            rules = [rule for _, rule in in_force]
        else:
            self._raise_problems(await asyncio.to_thread(check_rules, rules), "rules")
        return await asyncio.to_thread(try_request, rules, request)

    async def check_settings_rules(self, rules: Sequence[StatementRule]) -> None:
        """Check valid rules of new settings together with those of operators. Raises ConfigErrors."""
        operators_rules = self._intents.current.rules
        problems = await self._problems_together(operators_rules, operators_rules, rules)
        if problems:
            where = "the settings with the rules of `tidevoy rules`"
            raise ConfigErrors(
                [ConfigError(where, "statements.rules", problem, remedy) for problem, remedy in problems]
            )

    def _index(self, rules: Sequence[StatementRule], name: str) -> int:
        for index, rule in enumerate(rules):
            if rule.name == name:
                return index
        if any(rule.name == name for rule in self._planner.policy.rules):
            raise UnknownRule(
                name, "the settings define it: change statements.rules, or set a rule of this name"
            )
        raise UnknownRule(name)

    async def _set(
        self,
        rules: tuple[StatementRule, ...],
        known: tuple[StatementRule, ...],
        *,
        changed: Sequence[StatementRule],
        place: str,
    ) -> None:
        """Check the changed rules and all together, and store all. `place`: what of the request changes."""
        if len(rules) > MAX_RULES:
            raise InvalidRules([(place, f"these are {len(rules)} rules, and {MAX_RULES} are allowed")])
        if sum(len(rule.text) for rule in rules) > _MAX_CHARACTERS:
            problem = f"the rules have more than {_MAX_CHARACTERS} characters; move some to the settings"
            raise InvalidRules([(place, problem)])
        self._raise_problems(await asyncio.to_thread(check_rules, changed), place)
        problems = await self._problems_together(known, rules, self._planner.policy.rules)
        if problems:
            raise InvalidRules([(place, f"{problem}; {remedy}") for problem, remedy in problems])
        await self._operations.apply(lambda intents: intent_changes.set_rules(intents, rules, known=known))

    async def _problems_together(
        self,
        known: Iterable[StatementRule],
        rules: Iterable[StatementRule],
        settings_rules: Iterable[StatementRule],
    ) -> list[tuple[str, str]]:
        """Return the problems of all rules in force after a change, with remedies.

        `known`, `rules`: those of operators before and after it; `settings_rules`: those of the settings
        after it. If no rule comes into force, there are no problems: rules can always be removed.
        """
        before = {rule for _, rule in effective_rules(known, self._planner.policy.rules) if _is_enabled(rule)}
        after = [rule for _, rule in effective_rules(rules, settings_rules) if _is_enabled(rule)]
        added = [rule for rule in after if rule not in before]
        if not added:
            return []
        try:
            problems = await asyncio.to_thread(run_engine_checks, after)
        except RuleEngineUnavailable as error:
            return [(str(error), WITHOUT_ENGINE)] if any(map(needs_engine, added)) else []

        def subject(problem: RuleProblem) -> str:
            return "" if problem.place is None else f"the rule {after[problem.place].name}: "

        return [(f"{subject(problem)}{problem.problem}", problem.remedy) for problem in problems]

    @staticmethod
    def _raise_problems(problems: Sequence[RuleProblem], place: str) -> None:
        if not problems:
            return

        def place_of(problem: RuleProblem) -> str:
            path = problem.path if place == "rules" else problem.path[1:]
            return format_path((place, *path))

        raise InvalidRules(
            [(place_of(problem), f"{problem.problem}; {problem.remedy}") for problem in problems]
        )


def _is_enabled(rule: StatementRule) -> bool:
    return bool(rule.definition.get("enabled", True))
