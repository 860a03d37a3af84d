"""The module in each Envoy of a simulated fleet: picks by the weights that it was told, moves sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from bench.balance.cluster_state import HASTE, Session, World
from bench.balance.event_queue import Agenda
from bench.balance.node_pick import least

MOVE = 0.05
"""Seconds that a move takes; an Envoy makes one after the other."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What Envoys are told of all nodes, which are called by their positions.

    `moves` and `wants`: by node, then by Envoy, how many sessions are to leave it or to come to it.
    """

    weights: tuple[int, ...] = ()  # 0: no new sessions
    left: frozenset[int] = frozenset()  # whose sessions are to go elsewhere
    round: int = 0
    moves: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    wants: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


class Envoys:
    """All Envoys of the fleet, each with what it knows itself."""

    def __init__(self, world: World, agenda: Agenda, random: Random) -> None:
        self._world = world
        self._agenda = agenda
        self._random = random
        self._advice = Advice()
        self._added: list[list[int]] = [[] for _ in range(world.envoys)]
        self._due: list[list[float] | None] = [None] * world.envoys  # None: turns begin anew
        self._phases: list[list[float] | None] = [None] * world.envoys  # of moves, in the same way
        # By Envoy, then by node: sessions that may still leave, and that may still come.
        self._spared: list[dict[int, int]] = [{} for _ in range(world.envoys)]
        self._wanted: list[dict[int, int]] = [{} for _ in range(world.envoys)]
        self._is_moving = [False] * world.envoys
        self.moved: list[dict[int, int]] = [{} for _ in range(world.envoys)]  # sessions by the node they left

    def hear(self, advice: Advice) -> None:
        """What was published arrives."""
        before, self._advice = self._advice, advice
        if _same_weights(before.weights, advice.weights):
            self._take_over(before)
        else:
            for envoy, added in enumerate(self._added):
                added[:] = [0] * len(advice.weights)
                self._due[envoy] = self._phases[envoy] = None
        if advice.round != before.round:
            self._ask(advice)
        elif advice.moves != before.moves or advice.wants != before.wants:
            self._withdraw(advice)
        if advice.left:
            for envoy in range(self._world.envoys):
                self._start(envoy)

    def shifted(self, envoy: int, node: int, by: int) -> None:
        """An Envoy has one session more or less on a node."""
        added = self._added[envoy]
        if node < len(added):
            added[node] += by

    def pick(self, envoy: int) -> int:
        """The node of a new session."""
        weights = self._advice.weights
        due = self._due[envoy]
        if due is None:
            due = self._due[envoy] = [self._first_turn(weight) for weight in weights]
        chosen = least(self._added[envoy], weights, due)
        if chosen is None:
            raise AssertionError("the control plane has told of no node to go to")
        due[chosen] += 1 / weights[chosen]
        return chosen

    def _first_turn(self, weight: int) -> float:
        return self._random.random() / (weight or 1)

    def _take_over(self, before: Advice) -> None:
        """The weights are as they were; there may be more nodes, or fewer."""
        weights = self._advice.weights
        if weights == before.weights:
            return
        old = len(before.weights)
        room = len(weights) - old
        new = [node for node, w in enumerate(weights) if w and (node >= old or not before.weights[node])]
        for envoy, added in enumerate(self._added):
            added += [0] * room
            due, phases = self._due[envoy], self._phases[envoy]
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

    def _ask(self, advice: Advice) -> None:
        self._spared = [{} for _ in self._spared]
        self._wanted = [{} for _ in self._wanted]
        for asked, there in ((self._spared, advice.moves), (self._wanted, advice.wants)):
            for node, counts in there.items():
                for envoy, count in counts.items():
                    asked[envoy][node] = count
        for envoy in sorted({envoy for counts in advice.moves.values() for envoy in counts}):
            self._start(envoy)

    def _withdraw(self, advice: Advice) -> None:
        """What is not asked for any more."""
        for asked, there in ((self._spared, advice.moves), (self._wanted, advice.wants)):
            for envoy, counts in enumerate(asked):
                for node in [node for node in counts if envoy not in there.get(node, {})]:
                    del counts[node]

    def _start(self, envoy: int) -> None:
        if not self._is_moving[envoy]:
            self._begin(envoy)

    def _begin(self, envoy: int) -> None:
        """The next session begins to move, if there is one."""
        found = self._leaver(envoy) or self._spare(envoy)
        self._is_moving[envoy] = found is not None
        if found is not None:
            self._agenda.after(MOVE, self._finish, *found)

    def _leaver(self, envoy: int) -> tuple[Session, int] | None:
        for node in self._advice.left:
            for session in self._world.sessions(envoy, node):
                target = self._lightest(envoy, self._advice.weights)
                return None if target is None else (session, target)
        return None

    def _spare(self, envoy: int) -> tuple[Session, int] | None:
        spared, wanted = self._spared[envoy], self._wanted[envoy]
        latest = self._agenda.now - HASTE
        for node in [node for node, count in spared.items() if count > 0]:
            able = (s for s in self._world.sessions(envoy, node) if s.moved_at <= latest)
            weights = [
                weight if position != node and wanted.get(position, 0) > 0 else 0
                for position, weight in enumerate(self._advice.weights)
            ]
            session, target = next(able, None), self._lightest(envoy, weights)
            if session is None or target is None:
                del spared[node]
                continue
            spared[node] -= 1
            wanted[target] -= 1
            return session, target
        return None

    def _lightest(self, envoy: int, weights: tuple[int, ...] | list[int]) -> int | None:
        """Who got least by weight; of those that give sessions away, only when there is no other."""
        moves, added = self._advice.moves, self._added[envoy]
        phases = self._phases[envoy]
        if phases is None:
            phases = self._phases[envoy] = [1.0 - self._random.random() for _ in self._advice.weights]
        usable = [
            (node in moves, (max(added[node], 0) + phases[node]) / weight, node)
            for node, weight in enumerate(weights)
            if weight
        ]
        return min(usable)[-1] if usable else None

    def _finish(self, session: Session, target: int) -> None:
        # Who is told meanwhile that its target is left has its sessions stay.
        if not session.is_over and self._advice.weights[target]:
            moved, node = self.moved[session.envoy], session.node
            moved[node] = moved.get(node, 0) + 1
            self._world.move(session, target, self._agenda.now)
        self._begin(session.envoy)


def _same_weights(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether no node that had a weight, and has one, has another."""
    return bool(before) and all(
        new == old or not new or not old for old, new in zip(before, now, strict=False)
    )
