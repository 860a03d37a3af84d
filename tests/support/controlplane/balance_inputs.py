"""Nodes of a plan, and what Envoys and nodes tell of their sessions, each in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.decide.balance.rebalance import rebalance
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.nodes import GroupZone, Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy, RebalanceState
from controlplane.model.traffic import SessionCounts

NOW = 2_000_000.0
LONG_AGO = NOW - 10_000.0
POLICY = Policy(slow_start=0, reconnect_grace=15.0)
A, B, C, D = ADDRESSES = [f"10.0.0.{i}:4000" for i in range(1, 5)]
INSTANCE_X, INSTANCE_Y = "00000000000000aa", "00000000000000bb"  # the processes of the Envoys x and y


def node_plan(
    address: str,
    since: float = LONG_AGO,
    weight: int = 100,
    state: State = State.ACTIVE,
    **fields: object,
) -> NodePlan:
    """A node that has been in service since then."""
    active = since if state is State.ACTIVE else None
    planned = NodePlan(
        Node(address, Source.PD, weight=weight), state, "", since, EdsHealth.HEALTHY, weight, address, active
    )
    return replace(planned, **fields)  # type: ignore[arg-type]


def node_plans(*planned: NodePlan) -> dict[str, NodePlan]:
    return {each.node.address: each for each in planned}


@dataclass(frozen=True)
class ReportedSessions:
    """What modules tell of their sessions, by Envoy and then by address; and what others tell beside them."""

    sessions: Mapping[str, Mapping[str, int]]
    reported_at: float = NOW
    counting_since: float = NOW - 2
    instances: Mapping[str, str] = field(default_factory=lambda: {"x": INSTANCE_X, "y": INSTANCE_Y})
    complete_nodes: frozenset[str] = frozenset(ADDRESSES)
    stale_envoys: frozenset[str] = frozenset()  # Envoys that told all of that long ago
    stock_envoy_sessions: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # of Envoys that have no module
    node_connections: Mapping[str, int] = field(default_factory=dict)  # what nodes count themselves
    counted_at: float = NOW  # when they counted it

    def facts(self, **more: object) -> Facts:
        censuses = {
            envoy: SessionCounts(
                *(
                    (self.reported_at - 60, self.counting_since - 60)
                    if envoy in self.stale_envoys
                    else (self.reported_at, self.counting_since)
                ),
                sessions={a: count for a, count in there.items() if count},
                complete_nodes=self.complete_nodes,
                instance=self.instances.get(envoy, ""),
            )
            for envoy, there in self.sessions.items()
        }
        known = Facts(
            session_counts=censuses,
            sessions_by_address=_sum_counts(*(census.sessions for census in censuses.values())),
            loads={
                envoy: EnvoyLoad(envoy, self.reported_at, there)
                for envoy, there in self.stock_envoy_sessions.items()
            },
            sessions_by_endpoint=_sum_counts(*self.stock_envoy_sessions.values()),
            envoys_last_seen=dict.fromkeys(censuses, self.reported_at),
            health={
                a: Health(connections=n, connections_at=self.counted_at)
                for a, n in self.node_connections.items()
            },
        )
        return replace(known, **more)  # type: ignore[arg-type]


def _sum_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counts:
        for address, count in each.items():
            sums[address] = sums.get(address, 0) + count
    return sums


NODES_WITH_NEW_NODE = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW))
DEFAULT_SESSIONS = ReportedSessions({"x": {A: 30, B: 30}, "y": {A: 15, B: 15}})


def decide_rebalance(
    facts: Facts,
    planned: Mapping[str, NodePlan] = NODES_WITH_NEW_NODE,
    before: RebalanceState | None = None,
    policy: Policy = POLICY,
    now: float = NOW,
    panic_threshold_reason: str = "",
    overloaded_zones: frozenset[GroupZone] = frozenset(),
) -> RebalanceState:
    """What is asked for now, by nodes that are as they were."""
    past = Plan(planned, "", before or RebalanceState())
    return rebalance(planned, overloaded_zones, panic_threshold_reason, past, facts, policy, now)


def outgoing_by_node(found: RebalanceState) -> dict[str, int]:
    """How many sessions each node is asked for."""
    return {address: sum(counts.values()) for address, counts in found.outgoing.items()}


def incoming_by_node(found: RebalanceState) -> dict[str, int]:
    """How many sessions each node is to get."""
    return {address: sum(counts.values()) for address, counts in found.incoming.items()}


def expected_water_level(capacities: Sequence[float], current: Sequence[int], incoming: int) -> float:
    """How high so much more comes to stand in vessels that hold some already: found by halving."""
    low, high = 0.0, (sum(current) + incoming + 1) / min(capacities)
    for _ in range(200):
        middle = (low + high) / 2
        taken = sum(max(0.0, middle * width - held) for width, held in zip(capacities, current, strict=True))
        low, high = (middle, high) if taken < incoming else (low, middle)
    return low
