"""The simulated module in each Envoy: it picks nodes by published weights and migrates sessions.

It follows the rules of `filters/module/src/policy.rs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from bench.balance.cluster_state import MIN_STAY_SECONDS, SimulatedCluster, SimulatedSession
from bench.balance.event_queue import EventQueue

MOVE_SECONDS = 0.05
"""Duration of a migration. An Envoy runs one migration at a time."""


@dataclass(frozen=True, slots=True)
class EnvoyUpdate:
    """What the control plane publishes to all Envoys. Nodes are numbered by position.

    `outgoing` and `incoming`: number of sessions to migrate from or to a node, per node and Envoy.
    """

    weights: tuple[int, ...] = ()  # a node of weight 0 gets no new sessions
    draining: frozenset[int] = frozenset()
    round: int = 0
    outgoing: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    incoming: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


class SimulatedModules:
    """The modules of all Envoys. Each module knows only the sessions of its own Envoy."""

    def __init__(self, cluster: SimulatedCluster, event_queue: EventQueue, random: Random) -> None:
        self._cluster = cluster
        self._event_queue = event_queue
        self._random = random
        self._update = EnvoyUpdate()
        self._added_sessions: list[list[int]] = [[] for _ in range(cluster.envoys)]
        self._next_turns: list[list[float] | None] = [None] * cluster.envoys  # None if they must be drawn
        self._move_phases: list[list[float] | None] = [None] * cluster.envoys  # None if they must be drawn
        # Per Envoy: sessions that the round still has to migrate, by source node and by target node.
        self._outgoing_left: list[dict[int, int]] = [{} for _ in range(cluster.envoys)]
        self._incoming_left: list[dict[int, int]] = [{} for _ in range(cluster.envoys)]
        self._is_moving = [False] * cluster.envoys
        # Per Envoy: number of migrated sessions, by source node.
        self.moved: list[dict[int, int]] = [{} for _ in range(cluster.envoys)]

    def apply_update(self, update: EnvoyUpdate) -> None:
        before, self._update = self._update, update
        if _same_weights(before.weights, update.weights):
            self._adapt_to_node_changes(before)
        else:
            for envoy, added in enumerate(self._added_sessions):
                added[:] = [0] * len(update.weights)
                self._next_turns[envoy] = self._move_phases[envoy] = None
        if update.round != before.round:
            self._start_round(update)
        elif update.outgoing != before.outgoing or update.incoming != before.incoming:
            self._cancel_moves(update)
        if update.draining:
            for envoy in range(self._cluster.envoys):
                self._start_moving(envoy)

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        added = self._added_sessions[envoy]
        if node < len(added):
            added[node] += delta

    def pick_node(self, envoy: int) -> int:
        weights = self._update.weights
        due = self._next_turns[envoy]
        if due is None:
            due = self._next_turns[envoy] = [self._first_turn(weight) for weight in weights]
        chosen = choose_node(self._added_sessions[envoy], weights, due)
        if chosen is None:
            raise AssertionError("the control plane has published no usable node")
        due[chosen] += 1 / weights[chosen]
        return chosen

    def _first_turn(self, weight: int) -> float:
        return self._random.random() / (weight or 1)

    def _adapt_to_node_changes(self, before: EnvoyUpdate) -> None:
        """Keep the turns of the nodes that remain, and draw the first turns of new nodes."""
        weights = self._update.weights
        if weights == before.weights:
            return
        old = len(before.weights)
        room = len(weights) - old
        new = [node for node, w in enumerate(weights) if w and (node >= old or not before.weights[node])]
        for envoy, added in enumerate(self._added_sessions):
            added += [0] * room
            due, phases = self._next_turns[envoy], self._move_phases[envoy]
            if due is not None:
                start = min(turn for turn, weight in zip(due, before.weights, strict=True) if weight)
                due[:] = [turn - start for turn in due] + [0.0] * room
            if phases is not None:
                phases += [0.0] * room
            for node in new:
                added[node] = 0
                if due is not None:
                    due[node] = self._first_turn(weights[node])
                if phases is not None:
                    phases[node] = 1.0 - self._random.random()

    # --- migrations ---

    def _start_round(self, update: EnvoyUpdate) -> None:
        self._outgoing_left = self._by_envoy(update.outgoing)
        self._incoming_left = self._by_envoy(update.incoming)
        for envoy in sorted({envoy for counts in update.outgoing.values() for envoy in counts}):
            self._start_moving(envoy)

    def _cancel_moves(self, update: EnvoyUpdate) -> None:
        for remaining, requested in (
            (self._outgoing_left, update.outgoing),
            (self._incoming_left, update.incoming),
        ):
            for envoy, counts in enumerate(remaining):
                for node in [node for node in counts if envoy not in requested.get(node, {})]:
                    del counts[node]

    def _by_envoy(self, requested: Mapping[int, Mapping[int, int]]) -> list[dict[int, int]]:
        return [
            {node: counts[envoy] for node, counts in requested.items() if envoy in counts}
            for envoy in range(self._cluster.envoys)
        ]

    def _start_moving(self, envoy: int) -> None:
        if not self._is_moving[envoy]:
            self._begin_next_move(envoy)

    def _begin_next_move(self, envoy: int) -> None:
        move = self._next_from_draining(envoy) or self._next_for_rebalance(envoy)
        self._is_moving[envoy] = move is not None
        if move is not None:
            self._event_queue.after(MOVE_SECONDS, self._finish_move, *move)

    def _next_from_draining(self, envoy: int) -> tuple[SimulatedSession, int] | None:
        for node in self._update.draining:
            for session in self._cluster.sessions(envoy, node):
                target = self._least_added(envoy, self._update.weights)
                return None if target is None else (session, target)
        return None

    def _next_for_rebalance(self, envoy: int) -> tuple[SimulatedSession, int] | None:
        outgoing, incoming = self._outgoing_left[envoy], self._incoming_left[envoy]
        latest = self._event_queue.now - MIN_STAY_SECONDS
        for node in [node for node, count in outgoing.items() if count > 0]:
            movable = (s for s in self._cluster.sessions(envoy, node) if s.moved_at <= latest)
            weights = [
                weight if position != node and incoming.get(position, 0) > 0 else 0
                for position, weight in enumerate(self._update.weights)
            ]
            session, target = next(movable, None), self._least_added(envoy, weights)
            if session is None or target is None:
                del outgoing[node]
                continue
            outgoing[node] -= 1
            incoming[target] -= 1
            return session, target
        return None

    def _least_added(self, envoy: int, weights: tuple[int, ...] | list[int]) -> int | None:
        """Return the node that gained the fewest sessions per weight, if possible not one in `outgoing`."""
        moves, added = self._update.outgoing, self._added_sessions[envoy]
        phases = self._move_phases[envoy]
        if phases is None:
            phases = self._move_phases[envoy] = [1.0 - self._random.random() for _ in self._update.weights]
        usable = [
            (node in moves, (max(added[node], 0) + phases[node]) / weight, node)
            for node, weight in enumerate(weights)
            if weight
        ]
        return min(usable)[-1] if usable else None

    def _finish_move(self, session: SimulatedSession, target: int) -> None:
        # The session stays if its target has weight 0 by now.
        if not session.is_over and self._update.weights[target]:
            moved, node = self.moved[session.envoy], session.node
            moved[node] = moved.get(node, 0) + 1
            self._cluster.move(session, target, self._event_queue.now)
        self._begin_next_move(session.envoy)


def _same_weights(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Return whether all nodes that had and still have a non-zero weight have kept that weight."""
    return bool(before) and all(
        new == old or not new or not old for old, new in zip(before, now, strict=False)
    )


def choose_node(
    added_sessions: Sequence[int], weights: Sequence[int], next_turns: Sequence[float]
) -> int | None:
    """Return the position of the node with the earliest turn among those that are not ahead.

    A node is ahead if it has gained at least as many sessions per weight as another node would have gained
    with one more session.
    `added_sessions`: sessions that each node gained since its weight arrived (negative values count as 0);
    `weights`: nodes of weight 0 are excluded; `next_turns`: the time of each node's next turn.
    """
    best, best_sessions, best_weight = inf, 0, 0
    for gained, weight in zip(added_sessions, weights, strict=True):
        if weight:
            following = gained + 1 if gained > 0 else 1
            if following / weight < best:
                best, best_sessions, best_weight = following / weight, following, weight
    first, chosen = inf, None
    for position, turn in enumerate(next_turns):
        if turn < first and (weight := weights[position]):
            gained = added_sessions[position]
            if (gained if gained > 0 else 0) * best_weight < best_sessions * weight:
                first, chosen = turn, position
    return chosen
