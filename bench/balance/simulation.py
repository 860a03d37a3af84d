"""One balancer in one case: runs it, looks each second, and keeps what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from bench.balance.balancer import Balancer
from bench.balance.baseline_balancers import Alone, Ideal, RoundRobin
from bench.balance.cases import Case, Change
from bench.balance.cluster_state import World
from bench.balance.event_queue import Agenda
from bench.balance.tidevoy import Tidevoy
from bench.balance.tiproxy import TiProxy
from bench.balance.workload import Workload, build, join

WARM_UP = 300.0
"""Seconds from the beginning that are not measured."""

TIDEVOY, ALONE = "tidevoy", "alone"
BALANCERS: Mapping[str, Callable[[Case, World, Agenda, Random], Balancer]] = {
    TIDEVOY: Tidevoy,
    ALONE: Alone,
    "round robin": RoundRobin,
    "tiproxy": TiProxy,
    "ideal": Ideal,
}


@dataclass(frozen=True, slots=True)
class Event:
    """A change, and what was seen from that second until the next one, or the end."""

    change: Change
    at: int  # seconds since the warm-up
    imbalances: tuple[float, ...]
    # By second, what the nodes that joined have of their share; empty: none joined.
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """What was seen of one balancer in one case, each second after the warm-up."""

    case: Case
    balancer: str
    imbalances: tuple[float, ...]
    # Of each node that was there all the time, how far it was off the mean, in parts of it.
    deviations: tuple[tuple[float, ...], ...]
    events: tuple[Event, ...]
    sessions: float  # mean number
    moves: int  # of sessions whose node went on serving
    hasty: int  # of these, those of sessions that had moved less than a minute ago
    shortest_stay: float  # least seconds between two moves of one session; infinite: none moved twice


class Simulation:
    """A case on its way."""

    def __init__(
        self, case: Case, balancer: str, seconds: float, seed: int, warm_up: float = WARM_UP
    ) -> None:
        self.case = case
        self.balancer = balancer
        self.world = build(case)
        self._warm_up, self._seconds = warm_up, seconds
        self._agenda = Agenda()
        # Each has random numbers of its own, so that all balancers get the same sessions.
        self.balanced_by = BALANCERS[balancer](case, self.world, self._agenda, Random(f"{seed} {balancer}"))
        self.world.shifted = self.balanced_by.shifted
        self._workload = Workload(
            case, self.world, self._agenda, self.balanced_by, Random(f"{seed} {case.letter}")
        )
        self._imbalances: list[float] = []
        self._levels: list[list[float]] = []
        self._sessions: list[int] = []
        self._newest: tuple[int, ...] = ()
        self._shares: list[float] = []
        self._changed: list[tuple[Change, int]] = []

    def run(self) -> Record:
        """From the beginning to the end."""
        agenda, world = self._agenda, self.world
        self._workload.begin()
        agenda.at(1.0, self._tick)
        for change in self.case.changes:
            agenda.at(self._warm_up + change.at * self._seconds, self._change, change)
        agenda.run_until(self._warm_up)
        moves_before, hasty_before = world.moves, world.hasty
        world.shortest_stay = float("inf")
        for second in range(round(self._seconds)):
            agenda.run_until(self._warm_up + second + 1)
            self._sample()
        return Record(
            case=self.case,
            balancer=self.balancer,
            imbalances=tuple(self._imbalances),
            deviations=self._deviations(),
            events=self._events(),
            sessions=sum(self._sessions) / len(self._sessions),
            moves=world.moves - moves_before,
            hasty=world.hasty - hasty_before,
            shortest_stay=world.shortest_stay,
        )

    def _tick(self) -> None:
        self._agenda.after(1.0, self._tick)
        self.balanced_by.tick()

    def _change(self, change: Change) -> None:
        world = self.world
        self._changed.append((change, len(self._imbalances)))
        if change.joins:
            self._newest = tuple(join(world) for _ in range(change.joins))
            for node in self._newest:
                self.balanced_by.joined(node)
        # Nodes with clients past the fleet stay: no balancer can empty them.
        able = [n for n in range(self.case.direct_nodes, self.case.nodes) if world.serving[n]]
        leaving = able[: change.leaves]
        for node in leaving:
            world.serving[node] = False
        for node in leaving:
            self.balanced_by.leaves(node)

    def _sample(self) -> None:
        world = self.world
        self._imbalances.append(world.imbalance())
        self._sessions.append(sum(world.totals))
        width = sum(c for c, serves in zip(world.capacities, world.serving, strict=True) if serves)
        mean = sum(t for t, serves in zip(world.totals, world.serving, strict=True) if serves) / width or 1.0
        self._levels.append(
            [
                total / capacity / mean - 1
                for total, capacity, _ in zip(
                    world.totals, world.capacities, range(self.case.nodes), strict=False
                )
            ]
        )
        newest = self._newest
        has = sum(world.totals[n] for n in newest)
        self._shares.append(has / (mean * sum(world.capacities[n] for n in newest)) if newest else 0.0)

    def _deviations(self) -> tuple[tuple[float, ...], ...]:
        stayed = [node for node in range(self.case.nodes) if self.world.serving[node]]
        return tuple(tuple(levels[node] for levels in self._levels) for node in stayed)

    def _events(self) -> tuple[Event, ...]:
        ends = [at for _, at in self._changed[1:]] + [len(self._imbalances)]
        return tuple(
            Event(
                change,
                at,
                tuple(self._imbalances[at:end]),
                tuple(self._shares[at:end]) if change.joins else (),
            )
            for (change, at), end in zip(self._changed, ends, strict=False)
        )
