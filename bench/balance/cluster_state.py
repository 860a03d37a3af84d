"""The true state of a simulated cluster, of which balancers know only a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

NEVER = float("-inf")
MIN_STAY_SECONDS = 60.0
"""Minimum time between two migrations of a session, unless its node drains."""


class SimulatedSession:
    """One session through an Envoy. `moved_at`: when it migrated to its node, or NEVER."""

    __slots__ = ("envoy", "is_over", "moved_at", "node", "number")

    def __init__(self, number: int, envoy: int, node: int) -> None:
        self.number = number
        self.envoy = envoy
        self.node = node
        self.moved_at = NEVER
        self.is_over = False


class SimulatedCluster:
    """Envoys, nodes and sessions; Envoys and nodes are numbered by position."""

    def __init__(self, envoys: int) -> None:
        self.capacities: list[int] = []
        self.slowness: list[float] = []  # factor of the lifetime of sessions on the node
        self.serving: list[bool] = []  # False: the node drains
        self.direct_sessions: list[int] = []  # sessions that bypass all Envoys
        self.totals: list[int] = []  # all sessions, direct ones included
        self.counts: list[list[int]] = [[] for _ in range(envoys)]  # by Envoy, then by node
        self.moves = 0  # migrations from nodes that kept serving
        self.hasty_moves = 0  # those of them less than MIN_STAY_SECONDS after the session's last migration
        self.evictions = 0  # migrations from draining nodes
        self.shortest_stay = float("inf")  # shortest time between two migrations of one session, in seconds
        # Called with Envoy, node and +1 or -1.
        self.on_count_changed: Callable[[int, int, int], None] = _ignore_change
        self._sessions: list[list[dict[int, SimulatedSession]]] = [[] for _ in range(envoys)]
        self._opened = 0

    @property
    def envoys(self) -> int:
        """The number of Envoys."""
        return len(self.counts)

    @property
    def nodes(self) -> int:
        """The number of nodes, including those that have left."""
        return len(self.totals)

    def add_node(self, capacity: int, slowness: float = 1.0) -> int:
        """Add a node and return its position."""
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
        """Open a session."""
        self._opened += 1
        session = SimulatedSession(self._opened, envoy, node)
        self._attach(session, node)
        return session

    def close(self, session: SimulatedSession) -> None:
        """Close a session on its current node; no effect if it is closed."""
        if not session.is_over:
            session.is_over = True
            self._detach(session)

    def move(self, session: SimulatedSession, node: int, now: float) -> None:
        """Migrate a session to another node."""
        if self.serving[session.node]:
            self.moves += 1
            self.hasty_moves += now - session.moved_at < MIN_STAY_SECONDS
            self.shortest_stay = min(self.shortest_stay, now - session.moved_at)
        else:
            self.evictions += 1
        self._detach(session)
        session.moved_at = now
        self._attach(session, node)

    def add_direct(self, node: int, delta: int) -> None:
        """Add (or with a negative `delta` remove) direct sessions of a node."""
        self.direct_sessions[node] += delta
        self.totals[node] += delta

    def sessions(self, envoy: int, node: int) -> Iterator[SimulatedSession]:
        """Iterate over the sessions of an Envoy on a node, oldest first."""
        return iter(self._sessions[envoy][node].values())

    def oldest(self, envoy: int, node: int, count: int) -> list[SimulatedSession]:
        """Return at most `count` of these sessions."""
        return list(islice(self.sessions(envoy, node), count))

    def imbalance(self) -> float:
        """Return the load (sessions by capacity) of the fullest serving node divided by the mean; 1: even."""
        sessions = capacity = 0
        most = 0.0
        for serves, total, node_capacity in zip(self.serving, self.totals, self.capacities, strict=True):
            if serves:
                sessions += total
                capacity += node_capacity
                most = max(most, total / node_capacity)
        return most * capacity / sessions if sessions else 1.0

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


def _ignore_change(envoy: int, node: int, delta: int) -> None:
    """Do nothing: the default callback."""
