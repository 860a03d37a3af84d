"""Sessions that move from one node to another: how fast, and for which reasons beside a drain."""

from __future__ import annotations

from controlplane.config_types import Section, setting


class Migration(Section):
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


class Rebalance(Section):
    """How a node that comes into service gets its share of the sessions that there are (module only)."""

    enabled: bool = setting(
        True, "Whether sessions of other nodes move to a node that comes into service.", "now"
    )
    per_second: float = setting(
        200.0,
        "Most sessions of the whole fleet that are asked to move for that, for each second of a round (5 s).",
        "now",
        unit="sessions",
        ge=1,
        le=100_000,
    )
