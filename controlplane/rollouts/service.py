"""Rollout operations for operators and the engine."""

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
from controlplane.model.rollout import MANUAL, Rollout, RolloutSpec, Stage
from controlplane.rollouts import node_selector, rollout_events, state_machine
from controlplane.rollouts.actions import actions
from controlplane.rollouts.actions.action_runner import ActionRunner
from controlplane.rollouts.controller import ChangeIntents, RolloutController
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import ClusterState
from controlplane.rollouts.preflight import PreflightResult, run_preflight
from controlplane.rollouts.repository import RolloutRepository
from controlplane.storage.store import Store, Versioned


class EmitEvent(Protocol):
    """Records an event, with its metric and log line."""

    def __call__(self, kind: str, subject: str, message: str, data: Mapping[str, object] = ...) -> None: ...


class RolloutService:
    """All rollouts: the operations of operators, and the loop that advances them."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        term: Callable[[], int | None],
        cluster_state: Callable[[], ClusterState],
        change_intents: ChangeIntents,
        settings: Callable[[], Settings],
        emit: EmitEvent,
        registry: CollectorRegistry,
    ) -> None:
        """`term` returns the term in which we lead, or None; `change_intents` applies and stores a change."""
        self._clock = clock
        self._cluster_state = cluster_state
        self._settings = settings
        self._emit = emit
        self._wake = asyncio.Event()
        self._repository = RolloutRepository(store, clock, self._on_change)
        self._metrics = RolloutMetrics(registry, self._repository.all)
        self._controller = RolloutController(
            self._repository,
            ActionRunner(clock, term, self._metrics, self._wake.set),
            clock=clock,
            term=term,
            cluster_state=cluster_state,
            change_intents=change_intents,
            settings=settings,
            emit=emit,
            wake=self._wake,
        )

    # --- for the engine ---

    def restore(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Load the stored rollouts at the start, without events."""
        self._repository.restore(stored)

    def accept(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Apply the stored rollouts of any writer."""
        self._repository.accept(stored)

    def wake(self) -> None:
        """Run the next pass soon: the plan or the facts have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Advance rollouts until cancelled; then stop the running actions."""
        await self._controller.run()

    # --- for operators ---

    def all(self) -> list[Rollout]:
        """Return all stored rollouts, latest first."""
        return [self._with_drain_progress(rollout) for rollout in self._repository.all()]

    def get(self, rollout_id: str) -> Rollout:
        """Return one rollout. Raises UnknownRollout."""
        return self._with_drain_progress(self._repository.get(rollout_id))

    def action_names(self) -> list[str]:
        """Return the names of the available actions."""
        return [*self._settings().rollouts.actions, MANUAL]

    def select_nodes(self, selector: str) -> tuple[str, ...]:
        """Resolve `all`, labels or addresses to nodes. Raises RolloutRefused."""
        return node_selector.select_nodes(selector, self._cluster_state().plan.nodes.values())

    async def check(self, spec: RolloutSpec) -> PreflightResult:
        """Check whether a rollout may start now."""
        settings = self._settings().rollouts
        placeholders_by_action = {
            name: actions.command_placeholders(action) for name, action in settings.actions.items()
        }
        probes_login = settings.probe.user is not None
        return run_preflight(
            spec,
            self._cluster_state(),
            self._repository.active(),
            placeholders_by_action,
            probes_login=probes_login,
        )

    async def start(self, spec: RolloutSpec, by: str, force: bool = False) -> Rollout:
        """Start a rollout. Raises RolloutRefused or StateUnavailable."""
        preflight = await self.check(spec)
        if problems := preflight.unforceable_problems if force else preflight.problems:
            raise RolloutRefused("the rollout was not started", problems)
        now, nodes = self._clock(), self._cluster_state().plan.nodes
        rollout_id = f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        start_times = {a: nodes[a].node.started_at for a in preflight.spec.nodes if a in nodes}
        rollout = state_machine.create(
            rollout_id, preflight.spec, by, now, start_times=start_times, forced=force
        )
        await self._repository.create(rollout)
        return self.get(rollout_id)

    async def pause(self, rollout_id: str, by: str) -> Rollout:
        """Start no more steps; running actions continue. Raises UnknownRollout or RolloutRefused."""
        return await self._change(rollout_id, lambda rollout: state_machine.pause(rollout, by, self._clock()))

    async def resume(self, rollout_id: str, by: str) -> Rollout:
        """Continue and retry failed nodes. Raises UnknownRollout or RolloutRefused."""
        return await self._change(
            rollout_id, lambda rollout: state_machine.resume(rollout, by, self._clock())
        )

    async def abort(self, rollout_id: str, by: str) -> Rollout:
        """Release its drains and end after running actions. Raises UnknownRollout or RolloutRefused."""
        return await self._change(rollout_id, lambda rollout: state_machine.abort(rollout, by, self._clock()))

    async def _change(self, rollout_id: str, transition: Callable[[Rollout], Rollout]) -> Rollout:
        return self._with_drain_progress(await self._repository.change(rollout_id, transition))

    def _with_drain_progress(self, rollout: Rollout) -> Rollout:
        """Add the current session counts of its draining nodes."""
        draining = [a for a, s in rollout.steps.items() if s.stage is Stage.DRAINING]
        if not draining:
            return rollout
        drain_progress = self._cluster_state().drain_progress
        progress_by_node = {a: progress for a in draining if (progress := drain_progress(a)) is not None}
        return state_machine.with_drain_progress(
            rollout, {a: (p.moved, sum(p.failed.values())) for a, p in progress_by_node.items()}
        )

    def _on_change(self, before: Rollout | None, after: Rollout) -> None:
        self._metrics.count_steps(before, after)
        for event in rollout_events.rollout_events(before, after):
            self._emit(*event)
        self._wake.set()
