"""Handles the rollout requests of operators, and advances rollouts: observe, decide, record, act."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

from prometheus_client import CollectorRegistry

from controlplane.aio import wait_at_most
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import (
    NotLeader,
    RolloutRejected,
    TidevoyError,
    UnknownRollout,
    UnknownVerification,
)
from controlplane.intents import changes as intent_changes
from controlplane.model.comparison import VerificationReport
from controlplane.model.intents import Intents
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, RolloutSpec, Stage, Step
from controlplane.rollouts import node_step, rollout_events, state_machine
from controlplane.rollouts.actions.action_runner import ActionRunner
from controlplane.rollouts.actions.actions import ActionContext
from controlplane.rollouts.actions.verification import (
    VerificationRequest,
    find_verification_problem,
    remove_results,
)
from controlplane.rollouts.actions.verification_runner import VerificationKey, VerificationRunner
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import ClusterState, RolloutView, observe
from controlplane.rollouts.preflight import PreflightResult, run_preflight, select_nodes
from controlplane.rollouts.repository import RolloutRepository
from controlplane.rollouts.state_machine import Effects
from controlplane.rollouts.verification_baseline import (
    choose_baseline,
    find_changed_process,
    identify_processes,
)
from controlplane.storage.store import Store, Versioned

# The pause after a pass is this multiple of the pass's duration, because a pass over thousands of nodes takes
# long, but it is within this minimum and maximum. The loop then waits for a change, at most for the maximum,
# because deadlines pass without changes.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS, _PAUSE_PER_RUN_FACTOR = 0.1, 1.0, 5.0
# How long a drain of an ended or unknown rollout is tolerated before it is released.
_ORPHANED_DRAIN_SECONDS = 10.0

IntentChange = Callable[[Intents], Intents]


class RolloutService:
    """All rollouts. Call every method from the event loop that runs `run`."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        term: Callable[[], int | None],
        cluster_state: Callable[[], ClusterState],
        change_intents: Callable[[IntentChange], Awaitable[int]],
        settings: Callable[[], Settings],
        emit: Callable[..., None],
        registry: CollectorRegistry,
    ) -> None:
        """`term` returns our term as leader, or None; `emit` takes the fields of an `EventDraft`."""
        self._clock = clock
        self._term = term
        self._cluster_state = cluster_state
        self._change_intents = change_intents
        self._settings = settings
        self._emit = emit
        self._wake = asyncio.Event()
        self._repository = RolloutRepository(store, clock, self._on_change)
        self._metrics = RolloutMetrics(registry, self._repository.all)
        self._action_runner = ActionRunner(clock, term, self._metrics, self._wake)
        self._verification_runner = VerificationRunner(clock, term, self._wake)
        self._with_results: frozenset[str] | None = None  # rollouts that may have results of replays
        self._observing_since = 0.0  # when observation began in this term
        self._last_term: int | None = None  # the term of the last pass
        self._views: dict[str, RolloutView] = {}  # latest view by rollout
        self._stuck: set[str] = set()  # rollouts reported as stuck
        self._orphaned_since: dict[str, float] = {}  # by address, of drains without an active rollout

    # --- for the engine ---

    def restore(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Load the stored rollouts at the start, without events."""
        self._repository.restore(stored)

    def apply_stored(self, stored: Mapping[str, Versioned[Rollout]]) -> None:
        """Apply rollouts that any control plane has stored."""
        self._repository.apply_stored(stored)

    def wake(self) -> None:
        """Run the next pass soon, because the plan or the facts have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Advance rollouts until cancelled; the actions and probes are tasks of this call and end with it."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                start = loop.time()
                await self._run_once(tasks)
                pause = _PAUSE_PER_RUN_FACTOR * (loop.time() - start)
                await asyncio.sleep(min(_MAX_INTERVAL_SECONDS, max(_MIN_INTERVAL_SECONDS, pause)))
                await wait_at_most(self._wake, _MAX_INTERVAL_SECONDS)
                self._wake.clear()

    # --- for operators ---

    def all(self) -> list[Rollout]:
        """Return all stored rollouts, latest first."""
        return [self._with_drain_progress(rollout) for rollout in self._repository.all()]

    def get(self, rollout_id: str) -> Rollout:
        """Return one rollout. Raises UnknownRollout."""
        return self._with_drain_progress(self._repository.get(rollout_id))

    def verification(self, rollout_id: str, address: str) -> VerificationReport:
        """Return the latest report on a node. Raises UnknownRollout or UnknownVerification."""
        report = self._repository.get(rollout_id).reports.get(address)
        if report is None:
            raise UnknownVerification(rollout_id, address)
        return report

    def action_names(self) -> list[str]:
        return [*self._settings().rollouts.actions, MANUAL]

    def select_nodes(self, selector: str) -> tuple[str, ...]:
        """Resolve `all`, labels or addresses to nodes. Raises RolloutRejected."""
        return select_nodes(selector, self._cluster_state().plan.nodes.values())

    def check(self, spec: RolloutSpec) -> PreflightResult:
        """Check whether a rollout may start now."""
        settings = self._settings().rollouts
        problem = find_verification_problem(spec.capture, settings.verification) if spec.verify else ""
        return run_preflight(spec, self._cluster_state(), self._repository.active(), settings, problem)

    async def start(self, spec: RolloutSpec, by: str, force: bool = False) -> Rollout:
        """Start a rollout. Raises RolloutRejected or StateUnavailable."""
        preflight = self.check(spec)
        if problems := preflight.problems_despite_force if force else preflight.problems:
            raise RolloutRejected("the rollout was not started", problems)
        now, nodes = self._clock(), self._cluster_state().plan.nodes
        rollout_id = f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        start_times = {a: nodes[a].node.started_at for a in preflight.spec.nodes if a in nodes}
        rollout = state_machine.create(
            rollout_id, preflight.spec, by, now, start_times=start_times, forced=force
        )
        await self._repository.create(rollout)
        return self.get(rollout_id)

    async def pause(self, rollout_id: str, by: str) -> Rollout:
        """Start no more steps; running actions continue. Raises UnknownRollout or RolloutRejected."""
        return await self._change(rollout_id, state_machine.pause, by)

    async def resume(self, rollout_id: str, by: str, *, skip_verification: bool = False) -> Rollout:
        """Continue and retry failed nodes. Raises UnknownRollout or RolloutRejected.

        With `skip_verification`, nodes whose verification failed are not verified again.
        """
        operation = partial(state_machine.resume, skip_verification=skip_verification)
        return await self._change(rollout_id, operation, by)

    async def abort(self, rollout_id: str, by: str) -> Rollout:
        """Release the drains, and end once no action runs. Raises UnknownRollout or RolloutRejected."""
        return await self._change(rollout_id, state_machine.abort, by)

    async def _change(
        self, rollout_id: str, operation: Callable[[Rollout, str, float], Rollout], by: str
    ) -> Rollout:
        await self._repository.change(rollout_id, lambda rollout: operation(rollout, by, self._clock()))
        return self.get(rollout_id)

    def _with_drain_progress(self, rollout: Rollout) -> Rollout:
        draining = [step for step in rollout.steps.values() if step.stage is Stage.DRAINING]
        if not draining:
            return rollout
        drain_progress_of = self._cluster_state().drain_progress_of
        steps = [node_step.with_drain_progress(step, drain_progress_of(step.address)) for step in draining]
        return rollout.with_steps(*steps)

    def _on_change(self, before: Rollout | None, after: Rollout) -> None:
        self._metrics.count_steps(before, after)
        for event in rollout_events.rollout_events(before, after):
            self._emit(*event)
        self._wake.set()

    # --- the loop ---

    async def _run_once(self, tasks: asyncio.TaskGroup) -> None:
        term = self._term()
        if term != self._last_term:
            self._last_term, self._observing_since = term, self._clock()
            self._views.clear()
            self._orphaned_since.clear()
            self._action_runner.logins.clear()
        if term is None:
            self._verification_runner.retain(())
            return
        active = self._repository.active()
        for rollout in active:
            try:
                await self._advance(rollout.id, term, tasks)
            except (NotLeader, UnknownRollout):
                continue
            except TidevoyError as error:
                if rollout.id not in self._stuck:  # emitted once
                    problem = f"is stuck, because its next step cannot be recorded: {error}"
                    self._emit("rollout.not_recorded", rollout.id, f"the rollout {rollout.id} {problem}")
                self._stuck.add(rollout.id)
            else:
                self._stuck.discard(rollout.id)
        self._views = {rollout.id: self._views[rollout.id] for rollout in active if rollout.id in self._views}
        self._verification_runner.retain(self._verifying())
        await self._remove_results(frozenset(rollout.id for rollout in active if rollout.spec.verify))
        await self._release_orphaned_drains(term)
        await self._repository.delete_old()

    async def _advance(self, rollout_id: str, term: int, tasks: asyncio.TaskGroup) -> None:
        runner, effects = self._action_runner, Effects()
        finished_actions: list[ActionContext] = []  # actions whose outcome the decision used

        def decide(rollout: Rollout) -> Rollout:
            nonlocal effects, finished_actions
            now = self._clock()
            finished_actions = [context for context in runner.outcomes if context.rollout == rollout_id]
            rollout = self._with_action_results(rollout, now)
            rollout = self._with_verification_results(rollout, now)
            logins = runner.logins if self._settings().rollouts.probe.user is not None else None
            previous = self._views.get(rollout_id) or RolloutView(observing_since=self._observing_since)
            view = observe(self._cluster_state(), rollout, self._repository.active(), logins, previous, now)
            self._views[rollout_id] = view
            rollout, effects = state_machine.advance(rollout, view, now)
            return rollout

        rollout = await self._repository.change(rollout_id, decide, term)
        for context in finished_actions:
            del runner.outcomes[context]
        # Do not await between storing the stage `started` and starting the action.
        settings, nodes = self._settings(), self._cluster_state().plan.nodes
        if self._term() == term:
            action = settings.rollouts.actions.get(rollout.spec.action)
            for address in effects.run_action:
                runner.start(tasks, _action_context(rollout, rollout.steps[address]), action, term)
            for address in effects.verify:
                self._start_verification(tasks, rollout, address, term)
        for address in effects.probe_login:
            endpoint = nodes[address].endpoint if address in nodes else None
            if endpoint is not None:
                runner.probe_login(tasks, address, endpoint, settings)
        await self._apply_drains(rollout, effects, term)

    def _with_action_results(self, rollout: Rollout, now: float) -> Rollout:
        """Record the results of actions that have ended. An action without a result was interrupted."""
        for address, step in rollout.steps.items():
            context = _action_context(rollout, step)
            if step.stage is Stage.STARTED and context not in self._action_runner.running:
                problem = self._action_runner.outcomes.get(context)
                rollout = state_machine.action_ended(rollout, address, step.attempts, problem, now)
        return rollout

    def _with_verification_results(self, rollout: Rollout, now: float) -> Rollout:
        """Record the results of verifications that have ended. They are kept until they are stored."""
        for key, result in self._verification_runner.results.items():
            if key.rollout == rollout.id:
                rollout = state_machine.verification_ended(rollout, key.address, key.since, result, now)
        return rollout

    def _start_verification(
        self, tasks: asyncio.TaskGroup, rollout: Rollout, address: str, term: int
    ) -> None:
        key = VerificationKey(rollout.id, address, rollout.steps[address].since)

        def build_request() -> VerificationRequest:
            plan, current = self._cluster_state().plan, self._repository.get(rollout.id)
            baseline = choose_baseline(current, address, plan)
            processes = identify_processes(plan, [address, *([baseline] if baseline else [])])
            return VerificationRequest(
                node=address,
                baseline=baseline,
                group=plan.nodes[address].group if address in plan.nodes else "",
                capture=rollout.spec.capture,
                max_ratio=rollout.spec.verify_ratio,
                directory=self._results_directory / quote(rollout.id, safe=""),
                find_change=lambda: find_changed_process(processes, self._cluster_state().plan),
            )

        if not self._verification_runner.is_known(key):
            settings = self._settings
            self._verification_runner.start(
                tasks, key, build_request, lambda: settings().rollouts.verification, term
            )

    def _verifying(self) -> set[VerificationKey]:
        """Return the verifications that should run, or whose results are not stored yet."""
        return {
            VerificationKey(rollout.id, step.address, step.since)
            for rollout in self._repository.active()
            if rollout.phase is not RolloutPhase.ABORTING
            for step in rollout.steps.values()
            if step.stage is Stage.VERIFYING
        }

    @property
    def _results_directory(self) -> Path:
        return self._settings().state_dir / "verifications"

    async def _remove_results(self, active: frozenset[str]) -> None:
        """Delete the results of replays of rollouts that are over."""
        if active != self._with_results:
            self._with_results = active
            await asyncio.to_thread(remove_results, self._results_directory, sorted(active))

    async def _apply_drains(self, rollout: Rollout, effects: Effects, term: int) -> None:
        """Drain and undrain nodes; a failure is retried in the next pass."""
        spec, now = rollout.spec, self._clock()
        changes: list[IntentChange] = [
            partial(
                intent_changes.drain,
                address=address,
                at=now,
                deadline_seconds=spec.drain_deadline,
                on_deadline=spec.on_deadline,
                owner=rollout.id,
            )
            for address in effects.drain
        ]
        changes += [partial(intent_changes.undrain, address=a, owner=rollout.id) for a in effects.undrain]
        await self._change_drains(changes, term)

    async def _release_orphaned_drains(self, term: int) -> None:
        """Release drains of ended or unknown rollouts, which a stalled leader may have left behind."""
        active, now = {rollout.id for rollout in self._repository.active()}, self._clock()
        drains = self._cluster_state().intents.drains
        orphans = {a: drain.owner for a, drain in drains.items() if drain.owner and drain.owner not in active}
        self._orphaned_since = {address: self._orphaned_since.get(address, now) for address in orphans}
        changes: list[IntentChange] = [
            partial(intent_changes.undrain, address=address, owner=orphans[address])
            for address, since in self._orphaned_since.items()
            if now - since >= _ORPHANED_DRAIN_SECONDS
        ]
        with suppress(TidevoyError):  # retried in the next pass
            await self._change_drains(changes, term)

    async def _change_drains(self, changes: Sequence[IntentChange], term: int) -> None:
        """Apply the changes, or raise NotLeader if our term has ended, since then the new leader decides."""

        def change(intents: Intents) -> Intents:
            if self._term() != term:
                raise NotLeader("running a rollout")
            for apply in changes:
                intents = apply(intents)
            return intents

        if changes:
            await self._change_intents(change)
            self._wake.set()  # the next pass observes the new intents


def _action_context(rollout: Rollout, step: Step) -> ActionContext:
    spec = rollout.spec
    return ActionContext(rollout.id, spec.action, step.address, step.attempts, spec.version)
