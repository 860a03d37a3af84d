"""The sessions that come and go, the same for every balancer: nothing here asks where a session is."""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from random import Random

from bench.balance.balancer import Balancer
from bench.balance.cases import Case
from bench.balance.cluster_state import Session, World
from bench.balance.event_queue import Agenda

FILLED = 60.0
"""Seconds from the beginning until there are as many sessions as there are to be."""
_CAPACITY = 100
_SIGMA = 1.5
_SHORT = 0.1  # the mean of a short session, of that of all; half of all sessions are short


class Lifetimes:
    """How long sessions last: mostly shortly, some very long."""

    def __init__(self, mean: float, random: Random) -> None:
        self._random = random
        self._short = _SHORT * mean
        # The mean of exp(N(mu, sigma)) is exp(mu + sigma^2 / 2).
        self._mu = math.log((2 - _SHORT) * mean) - _SIGMA**2 / 2

    def whole(self) -> float:
        """Of a session that begins."""
        if self._random.random() < 0.5:
            return self._random.expovariate(1 / self._short)
        return self._random.lognormvariate(self._mu, _SIGMA)

    def rest(self) -> float:
        """What is left for one that is found at a random moment: long ones are found more often."""
        if self._random.random() < _SHORT / 2:
            return self._random.expovariate(1 / self._short)
        return self._random.random() * self._random.lognormvariate(self._mu + _SIGMA**2, _SIGMA)


class Workload:
    """Opens and closes sessions."""

    def __init__(self, case: Case, world: World, agenda: Agenda, balancer: Balancer, random: Random) -> None:
        self._case = case
        self._world = world
        self._agenda = agenda
        self._balancer = balancer
        self._random = random
        self._lifetimes = Lifetimes(case.lifetime, random)
        self._busy = list(accumulate(1 / (rank + 1) ** case.skew for rank in range(case.envoys)))
        self._pools: list[dict[int, Session]] = [{} for _ in range(case.pools)]

    def begin(self) -> None:
        """Sessions come from now on."""
        for _ in range(self._case.sessions):
            self._agenda.at(self._random.uniform(2.0, FILLED), self._arrive, self._lifetimes.rest())
        self._agenda.at(FILLED, self._next)
        if self._case.pool_closes is not None:
            self._agenda.at(FILLED, self._close_pool, None)

    def _next(self) -> None:
        self._arrive(self._lifetimes.whole())
        self._agenda.after(self._random.expovariate(self._case.arrivals), self._next)

    def _arrive(self, lifetime: float) -> None:
        random, world = self._random, self._world
        is_direct = random.random() < self._case.direct
        envoy = bisect(self._busy, random.random() * self._busy[-1])
        pool = self._pools[random.randrange(self._case.pools)]
        node = random.randrange(self._case.direct_nodes)
        if is_direct:
            world.add_direct(node, 1)
            self._agenda.after(lifetime, world.add_direct, node, -1)
            return
        session = world.open(envoy, self._balancer.pick(envoy))
        pool[session.number] = session
        self._agenda.after(lifetime * world.slowness[session.node], self._end, session, pool)

    def _end(self, session: Session, pool: dict[int, Session]) -> None:
        pool.pop(session.number, None)
        self._world.close(session)

    def _close_pool(self, pool: dict[int, Session] | None) -> None:
        if pool is not None:
            for session in pool.values():
                self._world.close(session)
            pool.clear()
        pause = self._random.expovariate(1 / (self._case.pool_closes or math.inf))
        self._agenda.after(pause, self._close_pool, self._random.choice(self._pools))


def build(case: Case) -> World:
    """The nodes and Envoys of a case."""
    world = World(case.envoys)
    for position in range(case.nodes):
        # The last ones are different: direct clients come to the first.
        from_end = case.nodes - 1 - position
        is_half = from_end < case.half_nodes
        is_slow = case.half_nodes <= from_end < case.half_nodes + case.slow_nodes
        world.add_node(_CAPACITY // 2 if is_half else _CAPACITY, case.slowness if is_slow else 1.0)
    return world


def join(world: World) -> int:
    """One more node of the common kind; its position."""
    return world.add_node(_CAPACITY)
