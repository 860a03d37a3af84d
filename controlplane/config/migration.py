"""Settings of session migration: rate limits, and rebalancing."""

from __future__ import annotations

from pydantic import model_validator

from controlplane.config.types import SettingError, SettingsSection, setting

_MIB = 1 << 20


class MigrationSettings(SettingsSection):
    """How fast the sessions of one Envoy migrate (module only), for any reason."""

    per_second: float = setting(
        500.0,
        "Maximum number of migrations that one Envoy starts per second; 0: sessions never migrate.",
        "new envoys",
        unit="sessions",
        ge=0,
        le=100_000,
    )
    at_once: int = setting(
        64,
        "Maximum number of concurrent migrations of one Envoy.",
        "new envoys",
        unit="sessions",
        ge=1,
        le=10_000,
    )
    states_max_bytes: int = setting(
        4 * _MIB,
        "Maximum size of the session states (variables, prepared statements and so on) of one session; a"
        " session with more does not migrate.",
        "new envoys",
        unit="bytes",
        ge=65_536,
        le=64 * _MIB,
    )
    states_budget_bytes: int = setting(
        256 * _MIB,
        "Memory limit of one Envoy for session states: of migrating sessions and, up to half of it, states"
        " kept for a while in case a server goes away. At least four times `states_max_bytes`.",
        "new envoys",
        unit="bytes",
        ge=262_144,
        le=64 << 30,
    )

    @model_validator(mode="after")
    def _check_states_budget(self) -> MigrationSettings:
        # Escaping quotes may double the states, and migrations are guaranteed only one half of the budget.
        if self.states_budget_bytes < 4 * self.states_max_bytes:
            raise SettingError(
                f"{self.states_budget_bytes} is less than four times states_max_bytes"
                f" ({self.states_max_bytes})",
                f"set {4 * self.states_max_bytes} or more, or reduce states_max_bytes",
                key="states_budget_bytes",
            )
        return self


class RebalanceSettings(SettingsSection):
    """How existing sessions migrate to nodes that are below their fair share (module only)."""

    enabled: bool = setting(
        True, "Whether sessions migrate from nodes above their fair share to nodes below it.", "now"
    )
    per_second: float = setting(
        200.0,
        "Maximum number of sessions of the whole fleet that migrate for rebalancing, per second of a round"
        " (5 s).",
        "now",
        unit="sessions",
        ge=1,
        le=100_000,
    )
    threshold: float = setting(
        0.05,
        "Tolerance: a node may exceed its fair share by this fraction, or be below it by twice as much,"
        " before sessions migrate. Differences within random noise never cause migrations.",
        "now",
        ge=0,
        le=10,
    )
