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
