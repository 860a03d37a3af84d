"""Which nodes share their sessions: those of a group or, where Envoys keep to it, of a zone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from controlplane.decide.balance import locality
from controlplane.decide.balance.fair_share import capacity
from controlplane.model.nodes import Quarter
from controlplane.model.plan import NodePlan, Policy


class Sharers(NamedTuple):
    """Nodes by address, with the capacity that each one's share goes by; 0: it only stands in for others."""

    group: str
    zone: str  # empty: those that no Envoy keeps to
    capacities: Mapping[str, float]


def quarters(
    served: Mapping[str, NodePlan],
    full: Collection[Quarter],
    zones: Mapping[str, str],
    policy: Policy,
    now: float,
) -> list[Sharers]:
    """All nodes in service. `full` zones' Envoys use nodes elsewhere, too; `zones` says where Envoys are."""
    homes, taking = locality.homes(zones, policy), locality.taking(served)
    shared: dict[Quarter, dict[str, float]] = {}
    idle: dict[str, list[str]] = {}
    for address, planned in served.items():
        if address not in taking:
            idle.setdefault(planned.group, []).append(address)
            continue
        is_kept_to = planned.zone in homes and (planned.group, planned.zone) not in full
        quarter = (planned.group, planned.zone if is_kept_to else "")
        shared.setdefault(quarter, {})[address] = capacity(planned, policy, now)
    for group, addresses in idle.items():
        # Those that have stood in give what they have to any that serve again.
        first = min(quarter for quarter in shared if quarter[0] == group)
        shared[first].update(dict.fromkeys(addresses, 0.0))
    return [Sharers(group, zone, capacities) for (group, zone), capacities in sorted(shared.items())]
