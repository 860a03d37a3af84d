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
        in_force = effective_rules(self._intents.current.rules, self._planner.policy.rules)
        tried = [rule for _, rule in in_force] if rules is None else rules
        problems, result = await asyncio.to_thread(try_request, tried, request)
        if problems and rules is None:
            raise RuleEngineUnavailable(problems[0].problem, "correct this rule first")
        self._raise_problems(problems, "rules")
        return result

    async def check_settings_rules(self, rules: Sequence[StatementRule]) -> None:
        """Check that the rules of new settings and the rules that operators have added fit together.

        Each group is valid alone. Raises ConfigErrors.
        """
        problems = await self._problems_together(self._intents.current.rules, rules)
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
        """Check the changed rules and all together, and store all.

        `place`: the path in the request to which problems are assigned.
        """
        if len(rules) > MAX_RULES:
            raise InvalidRules([(place, f"these are {len(rules)} rules, and {MAX_RULES} are allowed")])
        if sum(len(rule.text) for rule in rules) > _MAX_CHARACTERS:
            problem = f"the rules have more than {_MAX_CHARACTERS} characters; move some to the settings"
            raise InvalidRules([(place, problem)])
        self._raise_problems(await asyncio.to_thread(check_rules, changed), place)
        problems = await self._problems_together(rules, self._planner.policy.rules)
        if problems:
            raise InvalidRules([(place, f"{problem}; {remedy}") for problem, remedy in problems])
        await self._operations.apply(lambda intents: intent_changes.set_rules(intents, rules, known=known))

    async def _problems_together(
        self, rules: Iterable[StatementRule], settings_rules: Iterable[StatementRule]
    ) -> list[tuple[str, str]]:
        """Return the problems of all rules in force after a change, with remedies.

        `rules`, `settings_rules`: those of operators and those of the settings after it. If no rule comes
        into force, there are no problems: rules can always be removed.
        """
        in_force = effective_rules(self._intents.current.rules, self._planner.policy.rules)
        before = {rule for _, rule in in_force if rule.is_enabled}
        after = [rule for _, rule in effective_rules(rules, settings_rules) if rule.is_enabled]
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
