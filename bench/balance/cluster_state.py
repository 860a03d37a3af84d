"""Where every session of a simulation is: the truth, of which balancers know a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

NEVER = float("-inf")
MIN_STAY_SECONDS = 60.0
"""Seconds that a session is to stay where it has moved to, unless its node is left."""


class SimulatedSession:
    """One session through an Envoy. `moved_at`: when it came to its node by a move, or never."""

    __slots__ = ("envoy", "is_over", "moved_at", "node", "number")

    def __init__(self, number: int, envoy: int, node: int) -> None:
        self.number = number
        self.envoy = envoy
        self.node = node
        self.moved_at = NEVER
        self.is_over = False


class SimulatedCluster:
    """Envoys and nodes by their positions, and what is between them."""

    def __init__(self, envoys: int) -> None:
        self.capacities: list[int] = []
        self.slowness: list[float] = []  # how much longer than elsewhere sessions last there
        self.serving: list[bool] = []  # False: it is to get no sessions, and to lose those that it has
        self.direct_sessions: list[int] = []  # sessions that come past all Envoys
        self.totals: list[int] = []  # those, and the ones through Envoys
        self.counts: list[list[int]] = [[] for _ in range(envoys)]  # by Envoy, then by node
        self.moves = 0  # of sessions whose node went on serving
        self.hasty_moves = 0  # of these, those of sessions that had moved less than a minute ago
        self.evictions = 0  # of sessions whose node was to be left
        self.shortest_stay = float("inf")  # least seconds between two moves of one session
        self.on_count_changed: Callable[[int, int, int], None] = (
            _ignore_change  # hears of Envoy, node, and one more or less
        )
        self._sessions: list[list[dict[int, SimulatedSession]]] = [[] for _ in range(envoys)]
        self._opened = 0

    @property
    def envoys(self) -> int:
        """How many there are."""
        return len(self.counts)

    @property
    def nodes(self) -> int:
        """How many there are, with those that have left."""
        return len(self.totals)

    def add_node(self, capacity: int, slowness: float = 1.0) -> int:
        """One more node; its position."""
        self.capacities.append(capacity)
        self.slowness.append(slowness)
        self.serving.append(True)
        self.direct_sessions.append(0)
        self.totals.append(0)
        for counts, held in zip(self.counts, self._sessions, strict=True):
            counts.append(0)
            held.append({})
        return len(self.totals) - 1

    def open(self, envoy: int, node: int) -> SimulatedSession:
        """A session begins."""
        self._opened += 1
        session = SimulatedSession(self._opened, envoy, node)
        self._attach(session, node)
        return session

    def close(self, session: SimulatedSession) -> None:
        """A session ends, wherever it is by now; nothing, when it has ended before."""
        if not session.is_over:
            session.is_over = True
            self._detach(session)

    def move(self, session: SimulatedSession, node: int, now: float) -> None:
        """A session goes on at another node."""
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
        """Sessions begin (or end) there that no Envoy sees."""
        self.direct_sessions[node] += delta
        self.totals[node] += delta

    def sessions(self, envoy: int, node: int) -> Iterator[SimulatedSession]:
        """The sessions of an Envoy on a node, those that came first before the others."""
        return iter(self._sessions[envoy][node].values())

    def oldest(self, envoy: int, node: int, count: int) -> list[SimulatedSession]:
        """As many of these, at most."""
        return list(islice(self.sessions(envoy, node), count))

    def imbalance(self) -> float:
        """Sessions by capacity of the fullest node in service, in parts of the mean of these; 1: even."""
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
    """Nobody wants to know."""
