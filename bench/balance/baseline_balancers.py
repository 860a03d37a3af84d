"""Simple balancers that Tidevoy is compared with, each in its best form."""

from __future__ import annotations

from random import Random

from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue


class _PassiveBalancer:
    """A balancer that only picks nodes for new sessions."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        self._cluster = cluster
        self._event_queue = event_queue
        self._random = random

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """Nothing to do: the cluster holds the counts."""

    def on_node_joined(self, node: int) -> None:
        """Nothing to do: the cluster holds the nodes."""

    def on_node_drained(self, node: int) -> None:
        """Nothing to do: sessions stay until they end."""

    def on_second_passed(self) -> None:
        """Nothing to do: no session migrates."""


class LeastConnections(_PassiveBalancer):
    """Each Envoy picks the node on which it has the fewest sessions by weight; ties are random."""

    def pick_node(self, envoy: int) -> int:
        """Pick by the Envoy's own counts."""
        return least_loaded(self._cluster, self._cluster.counts[envoy], self._random)


class RoundRobin(_PassiveBalancer):
    """Each Envoy picks nodes in weighted turns with a random start."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        super().__init__(case, cluster, event_queue, random)
        self._next_turns: list[list[float]] = [
            [random.random() / capacity for capacity in cluster.capacities] for _ in range(cluster.envoys)
        ]

    def on_node_joined(self, node: int) -> None:
        """Give the node its first turn within the next round."""
        for due in self._next_turns:
            due.append(min(due) + self._random.random() / self._cluster.capacities[node])

    def pick_node(self, envoy: int) -> int:
        """Pick the node whose turn is next."""
        due, serving = self._next_turns[envoy], self._cluster.serving
        node = min((node for node in range(len(due)) if serving[node]), key=due.__getitem__)
        due[node] += 1 / self._cluster.capacities[node]
        return node


class Ideal(_PassiveBalancer):
    """One balancer that sees all sessions at once, and balances them each second at no cost."""

    def pick_node(self, envoy: int) -> int:
        """Pick by the sessions of the whole fleet."""
        return least_loaded(self._cluster, self._cluster.totals, self._random)

    def on_node_drained(self, node: int) -> None:
        """Migrate all its sessions at once."""
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
    """Return the serving node with the least load by weight after one more session; ties are random."""
    loads = [
        (count + 1) / capacity if serves else float("inf")
        for count, capacity, serves in zip(counts, cluster.capacities, cluster.serving, strict=True)
    ]
    least = min(loads)
    if loads.count(least) == 1:
        return loads.index(least)
    return random.choice([node for node, load in enumerate(loads) if load == least])
