"""Sessions that move from one node to another: how fast, and for which reasons beside a drain."""

from __future__ import annotations

from pydantic import model_validator

from controlplane.config.types import SettingError, SettingsSection, setting

_MIB = 1 << 20


class MigrationSettings(SettingsSection):
    """How fast the sessions of one Envoy move (module only), whatever the reason is."""

    per_second: float = setting(
        500.0,
        "Most sessions of one Envoy that begin to move in a second; 0: none ever moves.",
        "new envoys",
        unit="sessions",
        ge=0,
        le=100_000,
    )
    at_once: int = setting(
        64,
        "Most sessions of one Envoy that are moving at the same time.",
        "new envoys",
        unit="sessions",
        ge=1,
        le=10_000,
    )
    states_max_bytes: int = setting(
        4 * _MIB,
        "Most bytes of states (variables, prepared statements and so on) of one session; a session with more"
        " is not moved.",
        "new envoys",
        unit="bytes",
        ge=65_536,
        le=64 * _MIB,
    )
    states_budget_bytes: int = setting(
        256 * _MIB,
        "Most memory of one Envoy for states: of sessions that are moving and, in at most half of it, states"
        " that are kept for a while in case a server goes away. At least four times `states_max_bytes`.",
        "new envoys",
        unit="bytes",
        ge=262_144,
        le=64 << 30,
    )

    @model_validator(mode="after")
    def _check_states_budget(self) -> MigrationSettings:
        # Escaping quotes may double the states, and moves may count on one half of the budget only.
        if self.states_budget_bytes < 4 * self.states_max_bytes:
            raise SettingError(
                f"{self.states_budget_bytes} is less than four times states_max_bytes"
                f" ({self.states_max_bytes})",
                f"set {4 * self.states_max_bytes} or more, or a smaller states_max_bytes",
                key="states_budget_bytes",
            )
        return self


class RebalanceSettings(SettingsSection):
    """How sessions that there are move to nodes that have fewer than their share (module only)."""

    enabled: bool = setting(
        True, "Whether sessions move from nodes that have too many to nodes that have too few.", "now"
    )
    per_second: float = setting(
        200.0,
        "Most sessions of the whole fleet that are asked to move for that, for each second of a round (5 s).",
        "now",
        unit="sessions",
        ge=1,
        le=100_000,
    )
    threshold: float = setting(
        0.05,
        "By which part of its share a node may have more sessions without giving any away; it may lack twice"
        " as much. A few that chance explains never move.",
        "now",
        ge=0,
        le=10,
    )
