"""One balancer in one case: runs it, looks each second, and keeps what it saw."""

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
"""Seconds from the beginning that are not measured."""

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
    """A change, and what was seen from that second until the next one, or the end."""

    change: TopologyChange
    at: int  # seconds since the warm-up
    imbalances: tuple[float, ...]
    # By second, what the nodes that joined have of their share; empty: none joined.
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SimulationRecord:
    """What was seen of one balancer in one case, each second after the warm-up."""

    case: Case
    balancer: str
    imbalances: tuple[float, ...]
    # Of each node that was there all the time, how far it was off the mean, in parts of it.
    deviations: tuple[tuple[float, ...], ...]
    events: tuple[ObservedChange, ...]
    sessions: float  # mean number
    moves: int  # of sessions whose node went on serving
    hasty_moves: int  # of these, those of sessions that had moved less than a minute ago
    shortest_stay: float  # least seconds between two moves of one session; infinite: none moved twice


class Simulation:
    """A case on its way."""

    def __init__(
        self, case: Case, balancer: str, seconds: float, seed: int, warm_up: float = WARM_UP_SECONDS
    ) -> None:
        self.case = case
        self.balancer = balancer
        self.world = build_cluster(case)
        self._warm_up, self._seconds = warm_up, seconds
        self._agenda = EventQueue()
        # Each has random numbers of its own, so that all balancers get the same sessions.
        self.strategy = BALANCERS[balancer](case, self.world, self._agenda, Random(f"{seed} {balancer}"))
        self.world.on_count_changed = self.strategy.on_count_changed
        self._workload = SessionWorkload(
            case, self.world, self._agenda, self.strategy, Random(f"{seed} {case.letter}")
        )
        self._imbalances: list[float] = []
        self._relative_loads: list[list[float]] = []
        self._sessions: list[int] = []
        self._joined_nodes: tuple[int, ...] = ()
        self._joined_shares: list[float] = []
        self._applied_changes: list[tuple[TopologyChange, int]] = []

    def run(self) -> SimulationRecord:
        """From the beginning to the end."""
        agenda, world = self._agenda, self.world
        self._workload.start()
        agenda.at(1.0, self._tick)
        for change in self.case.changes:
            agenda.at(self._warm_up + change.at_fraction * self._seconds, self._apply_change, change)
        agenda.run_until(self._warm_up)
        moves_before, hasty_before = world.moves, world.hasty_moves
        world.shortest_stay = float("inf")
        for second in range(round(self._seconds)):
            agenda.run_until(self._warm_up + second + 1)
            self._sample()
        return SimulationRecord(
            case=self.case,
            balancer=self.balancer,
            imbalances=tuple(self._imbalances),
            deviations=self._deviations(),
            events=self._events(),
            sessions=sum(self._sessions) / len(self._sessions),
            moves=world.moves - moves_before,
            hasty_moves=world.hasty_moves - hasty_before,
            shortest_stay=world.shortest_stay,
        )

    def _tick(self) -> None:
        self._agenda.after(1.0, self._tick)
        self.strategy.on_second_passed()

    def _apply_change(self, change: TopologyChange) -> None:
        world = self.world
        self._applied_changes.append((change, len(self._imbalances)))
        if change.joins:
            self._joined_nodes = tuple(add_common_node(world) for _ in range(change.joins))
            for node in self._joined_nodes:
                self.strategy.on_node_joined(node)
        # Nodes with clients past the fleet stay: no balancer can empty them.
        removable = [n for n in range(self.case.direct_nodes, self.case.nodes) if world.serving[n]]
        leaving = removable[: change.leaves]
        for node in leaving:
            world.serving[node] = False
        for node in leaving:
            self.strategy.on_node_drained(node)

    def _sample(self) -> None:
        world = self.world
        self._imbalances.append(world.imbalance())
        self._sessions.append(sum(world.totals))
        capacity_in_service = sum(
            c for c, serves in zip(world.capacities, world.serving, strict=True) if serves
        )
        mean = (
            sum(t for t, serves in zip(world.totals, world.serving, strict=True) if serves)
            / capacity_in_service
            or 1.0
        )
        self._relative_loads.append(
            [
                total / capacity / mean - 1
                for total, capacity, _ in zip(
                    world.totals, world.capacities, range(self.case.nodes), strict=False
                )
            ]
        )
        newest = self._joined_nodes
        joined_sessions = sum(world.totals[n] for n in newest)
        self._joined_shares.append(
            joined_sessions / (mean * sum(world.capacities[n] for n in newest)) if newest else 0.0
        )

    def _deviations(self) -> tuple[tuple[float, ...], ...]:
        stayed = [node for node in range(self.case.nodes) if self.world.serving[node]]
        return tuple(tuple(levels[node] for levels in self._relative_loads) for node in stayed)

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
