"""The module in each Envoy of a simulated fleet: picks by the weights that it was told, moves sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from bench.balance.cluster_state import MIN_STAY_SECONDS, SimulatedCluster, SimulatedSession
from bench.balance.event_queue import EventQueue
from bench.balance.node_pick import choose_node

MOVE_SECONDS = 0.05
"""Seconds that a move takes; an Envoy makes one after the other."""


@dataclass(frozen=True, slots=True)
class EnvoyUpdate:
    """What Envoys are told of all nodes, which are called by their positions.

    `moves` and `wants`: by node, then by Envoy, how many sessions are to leave it or to come to it.
    """

    weights: tuple[int, ...] = ()  # 0: no new sessions
    draining: frozenset[int] = frozenset()  # whose sessions are to go elsewhere
    round: int = 0
    outgoing: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    incoming: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


class SimulatedModules:
    """All Envoys of the fleet, each with what it knows itself."""

    def __init__(self, world: SimulatedCluster, agenda: EventQueue, random: Random) -> None:
        self._world = world
        self._agenda = agenda
        self._random = random
        self._update = EnvoyUpdate()
        self._added_sessions: list[list[int]] = [[] for _ in range(world.envoys)]
        self._next_turns: list[list[float] | None] = [None] * world.envoys  # None: turns begin anew
        self._move_phases: list[list[float] | None] = [None] * world.envoys  # of moves, in the same way
        # By Envoy, then by node: sessions that may still leave, and that may still come.
        self._outgoing_left: list[dict[int, int]] = [{} for _ in range(world.envoys)]
        self._incoming_left: list[dict[int, int]] = [{} for _ in range(world.envoys)]
        self._is_moving = [False] * world.envoys
        self.moved: list[dict[int, int]] = [{} for _ in range(world.envoys)]  # sessions by the node they left

    def apply_update(self, update: EnvoyUpdate) -> None:
        """What was published arrives."""
        before, self._update = self._update, update
        if _same_weights(before.weights, update.weights):
            self._keep_turns(before)
        else:
            for envoy, added in enumerate(self._added_sessions):
                added[:] = [0] * len(update.weights)
                self._next_turns[envoy] = self._move_phases[envoy] = None
        if update.round != before.round:
            self._start_round(update)
        elif update.outgoing != before.outgoing or update.incoming != before.incoming:
            self._cancel_moves(update)
        if update.draining:
            for envoy in range(self._world.envoys):
                self._start_moving(envoy)

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """An Envoy has one session more or less on a node."""
        added = self._added_sessions[envoy]
        if node < len(added):
            added[node] += delta

    def pick_node(self, envoy: int) -> int:
        """The node of a new session."""
        weights = self._update.weights
        due = self._next_turns[envoy]
        if due is None:
            due = self._next_turns[envoy] = [self._first_turn(weight) for weight in weights]
        chosen = choose_node(self._added_sessions[envoy], weights, due)
        if chosen is None:
            raise AssertionError("the control plane has told of no node to go to")
        due[chosen] += 1 / weights[chosen]
        return chosen

    def _first_turn(self, weight: int) -> float:
        return self._random.random() / (weight or 1)

    def _keep_turns(self, before: EnvoyUpdate) -> None:
        """The weights are as they were; there may be more nodes, or fewer."""
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

    # --- moves ---

    def _start_round(self, update: EnvoyUpdate) -> None:
        self._outgoing_left = [{} for _ in self._outgoing_left]
        self._incoming_left = [{} for _ in self._incoming_left]
        for remaining, requested in (
            (self._outgoing_left, update.outgoing),
            (self._incoming_left, update.incoming),
        ):
            for node, counts in requested.items():
                for envoy, count in counts.items():
                    remaining[envoy][node] = count
        for envoy in sorted({envoy for counts in update.outgoing.values() for envoy in counts}):
            self._start_moving(envoy)

    def _cancel_moves(self, update: EnvoyUpdate) -> None:
        """What is not asked for any more."""
        for remaining, requested in (
            (self._outgoing_left, update.outgoing),
            (self._incoming_left, update.incoming),
        ):
            for envoy, counts in enumerate(remaining):
                for node in [node for node in counts if envoy not in requested.get(node, {})]:
                    del counts[node]

    def _start_moving(self, envoy: int) -> None:
        if not self._is_moving[envoy]:
            self._begin_next_move(envoy)

    def _begin_next_move(self, envoy: int) -> None:
        """The next session begins to move, if there is one."""
        found = self._next_from_draining(envoy) or self._next_for_rebalance(envoy)
        self._is_moving[envoy] = found is not None
        if found is not None:
            self._agenda.after(MOVE_SECONDS, self._finish_move, *found)

    def _next_from_draining(self, envoy: int) -> tuple[SimulatedSession, int] | None:
        for node in self._update.draining:
            for session in self._world.sessions(envoy, node):
                target = self._least_added(envoy, self._update.weights)
                return None if target is None else (session, target)
        return None

    def _next_for_rebalance(self, envoy: int) -> tuple[SimulatedSession, int] | None:
        spared, wanted = self._outgoing_left[envoy], self._incoming_left[envoy]
        latest = self._agenda.now - MIN_STAY_SECONDS
        for node in [node for node, count in spared.items() if count > 0]:
            movable = (s for s in self._world.sessions(envoy, node) if s.moved_at <= latest)
            weights = [
                weight if position != node and wanted.get(position, 0) > 0 else 0
                for position, weight in enumerate(self._update.weights)
            ]
            session, target = next(movable, None), self._least_added(envoy, weights)
            if session is None or target is None:
                del spared[node]
                continue
            spared[node] -= 1
            wanted[target] -= 1
            return session, target
        return None

    def _least_added(self, envoy: int, weights: tuple[int, ...] | list[int]) -> int | None:
        """Who got least by weight; of those that give sessions away, only when there is no other."""
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
        # Who is told meanwhile that its target is left has its sessions stay.
        if not session.is_over and self._update.weights[target]:
            moved, node = self.moved[session.envoy], session.node
            moved[node] = moved.get(node, 0) + 1
            self._world.move(session, target, self._agenda.now)
        self._begin_next_move(session.envoy)


def _same_weights(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether no node that had a weight, and has one, has another."""
    return bool(before) and all(
        new == old or not new or not old for old, new in zip(before, now, strict=False)
    )
