"""Simulate one balancer in one case and sample the cluster every second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from bench.balance.balancer import Balancer
from bench.balance.baseline_balancers import Ideal, LeastConnections, RoundRobin
from bench.balance.cases import Case, TopologyChange
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.tidevoy import TidevoyBalancer
from bench.balance.tiproxy import TiProxyBalancer
from bench.balance.workload import SessionWorkload, add_common_node, build_cluster

WARM_UP_SECONDS = 300.0
"""Initial time that is not measured."""

TIDEVOY, LEAST_CONNECTIONS = "tidevoy", "alone"
BALANCERS: Mapping[str, Callable[[Case, SimulatedCluster, EventQueue, Random], Balancer]] = {
    TIDEVOY: TidevoyBalancer,
    LEAST_CONNECTIONS: LeastConnections,
    "round robin": RoundRobin,
    "tiproxy": TiProxyBalancer,
    "ideal": Ideal,
}


@dataclass(frozen=True, slots=True)
class ObservedChange:
    """A topology change and the samples from then until the next change or the end."""

    change: TopologyChange
    at: int  # seconds since the warm-up
    imbalances: tuple[float, ...]
    # By second, which fraction of their share the joined nodes have; empty: none joined.
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SimulationRecord:
    """The samples of one balancer in one case, one per second after the warm-up."""

    case: Case
    balancer: str
    imbalances: tuple[float, ...]
    # For each node that served all the time, its relative deviation from the mean.
    deviations: tuple[tuple[float, ...], ...]
    events: tuple[ObservedChange, ...]
    sessions: float  # mean number
    moves: int  # migrations from nodes that kept serving
    hasty_moves: int  # those of them less than a minute after the session's last migration
    shortest_stay: float  # shortest seconds between two migrations of a session; infinite: no session had two


class Simulation:
    """One run of a case."""

    def __init__(
        self, case: Case, balancer: str, seconds: float, seed: int, warm_up: float = WARM_UP_SECONDS
    ) -> None:
        self.case = case
        self.balancer = balancer
        self.cluster = build_cluster(case)
        self._warm_up, self._seconds = warm_up, seconds
        self._event_queue = EventQueue()
        # Balancer and workload have separate random numbers, so that all balancers get the same sessions.
        self.strategy = BALANCERS[balancer](
            case, self.cluster, self._event_queue, Random(f"{seed} {balancer}")
        )
        self.cluster.on_count_changed = self.strategy.on_count_changed
        self._workload = SessionWorkload(
            case, self.cluster, self._event_queue, self.strategy, Random(f"{seed} {case.letter}")
        )
        self._imbalances: list[float] = []
        self._relative_loads: list[list[float]] = []
        self._sessions: list[int] = []
        self._joined_nodes: tuple[int, ...] = ()
        self._joined_shares: list[float] = []
        self._applied_changes: list[tuple[TopologyChange, int]] = []

    def run(self) -> SimulationRecord:
        """Run the simulation and return its samples."""
        event_queue, cluster = self._event_queue, self.cluster
        self._workload.start()
        event_queue.at(1.0, self._tick)
        for change in self.case.changes:
            event_queue.at(self._warm_up + change.at_fraction * self._seconds, self._apply_change, change)
        event_queue.run_until(self._warm_up)
        moves_before, hasty_before = cluster.moves, cluster.hasty_moves
        cluster.shortest_stay = float("inf")
        for second in range(round(self._seconds)):
            event_queue.run_until(self._warm_up + second + 1)
            self._sample()
        return SimulationRecord(
            case=self.case,
            balancer=self.balancer,
            imbalances=tuple(self._imbalances),
            deviations=self._deviations(),
            events=self._events(),
            sessions=sum(self._sessions) / len(self._sessions),
            moves=cluster.moves - moves_before,
            hasty_moves=cluster.hasty_moves - hasty_before,
            shortest_stay=cluster.shortest_stay,
        )

    def _tick(self) -> None:
        self._event_queue.after(1.0, self._tick)
        self.strategy.on_second_passed()

    def _apply_change(self, change: TopologyChange) -> None:
        cluster = self.cluster
        self._applied_changes.append((change, len(self._imbalances)))
        if change.joins:
            self._joined_nodes = tuple(add_common_node(cluster) for _ in range(change.joins))
            for node in self._joined_nodes:
                self.strategy.on_node_joined(node)
        # Nodes with direct clients stay: no balancer can empty them.
        removable = [n for n in range(self.case.direct_nodes, self.case.nodes) if cluster.serving[n]]
        leaving = removable[: change.leaves]
        for node in leaving:
            cluster.serving[node] = False
        for node in leaving:
            self.strategy.on_node_drained(node)

    def _sample(self) -> None:
        cluster = self.cluster
        self._imbalances.append(cluster.imbalance())
        self._sessions.append(sum(cluster.totals))
        capacity_in_service = sum(
            c for c, serves in zip(cluster.capacities, cluster.serving, strict=True) if serves
        )
        mean = (
            sum(t for t, serves in zip(cluster.totals, cluster.serving, strict=True) if serves)
            / capacity_in_service
            or 1.0
        )
        self._relative_loads.append(
            [
                total / capacity / mean - 1
                for total, capacity, _ in zip(
                    cluster.totals, cluster.capacities, range(self.case.nodes), strict=False
                )
            ]
        )
        joined = self._joined_nodes
        joined_sessions = sum(cluster.totals[n] for n in joined)
        self._joined_shares.append(
            joined_sessions / (mean * sum(cluster.capacities[n] for n in joined)) if joined else 0.0
        )

    def _deviations(self) -> tuple[tuple[float, ...], ...]:
        permanent_nodes = [node for node in range(self.case.nodes) if self.cluster.serving[node]]
        return tuple(tuple(loads[node] for loads in self._relative_loads) for node in permanent_nodes)

    def _events(self) -> tuple[ObservedChange, ...]:
        ends = [at for _, at in self._applied_changes[1:]] + [len(self._imbalances)]
        return tuple(
            ObservedChange(
                change,
                at,
                tuple(self._imbalances[at:end]),
                tuple(self._joined_shares[at:end]) if change.joins else (),
            )
            for (change, at), end in zip(self._applied_changes, ends, strict=False)
        )
