"""Settings of SQL statements: statistics, a log, and rules."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from controlplane.config.sql import EnvoyLogSettings
from controlplane.config.statement_rules import StatementRuleSettings
from controlplane.config.types import SettingsSection, reject_duplicates, section, setting
from controlplane.model.rules import StatementRule

MAX_RULES = 2000


class StatementLogSettings(EnvoyLogSettings):
    """A log of statements that are slow or have failed (module only).

    Tidevoy measures what clients see: from the arrival of the request to the last byte of the result.
    """

    format: Literal["json", "tidb"] = setting("json")
    """json: one line of JSON per statement. tidb: the format of TiDB's slow log, which TiDB and tools for
    slow logs read."""
    threshold: float = setting(0.3, unit="seconds", ge=0, le=3600)
    """Duration from which on a statement is slow; 0: all statements are logged."""
    sample: float = setting(1.0, ge=0, le=1)
    """Fraction of the slow statements that is logged, chosen at random. With a `threshold` of 0, it is a
    sample of all statements."""
    errors: bool = setting(False)
    """Whether all statements that end with an error are logged, whatever their duration and `sample`."""
    redact: bool = setting(True)
    """Whether the log shows normalized texts, in which literals are replaced, instead of the texts that
    clients send. Texts that may hold passwords or keys are normalized in any case."""


class StatementSettings(SettingsSection):
    """Statements of clients, as Tidevoy's module sees them.

    For statistics (`tidevoy top`, the console, and `GET /v1/statements`), Envoys compute TiDB's digest of
    each statement. Statements are shown without their values.
    """

    digests: Literal["on", "off"] = setting("off", takes_effect="now with the module")
    """on: Envoys collect statistics by digest, user and node, and report them. Turning it off deletes the
    statistics."""
    max_rows: int = setting(500, takes_effect="now with the module", ge=10, le=5000)
    """Rows in a report of an Envoy: combinations of digest, user and node, those with the most time. The rest
    is reported as one row per node."""
    interval: float = setting(5.0, takes_effect="now with the module", unit="seconds", ge=1, le=60)
    """Time between two reports of an Envoy."""
    metrics_digests: int = setting(20, ge=0, le=50)
    """Number of digests that `GET /metrics` shows, those with the most time."""
    log: StatementLogSettings = section(StatementLogSettings, "Log of slow and failed statements.")
    rules: tuple[StatementRuleSettings, ...] = setting(
        (), takes_effect="now with the module", max_length=MAX_RULES
    )
    """Rules that block, limit, rewrite or log statements, in their order (docs/operate/rules.md). Rules that
    `tidevoy rules` has set come before them."""

    max_held_bytes: int = setting(
        256 << 20, takes_effect="now with the module", unit="bytes", ge=64 << 20, le=1 << 40
    )
    """Memory limit of one Envoy for statements of at least 1 MiB that are incomplete or wait while rules
    block, limit or rewrite. Further ones get error 1153."""

    @property
    def is_on(self) -> bool:
        return self.digests == "on"

    @property
    def rule_list(self) -> tuple[StatementRule, ...]:
        """The rules in their order."""
        return tuple(rule.as_rule for rule in self.rules)

    @model_validator(mode="after")
    def _check_unique_names(self) -> StatementSettings:
        reject_duplicates("rules.{}.name", [rule.name for rule in self.rules], "give each rule its own name")
        return self
