"""The true state of a simulated cluster. Balancers know only a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

NEVER = float("-inf")
MIN_STAY_SECONDS = 60.0
"""Minimum time between two migrations of a session, unless its node drains."""


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """One session through an Envoy. `moved_at`: time of its last migration, or NEVER."""

    number: int
    envoy: int
    node: int
    moved_at: float = NEVER
    is_over: bool = False


class SimulatedCluster:
    """Envoys, nodes and sessions; Envoys and nodes are numbered by position."""

    def __init__(self, envoys: int) -> None:
        self.capacities: list[int] = []
        self.slowness: list[float] = []  # multiplies the lifetime of sessions on the node
        self.serving: list[bool] = []  # False if the node drains
        self.direct_sessions: list[int] = []  # sessions that bypass all Envoys
        self.totals: list[int] = []  # all sessions of each node, including direct sessions
        self.counts: list[list[int]] = [[] for _ in range(envoys)]  # by Envoy, then by node
        self.moves = 0  # migrations from nodes that kept serving
        self.early_moves = 0  # `moves` less than MIN_STAY_SECONDS after the session's previous migration
        self.drain_migrations = 0  # migrations from draining nodes
        self.shortest_stay = float("inf")  # shortest time between two migrations of one session, in seconds
        # Called with Envoy, node, and +1 for a session that comes to the node or -1 for one that leaves it.
        self.on_count_changed: Callable[[int, int, int], None] = lambda envoy, node, delta: None
        self._sessions: list[list[dict[int, SimulatedSession]]] = [[] for _ in range(envoys)]
        self._opened = 0

    @property
    def envoys(self) -> int:
        return len(self.counts)

    @property
    def nodes(self) -> int:
        """The number of nodes, including those that have left."""
        return len(self.totals)

    def add_node(self, capacity: int, slowness: float = 1.0) -> int:
        self.capacities.append(capacity)
        self.slowness.append(slowness)
        self.serving.append(True)
        self.direct_sessions.append(0)
        self.totals.append(0)
        for counts, sessions_by_node in zip(self.counts, self._sessions, strict=True):
            counts.append(0)
            sessions_by_node.append({})
        return len(self.totals) - 1

    def open(self, envoy: int, node: int) -> SimulatedSession:
        self._opened += 1
        session = SimulatedSession(self._opened, envoy, node)
        self._attach(session, node)
        return session

    def close(self, session: SimulatedSession) -> None:
        """Close a session. Do nothing if it is already closed."""
        if not session.is_over:
            session.is_over = True
            self._detach(session)

    def move(self, session: SimulatedSession, node: int, now: float) -> None:
        if self.serving[session.node]:
            self.moves += 1
            self.early_moves += now - session.moved_at < MIN_STAY_SECONDS
            self.shortest_stay = min(self.shortest_stay, now - session.moved_at)
        else:
            self.drain_migrations += 1
        self._detach(session)
        session.moved_at = now
        self._attach(session, node)

    def add_direct(self, node: int, delta: int) -> None:
        """Add `delta` direct sessions to a node; a negative `delta` removes sessions."""
        self.direct_sessions[node] += delta
        self.totals[node] += delta

    def sessions(self, envoy: int, node: int) -> Iterator[SimulatedSession]:
        """Iterate over the sessions of an Envoy on a node, in the order of their arrival there."""
        return iter(self._sessions[envoy][node].values())

    def oldest(self, envoy: int, node: int, count: int) -> list[SimulatedSession]:
        """Return the `count` sessions of an Envoy that have been on a node for longest."""
        return list(islice(self.sessions(envoy, node), count))

    def mean_load(self) -> float:
        """Return the sessions of all serving nodes divided by the capacity of all serving nodes."""
        nodes = [node for node in range(self.nodes) if self.serving[node]]
        return sum(self.totals[node] for node in nodes) / sum(self.capacities[node] for node in nodes)

    def imbalance(self) -> float:
        """Return the highest load (sessions / capacity) of a serving node divided by the mean."""
        loads = zip(self.totals, self.capacities, self.serving, strict=True)
        highest = max(total / capacity for total, capacity, serves in loads if serves)
        mean = self.mean_load()
        return highest / mean if mean else 1.0

    def _attach(self, session: SimulatedSession, node: int) -> None:
        session.node = node
        self._sessions[session.envoy][node][session.number] = session
        self.counts[session.envoy][node] += 1
        self.totals[node] += 1
        self.on_count_changed(session.envoy, node, 1)

    def _detach(self, session: SimulatedSession) -> None:
        envoy, node = session.envoy, session.node
        del self._sessions[envoy][node][session.number]
        self.counts[envoy][node] -= 1
        self.totals[node] -= 1
        self.on_count_changed(envoy, node, -1)
