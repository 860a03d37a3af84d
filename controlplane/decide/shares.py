"""What nodes in service have of all sessions, and what their share is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from controlplane.decide import occupancy
from controlplane.decide.weights import ramp
from controlplane.model import Facts, NodePlan, Policy


class Standing(NamedTuple):
    """A node's sessions and its share of all.

    The sessions of an Envoy that has fallen silent may be over, or not. So there are two numbers of each; the
    least is without them.
    """

    least: int
    most: int
    least_share: float
    most_share: float

    @property
    def surplus(self) -> int:
        """Sessions that surely are more than its share."""
        return whole(self.least - self.most_share)

    @property
    def lack(self) -> float:
        """Sessions that surely are missing to its share; 0 or less when none are."""
        return self.least_share - self.most


def standings(
    served: Mapping[str, NodePlan], facts: Facts, policy: Policy, now: float
) -> dict[str, Standing]:
    """How each of the nodes in service stands; shares go by configured weight, and by slow start."""
    silent = occupancy.silent(facts, occupancy.recent(policy, now))
    capacities = {a: p.node.weight * ramp(active_for(p, now), policy.slow_start) for a, p in served.items()}
    most = {a: occupancy.known(a, p.endpoint, facts) for a, p in served.items()}
    least = most
    if silent:
        least = {a: most[a] - occupancy.of_envoys(silent, a, p.endpoint, facts) for a, p in served.items()}
    every, total_least, total_most = sum(capacities.values()), sum(least.values()), sum(most.values())
    return {
        a: Standing(least[a], most[a], total_least * capacity / every, total_most * capacity / every)
        for a, capacity in capacities.items()
    }


def active_for(planned: NodePlan, now: float) -> float:
    """Seconds since a node came into service."""
    return math.inf if planned.active_since is None else now - planned.active_since


def whole(sessions: float) -> int:
    """Rounded down to whole ones; what arithmetic has lost of one is made up for."""
    return math.floor(round(sessions, 6))
