"""Limits of client connections over all Envoys together."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from controlplane.config.types import (
    Cidr,
    SettingError,
    SettingsSection,
    ValueFormat,
    reject_duplicates,
    setting,
)
from controlplane.model.limits import TOTAL, LimitRule

_MAX_RULES = 100
_MAX_CONNECTIONS, _MAX_RATE = 10_000_000, 1_000_000

RuleName = Annotated[
    str, ValueFormat("letters, digits, `_`, `.` and `-`, at most 64 characters, such as reporting")
]


class LimitRuleSettings(SettingsSection):
    """A limit for the connections of a user, from a network, or of a user from a network.

    A connection counts in every rule that fits it. A rule needs a user or a network, and at least one limit.
    """

    name: RuleName = setting(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the rule in errors, metrics and `tidevoy limits`."""
    user: str | None = setting(None, min_length=1, max_length=32)
    """Name of the user, upper and lower case as in TiDB; default: all users."""
    network: Cidr | None = setting(None)
    """Network of the clients' addresses; default: all networks."""
    max_connections: int = setting(0, ge=0, le=_MAX_CONNECTIONS)
    """Maximum number of these connections to all Envoys together; 0: unlimited."""
    max_new_connections_per_second: float = setting(0.0, ge=0, le=_MAX_RATE)
    """Maximum rate of new connections to all Envoys together; 0: unlimited."""

    @model_validator(mode="after")
    def _check_completeness(self) -> LimitRuleSettings:
        if self.name == TOTAL:
            raise SettingError(
                f"{TOTAL} is the name of the limits of all connections", "choose another name", key="name"
            )
        if self.user is None and self.network is None:
            raise SettingError(
                f"the rule {self.name} has neither a user nor a network",
                "set one of them; limits.max_connections limits all connections",
            )
        if not self.max_connections and not self.max_new_connections_per_second:
            raise SettingError(
                f"the rule {self.name} limits nothing",
                "set max_connections or max_new_connections_per_second",
            )
        return self

    def to_rule(self) -> LimitRule:
        return LimitRule(
            self.name, self.user, self.network, self.max_connections, self.max_new_connections_per_second
        )


class LimitSettings(SettingsSection):
    """Limits of client connections to all Envoys together, which the Envoys' modules enforce.

    A change applies to new connections and closes none (docs/operate/limits.md).
    """

    max_connections: int = setting(0, ge=0, le=_MAX_CONNECTIONS)
    """Maximum number of client connections to all Envoys together; 0: unlimited. Over the limit, clients get
    error 1040. `sql.max_connections` limits each Envoy on its own."""
    max_new_connections_per_second: float = setting(0.0, ge=0, le=_MAX_RATE)
    """Maximum rate of new connections to all Envoys together; 0: unlimited. Over it, clients get error
    1040."""
    rules: tuple[LimitRuleSettings, ...] = setting((), max_length=_MAX_RULES)
    """Limits by user and network. Over a limit, clients get error 1226 if the rule has a user, else 1040."""

    @model_validator(mode="after")
    def _check_unique_names(self) -> LimitSettings:
        reject_duplicates("rules.{}.name", [rule.name for rule in self.rules], "give each rule its own name")
        return self

    def to_rules(self) -> tuple[LimitRule, ...]:
        """Return all limits, beginning with those of all connections."""
        total = LimitRule(TOTAL, None, None, self.max_connections, self.max_new_connections_per_second)
        has_total = self.max_connections or self.max_new_connections_per_second
        return (*((total,) if has_total else ()), *(rule.to_rule() for rule in self.rules))
