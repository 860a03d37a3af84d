"""The simulated sessions. Every balancer gets the same sessions, which last longer on slow nodes."""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from random import Random

from bench.balance.balancer import Balancer
from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster, SimulatedSession
from bench.balance.event_queue import EventQueue

FILL_SECONDS = 60.0
"""Time until the intended number of sessions is open."""
NODE_CAPACITY = 100
_LOGNORMAL_SIGMA = 1.5
_SHORT_MEAN_RATIO = 0.1  # mean of short sessions / mean of all sessions; half of all sessions are short


class LifetimeDistribution:
    """The lifetimes of sessions: half of them are short, a few are very long."""

    def __init__(self, mean: float, random: Random) -> None:
        self._random = random
        self._short_mean = _SHORT_MEAN_RATIO * mean
        # The mean of exp(N(mu, sigma)) is exp(mu + sigma^2 / 2).
        self._lognormal_mu = math.log((2 - _SHORT_MEAN_RATIO) * mean) - _LOGNORMAL_SIGMA**2 / 2

    def sample(self) -> float:
        if self._random.random() < 0.5:
            return self._random.expovariate(1 / self._short_mean)
        return self._random.lognormvariate(self._lognormal_mu, _LOGNORMAL_SIGMA)

    def sample_remaining(self) -> float:
        """Draw the remaining lifetime of an open session; long sessions are more likely to be open."""
        if self._random.random() < _SHORT_MEAN_RATIO / 2:
            return self._random.expovariate(1 / self._short_mean)
        return self._random.random() * self._random.lognormvariate(
            self._lognormal_mu + _LOGNORMAL_SIGMA**2, _LOGNORMAL_SIGMA
        )


class SessionWorkload:
    def __init__(
        self,
        case: Case,
        cluster: SimulatedCluster,
        event_queue: EventQueue,
        balancer: Balancer,
        random: Random,
    ) -> None:
        self._case = case
        self._cluster = cluster
        self._event_queue = event_queue
        self._balancer = balancer
        self._random = random
        self._lifetimes = LifetimeDistribution(case.lifetime, random)
        self._cumulative_envoy_load = list(
            accumulate(1 / (rank + 1) ** case.skew for rank in range(case.envoys))
        )
        self._pools: list[dict[int, SimulatedSession]] = [{} for _ in range(case.pools)]

    def start(self) -> None:
        """Schedule the first sessions and all later events."""
        for _ in range(self._case.sessions):
            self._event_queue.at(
                self._random.uniform(2.0, FILL_SECONDS),
                self._open_session,
                self._lifetimes.sample_remaining(),
            )
        self._event_queue.at(FILL_SECONDS, self._next_arrival)
        if self._case.pool_close_interval is not None:
            self._event_queue.at(FILL_SECONDS, self._close_pool, None)

    def _next_arrival(self) -> None:
        self._open_session(self._lifetimes.sample())
        self._event_queue.after(self._random.expovariate(self._case.arrivals), self._next_arrival)

    def _open_session(self, lifetime: float) -> None:
        random, cluster = self._random, self._cluster
        is_direct = random.random() < self._case.direct_fraction
        envoy = bisect(self._cumulative_envoy_load, random.random() * self._cumulative_envoy_load[-1])
        pool = self._pools[random.randrange(self._case.pools)]
        node = random.randrange(self._case.direct_nodes)
        if is_direct:
            cluster.add_direct(node, 1)
            self._event_queue.after(lifetime, cluster.add_direct, node, -1)
            return
        session = cluster.open(envoy, self._balancer.pick_node(envoy))
        pool[session.number] = session
        self._event_queue.after(lifetime * cluster.slowness[session.node], self._close_session, session, pool)

    def _close_session(self, session: SimulatedSession, pool: dict[int, SimulatedSession]) -> None:
        pool.pop(session.number, None)
        self._cluster.close(session)

    def _close_pool(self, pool: dict[int, SimulatedSession] | None) -> None:
        if pool is not None:
            for session in pool.values():
                self._cluster.close(session)
            pool.clear()
        pause = self._random.expovariate(1 / (self._case.pool_close_interval or math.inf))
        self._event_queue.after(pause, self._close_pool, self._random.choice(self._pools))


def build_cluster(case: Case) -> SimulatedCluster:
    cluster = SimulatedCluster(case.envoys)
    for position in range(case.nodes):
        # Slow and half-weight nodes are the last nodes, because direct clients use the first nodes.
        from_end = case.nodes - 1 - position
        is_half = from_end < case.half_weight_nodes
        is_slow = not is_half and from_end < case.half_weight_nodes + case.slow_nodes
        cluster.add_node(NODE_CAPACITY // 2 if is_half else NODE_CAPACITY, case.slowness if is_slow else 1.0)
    return cluster
