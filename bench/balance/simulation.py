"""Simulate one balancer in one case and sample the cluster every second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import fmean

from bench.balance.balancer import Balancer, Ideal, LeastConnections, RoundRobin
from bench.balance.cases import Case, TopologyChange
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.tidevoy import TidevoyBalancer
from bench.balance.tiproxy import TiProxyBalancer
from bench.balance.workload import NODE_CAPACITY, SessionWorkload, build_cluster

WARM_UP_SECONDS = 300.0
"""Initial time that is not measured."""

TIDEVOY, LEAST_CONNECTIONS = "tidevoy", "least connections"
BALANCERS: Mapping[str, Callable[[Case, SimulatedCluster, EventQueue, Random], Balancer]] = {
    TIDEVOY: TidevoyBalancer,
    LEAST_CONNECTIONS: LeastConnections,
    "round robin": RoundRobin,
    "tiproxy": TiProxyBalancer,
    "ideal": Ideal,
}


@dataclass(frozen=True, slots=True)
class ObservedChange:
    """A topology change, and the samples until the next change or the end."""

    change: TopologyChange
    at: int  # seconds since the end of the warm-up
    imbalances: tuple[float, ...]
    # Per second: mean load of the nodes that joined / mean load of all nodes; empty if none joined.
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SimulationRecord:
    """The samples of one balancer in one case, one per second after the warm-up."""

    case: Case
    balancer: str
    imbalances: tuple[float, ...]
    # For each node that served all the time, one value per second: (the node's load / the mean load) - 1.
    deviations: tuple[tuple[float, ...], ...]
    changes: tuple[ObservedChange, ...]
    sessions: float  # mean number of open sessions
    moves: int  # migrations from nodes that kept serving
    early_moves: int  # `moves` less than a minute after the session's previous migration
    shortest_stay: float  # seconds between two migrations of a session; infinite if no session migrated twice


class Simulation:
    def __init__(
        self, case: Case, balancer: str, seconds: float, seed: int, warm_up: float = WARM_UP_SECONDS
    ) -> None:
        self.case = case
        self.balancer_name = balancer
        self.cluster = build_cluster(case)
        self._warm_up, self._seconds = warm_up, seconds
        self._event_queue = EventQueue()
        # The workload has its own random numbers, so that all balancers get the same sessions.
        self.balancer = BALANCERS[balancer](
            case, self.cluster, self._event_queue, Random(f"{seed} {balancer}")
        )
        self.cluster.on_count_changed = self.balancer.on_count_changed
        self._workload = SessionWorkload(
            case, self.cluster, self._event_queue, self.balancer, Random(f"{seed} {case.letter}")
        )
        self._imbalances: list[float] = []
        self._relative_loads: list[list[float]] = []
        self._sessions: list[int] = []
        self._joined_nodes: tuple[int, ...] = ()
        self._joined_shares: list[float] = []
        self._applied_changes: list[tuple[TopologyChange, int]] = []

    def run(self) -> SimulationRecord:
        event_queue, cluster = self._event_queue, self.cluster
        self._workload.start()
        event_queue.at(1.0, self._tick)
        for change in self.case.changes:
            event_queue.at(self._warm_up + change.at_fraction * self._seconds, self._apply_change, change)
        event_queue.run_until(self._warm_up)
        moves_before, early_before = cluster.moves, cluster.early_moves
        cluster.shortest_stay = float("inf")
        for second in range(round(self._seconds)):
            event_queue.run_until(self._warm_up + second + 1)
            self._sample()
        return SimulationRecord(
            case=self.case,
            balancer=self.balancer_name,
            imbalances=tuple(self._imbalances),
            deviations=self._deviations(),
            changes=self._observed_changes(),
            sessions=fmean(self._sessions),
            moves=cluster.moves - moves_before,
            early_moves=cluster.early_moves - early_before,
            shortest_stay=cluster.shortest_stay,
        )

    def _tick(self) -> None:
        self._event_queue.after(1.0, self._tick)
        self.balancer.on_second_passed()

    def _apply_change(self, change: TopologyChange) -> None:
        cluster = self.cluster
        self._applied_changes.append((change, len(self._imbalances)))
        if change.joins:
            self._joined_nodes = tuple(cluster.add_node(NODE_CAPACITY) for _ in range(change.joins))
            for node in self._joined_nodes:
                self.balancer.on_node_joined(node)
        # Nodes with direct clients never leave: no balancer can empty them.
        removable = [n for n in range(self.case.direct_nodes, self.case.nodes) if cluster.serving[n]]
        leaving = removable[: change.leaves]
        for node in leaving:
            cluster.serving[node] = False
        for node in leaving:
            self.balancer.on_node_drained(node)

    def _sample(self) -> None:
        cluster = self.cluster
        self._imbalances.append(cluster.imbalance())
        self._sessions.append(sum(cluster.totals))
        mean = cluster.mean_load() or 1.0
        loads = [t / c / mean for t, c in zip(cluster.totals, cluster.capacities, strict=True)]
        self._relative_loads.append([load - 1 for load in loads[: self.case.nodes]])
        self._joined_shares.append(fmean(loads[n] for n in self._joined_nodes) if self._joined_nodes else 0.0)

    def _deviations(self) -> tuple[tuple[float, ...], ...]:
        permanent_nodes = [node for node in range(self.case.nodes) if self.cluster.serving[node]]
        return tuple(tuple(loads[node] for loads in self._relative_loads) for node in permanent_nodes)

    def _observed_changes(self) -> tuple[ObservedChange, ...]:
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
