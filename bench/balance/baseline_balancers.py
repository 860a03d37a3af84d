"""Simple balancers that Tidevoy is compared with, each in the form that is best for it."""

from __future__ import annotations

from random import Random

from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue


class _PassiveBalancer:
    """One that picks, and does nothing else."""

    def __init__(self, case: Case, world: SimulatedCluster, agenda: EventQueue, random: Random) -> None:
        self._world = world
        self._agenda = agenda
        self._random = random

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """The world has the counts."""

    def on_node_joined(self, node: int) -> None:
        """The world knows it."""

    def on_node_drained(self, node: int) -> None:
        """Its sessions stay until they end."""

    def on_second_passed(self) -> None:
        """Nothing is moved."""


class LeastConnections(_PassiveBalancer):
    """Each Envoy picks the node on which it has the fewest sessions by weight, any one of equal ones."""

    def pick_node(self, envoy: int) -> int:
        """By that Envoy's own counts."""
        return least_loaded(self._world, self._world.counts[envoy], self._random)


class RoundRobin(_PassiveBalancer):
    """In each Envoy nodes take turns by weight, from a random beginning on."""

    def __init__(self, case: Case, world: SimulatedCluster, agenda: EventQueue, random: Random) -> None:
        super().__init__(case, world, agenda, random)
        self._next_turns: list[list[float]] = [
            [random.random() / width for width in world.capacities] for _ in range(world.envoys)
        ]

    def on_node_joined(self, node: int) -> None:
        """It has a turn within the next one."""
        for due in self._next_turns:
            due.append(min(due) + self._random.random() / self._world.capacities[node])

    def pick_node(self, envoy: int) -> int:
        """Who is first."""
        due, serving = self._next_turns[envoy], self._world.serving
        node = min((node for node in range(len(due)) if serving[node]), key=due.__getitem__)
        due[node] += 1 / self._world.capacities[node]
        return node


class Ideal(_PassiveBalancer):
    """One balancer that sees all sessions at once, and evens them out each second at no cost."""

    def pick_node(self, envoy: int) -> int:
        """By the sessions that there are."""
        return least_loaded(self._world, self._world.totals, self._random)

    def on_node_drained(self, node: int) -> None:
        """Its sessions go at once."""
        for envoy in range(self._world.envoys):
            for session in list(self._world.sessions(envoy, node)):
                self._world.move(session, self.pick_node(envoy), self._agenda.now)

    def on_second_passed(self) -> None:
        """Move sessions until none is better off elsewhere."""
        world = self._world
        nodes = [node for node in range(world.nodes) if world.serving[node]]
        movable = {node: [s for e in range(world.envoys) for s in world.sessions(e, node)] for node in nodes}
        while True:
            to = min(nodes, key=lambda node: (world.totals[node] + 1) / world.capacities[node])
            donors = [node for node in nodes if movable[node]]
            if not donors:
                return
            fullest = max(donors, key=lambda node: world.totals[node] / world.capacities[node])
            after = (world.totals[to] + 1) / world.capacities[to]
            if world.totals[fullest] / world.capacities[fullest] <= after:
                return
            world.move(movable[fullest].pop(), to, self._agenda.now)


def least_loaded(world: SimulatedCluster, counts: list[int], random: Random) -> int:
    """The node in service that would have least by weight with one session more; any one of equal ones."""
    loads = [
        (count + 1) / width if serves else float("inf")
        for count, width, serves in zip(counts, world.capacities, world.serving, strict=True)
    ]
    least = min(loads)
    if loads.count(least) == 1:
        return loads.index(least)
    return random.choice([node for node, load in enumerate(loads) if load == least])
