"""Builders for the inputs of balancing: node plans, and the sessions that Envoys and nodes report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.decide.balance.rebalance import rebalance
from controlplane.decide.inputs import Inputs
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.nodes import GroupZone, Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy, RebalanceState
from controlplane.model.traffic import SessionCounts

NOW = 2_000_000.0
LONG_AGO = NOW - 10_000.0
POLICY = Policy(slow_start=0, reconnect_grace=15.0)
A, B, C, D = ADDRESSES = [f"10.0.0.{i}:4000" for i in range(1, 5)]
INSTANCE_X, INSTANCE_Y = "00000000000000aa", "00000000000000bb"  # Instance ids of the Envoys x and y.


def node_plan(
    address: str,
    since: float = LONG_AGO,
    weight: int = 100,
    state: State = State.ACTIVE,
    **fields: object,
) -> NodePlan:
    """Return the plan of a node that has been in service since `since`."""
    active = since if state is State.ACTIVE else None
    planned = NodePlan(
        Node(address, Source.PD, weight=weight), state, "", since, EdsHealth.HEALTHY, weight, address, active
    )
    return replace(planned, **fields)  # type: ignore[arg-type]


def node_plans(*planned: NodePlan) -> dict[str, NodePlan]:
    return {node.node.address: node for node in planned}


@dataclass(frozen=True)
class ReportedSessions:
    """Session counts that modules report, per Envoy and address, and counts from other sources."""

    sessions: Mapping[str, Mapping[str, int]]
    reported_at: float = NOW
    oldest_count_at: float = NOW - 2
    instances: Mapping[str, str] = field(default_factory=lambda: {"x": INSTANCE_X, "y": INSTANCE_Y})
    complete_nodes: frozenset[str] = frozenset(ADDRESSES)
    stale_envoys: frozenset[str] = frozenset()  # Envoys whose report is 60 s older
    # Load reports of Envoys without a module.
    stock_envoy_sessions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    node_connections: Mapping[str, int] = field(default_factory=dict)  # TiDB's own counts
    counted_at: float = NOW  # time of TiDB's own counts

    def facts(self, **more: object) -> Facts:
        session_counts = {
            envoy: SessionCounts(
                *(
                    (self.reported_at - 60, self.oldest_count_at - 60)
                    if envoy in self.stale_envoys
                    else (self.reported_at, self.oldest_count_at)
                ),
                sessions={a: count for a, count in sessions.items() if count},
                complete_nodes=self.complete_nodes,
                instance=self.instances.get(envoy, ""),
            )
            for envoy, sessions in self.sessions.items()
        }
        facts = Facts(
            session_counts=session_counts,
            sessions_by_address=_sum_counts(*(counts.sessions for counts in session_counts.values())),
            loads={
                envoy: EnvoyLoad(envoy, self.reported_at, sessions)
                for envoy, sessions in self.stock_envoy_sessions.items()
            },
            sessions_by_endpoint=_sum_counts(*self.stock_envoy_sessions.values()),
            envoys_last_seen=dict.fromkeys(session_counts, self.reported_at),
            health={
                a: Health(connections=n, connections_at=self.counted_at)
                for a, n in self.node_connections.items()
            },
        )
        return replace(facts, **more)  # type: ignore[arg-type]


def _sum_counts(*mappings: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for mapping in mappings:
        for address, count in mapping.items():
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
    """Return the next rebalancing state for a plan whose nodes did not change."""
    past = Plan(planned, "", before or RebalanceState())
    return rebalance(planned, overloaded_zones, panic_threshold_reason, Inputs(past, facts, policy, now))


def outgoing_by_node(state: RebalanceState) -> dict[str, int]:
    """Return how many sessions must leave each node."""
    return {address: sum(counts.values()) for address, counts in state.outgoing.items()}


def incoming_by_node(state: RebalanceState) -> dict[str, int]:
    """Return how many sessions each node must receive."""
    return {address: sum(counts.values()) for address, counts in state.incoming.items()}


def expected_water_level(capacities: Sequence[float], current: Sequence[int], incoming: int) -> float:
    """Return the load (sessions per capacity) to which `incoming` sessions fill the nodes, by bisection."""
    low, high = 0.0, (sum(current) + incoming + 1) / min(capacities)
    for _ in range(200):
        middle = (low + high) / 2
        taken = sum(max(0.0, middle * width - held) for width, held in zip(capacities, current, strict=True))
        low, high = (middle, high) if taken < incoming else (low, middle)
    return low
