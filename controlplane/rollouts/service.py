"""Rollouts as operators and the engine know them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

from prometheus_client import CollectorRegistry

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import RolloutRefused
from controlplane.model.rollout import MANUAL, Order, Rollout, Stage
from controlplane.rollouts import node_selector, rollout_events, state_machine
from controlplane.rollouts.actions import actions
from controlplane.rollouts.actions.action_runner import Errands
from controlplane.rollouts.controller import Change, Runner
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import Outlook
from controlplane.rollouts.preflight import RolloutChecks, check
from controlplane.rollouts.repository import Records
from controlplane.storage.store import Store, Versioned


class Tell(Protocol):
    """Something has happened: an event, a metric and a line in the log."""

    def __call__(self, kind: str, subject: str, message: str, data: Mapping[str, object] = ...) -> None: ...


class Rollouts:
    """All rollouts: what operators ask of them, and the loop that moves them on."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        term: Callable[[], int | None],
        look: Callable[[], Outlook],
        change: Change,
        settings: Callable[[], Settings],
        tell: Tell,
        registry: CollectorRegistry,
    ) -> None:
        """`term`: that in which we lead, or None; `change`: takes a step of the intents, and keeps it."""
        self._clock = clock
        self._look = look
        self._settings = settings
        self._tell = tell
        self._wake = asyncio.Event()
        self._records = Records(store, clock, self._on_change)
        self._metrics = RolloutMetrics(registry, self._records.all)
        self._runner = Runner(
            self._records,
            Errands(clock, term, self._metrics, self._wake.set),
            clock=clock,
            term=term,
            look=look,
            change=change,
            settings=settings,
            tell=tell,
            wake=self._wake,
        )

    # --- for the engine ---

    def restore(self, kept: Mapping[str, Versioned[Rollout]]) -> None:
        """Begin with what was kept; nobody is told."""
        self._records.restore(kept)

    def put(self, kept: Mapping[str, Versioned[Rollout]]) -> None:
        """What is kept now, whoever wrote it."""
        self._records.take(kept)

    def wake(self) -> None:
        """There is another plan, or other facts."""
        self._wake.set()

    async def run(self) -> None:
        """Move rollouts on until cancelled; then actions that are under way are ended."""
        await self._runner.run()

    # --- for operators ---

    def all(self) -> list[Rollout]:
        """All that are not forgotten, latest first."""
        return [self._shown(rollout) for rollout in self._records.all()]

    def get(self, name: str) -> Rollout:
        """One of them. UnknownRollout."""
        return self._shown(self._records.get(name))

    def actions(self) -> list[str]:
        """The names of the actions that there are."""
        return [*self._settings().rollouts.actions, MANUAL]

    def select(self, text: str) -> tuple[str, ...]:
        """The nodes that `all`, labels or addresses mean. RolloutRefused."""
        return node_selector.select(text, self._look().plan.nodes.values())

    async def check(self, order: Order) -> RolloutChecks:
        """Whether a rollout may begin as things are."""
        chosen = self._settings().rollouts
        known = {name: actions.words(action) for name, action in chosen.actions.items()}
        asks = chosen.probe.user is not None
        return check(order, self._look(), self._records.live(), known, asks_login=asks)

    async def start(self, order: Order, by: str, force: bool = False) -> Rollout:
        """Begin a rollout. RolloutRefused, StateUnavailable."""
        checks = await self.check(order)
        if against := checks.refusals if force else checks.problems:
            raise RolloutRefused("the rollout was not started", against)
        now, nodes = self._clock(), self._look().plan.nodes
        name = f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        started = {a: nodes[a].node.started_at for a in checks.order.nodes if a in nodes}
        rollout = state_machine.create(name, checks.order, by, now, started=started, forced=force)
        await self._records.create(rollout)
        return self.get(name)

    async def pause(self, name: str, by: str) -> Rollout:
        """Begin nothing more; an action that runs goes on. UnknownRollout, RolloutRefused."""
        return await self._step(name, lambda rollout: state_machine.pause(rollout, by, self._clock()))

    async def resume(self, name: str, by: str) -> Rollout:
        """Go on; nodes that failed are tried again. UnknownRollout, RolloutRefused."""
        return await self._step(name, lambda rollout: state_machine.resume(rollout, by, self._clock()))

    async def abort(self, name: str, by: str) -> Rollout:
        """Take back its drains and end, after actions that run. UnknownRollout, RolloutRefused."""
        return await self._step(name, lambda rollout: state_machine.abort(rollout, by, self._clock()))

    async def _step(self, name: str, step: Callable[[Rollout], Rollout]) -> Rollout:
        return self._shown(await self._records.change(name, step))

    def _shown(self, rollout: Rollout) -> Rollout:
        """With what has come so far of the sessions of nodes that are being drained."""
        draining = [a for a, s in rollout.steps.items() if s.stage is Stage.DRAINING]
        if not draining:
            return rollout
        departure = self._look().departure
        told = {a: came for a in draining if (came := departure(a)) is not None}
        return state_machine.progress(
            rollout, {a: (c.moved, sum(c.failed.values())) for a, c in told.items()}
        )

    def _on_change(self, before: Rollout | None, after: Rollout) -> None:
        self._metrics.count_steps(before, after)
        for told in rollout_events.events(before, after):
            self._tell(*told)
        self._wake.set()
