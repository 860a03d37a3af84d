"""Rules for statements, and how often they applied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

_CONDITIONS = ("digest", "pattern", "normalized", "commands", "user", "database", "client", "group")
"""The keys of a rule that say to which statements it applies."""


class RuleSource(StrEnum):
    """Where a rule comes from."""

    API = "api"
    SETTINGS = "settings"


class RuleAction(StrEnum):
    """What a rule does."""

    BLOCK = "block"
    LIMIT = "limit"
    REWRITE = "rewrite"
    LOG = "log"


@dataclass(frozen=True)
class StatementRule:
    """A rule. Only its name matters to the control plane; the module's engine understands the rest."""

    name: str
    text: str
    """The rule as JSON, as the API accepts it, without defaults."""

    @cached_property
    def definition(self) -> Mapping[str, Any]:
        """The rule as the API accepts it, without defaults."""
        definition: Mapping[str, Any] = json.loads(self.text)
        return definition

    @property
    def is_enabled(self) -> bool:
        return self.definition.get("enabled", True) is True


class RuleHits(NamedTuple):
    """How often a rule applied to statements."""

    hits: int = 0
    dry_run_hits: int = 0  # without effect


def effective_rules(
    api: Iterable[StatementRule], settings: Iterable[StatementRule]
) -> tuple[tuple[RuleSource, StatementRule], ...]:
    """Return all rules in the order in which they apply.

    Those that the API has set come first. They replace rules of the settings with the same name.
    """
    first = [(RuleSource.API, rule) for rule in api]
    names = {rule.name for _, rule in first}
    return (*first, *((RuleSource.SETTINGS, rule) for rule in settings if rule.name not in names))


def describe_conditions(definition: Mapping[str, Any]) -> str:
    """Return the conditions of a rule as text."""
    texts = [
        f"{key} {', '.join(value) if isinstance(value, list) else value}"
        for key, value in definition.items()
        if key in _CONDITIONS
    ]
    return "; ".join(texts) or "all statements"
