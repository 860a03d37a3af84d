"""The base class of simulated balancers, and simple balancers for comparison with Tidevoy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random

from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue


class Balancer(ABC):
    """A balancing algorithm. Nodes and Envoys are numbered by their positions in the cluster.

    By default, a balancer only picks nodes and never migrates a session.
    """

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        self._case = case
        self._cluster = cluster
        self._event_queue = event_queue
        self._random = random

    @abstractmethod
    def pick_node(self, envoy: int) -> int:
        """Return the node for a new session of the Envoy; the session starts on it at once."""

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:  # noqa: B027
        """Called when an Envoy has one session more (`delta` 1) or fewer (-1) on a node."""

    def on_node_joined(self, node: int) -> None:  # noqa: B027
        """Called when a node has joined and accepts sessions."""

    def on_node_drained(self, node: int) -> None:  # noqa: B027
        """Called when a drain starts: the node accepts no new sessions."""

    def on_second_passed(self) -> None:  # noqa: B027
        """Called once per second."""


class LeastConnections(Balancer):
    """Each Envoy picks the node with its fewest sessions per weight, or a random one of several."""

    def pick_node(self, envoy: int) -> int:
        return least_loaded(self._cluster, self._cluster.counts[envoy], self._random)


class RoundRobin(Balancer):
    """Weighted round robin in each Envoy, with a random start."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        super().__init__(case, cluster, event_queue, random)
        self._next_turns: list[list[float]] = [
            [random.random() / capacity for capacity in cluster.capacities] for _ in range(cluster.envoys)
        ]

    def on_node_joined(self, node: int) -> None:
        """Schedule the node's first turn at a random time within one cycle."""
        for due in self._next_turns:
            due.append(min(due) + self._random.random() / self._cluster.capacities[node])

    def pick_node(self, envoy: int) -> int:
        due, serving = self._next_turns[envoy], self._cluster.serving
        node = min((node for node in range(len(due)) if serving[node]), key=due.__getitem__)
        due[node] += 1 / self._cluster.capacities[node]
        return node


class Ideal(Balancer):
    """A single balancer for all Envoys. It always knows all sessions, and rebalances them every second."""

    def pick_node(self, envoy: int) -> int:
        return least_loaded(self._cluster, self._cluster.totals, self._random)

    def on_node_drained(self, node: int) -> None:
        for envoy in range(self._cluster.envoys):
            for session in list(self._cluster.sessions(envoy, node)):
                self._cluster.move(session, self.pick_node(envoy), self._event_queue.now)

    def on_second_passed(self) -> None:
        """Migrate sessions until no migration improves the balance."""
        cluster = self._cluster
        nodes = [node for node in range(cluster.nodes) if cluster.serving[node]]
        movable = {
            node: [s for e in range(cluster.envoys) for s in cluster.sessions(e, node)] for node in nodes
        }
        while True:
            target = min(nodes, key=lambda node: (cluster.totals[node] + 1) / cluster.capacities[node])
            donors = [node for node in nodes if movable[node]]
            if not donors:
                return
            fullest = max(donors, key=lambda node: cluster.totals[node] / cluster.capacities[node])
            after = (cluster.totals[target] + 1) / cluster.capacities[target]
            if cluster.totals[fullest] / cluster.capacities[fullest] <= after:
                return
            cluster.move(movable[fullest].pop(), target, self._event_queue.now)


def least_loaded(cluster: SimulatedCluster, counts: list[int], random: Random) -> int:
    """Return the serving node that would have the lowest sessions / capacity after one more session."""
    loads = [
        (count + 1) / capacity if serves else float("inf")
        for count, capacity, serves in zip(counts, cluster.capacities, cluster.serving, strict=True)
    ]
    least = min(loads)
    if loads.count(least) == 1:
        return loads.index(least)
    return random.choice([node for node, load in enumerate(loads) if load == least])
