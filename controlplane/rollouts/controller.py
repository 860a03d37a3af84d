"""The loop that advances rollouts while this control plane leads: observe, decide, record, act."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.errors import NotLeader, TidevoyError, UnknownRollout
from controlplane.intents import changes as intent_changes
from controlplane.model.intents import Intents
from controlplane.model.rollout import Rollout, Stage
from controlplane.rollouts import state_machine
from controlplane.rollouts.actions import login_probe
from controlplane.rollouts.actions.action_runner import ActionKey, ActionRunner
from controlplane.rollouts.actions.actions import ActionContext
from controlplane.rollouts.observation import (
    ClusterState,
    HealthStreak,
    RolloutView,
    observe,
    with_other_rollouts,
)
from controlplane.rollouts.repository import RolloutRepository
from controlplane.rollouts.state_machine import DrainNode, Effect, ProbeLogin, RunAction, UndrainNode

log = structlog.get_logger("tidevoy.rollouts")

# Minimum and maximum time between two passes: time alone advances rollouts. With thousands of nodes a pass
# takes long, and is followed by a pause of this multiple of its duration.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS, _PAUSE_PER_RUN_FACTOR = 0.1, 1.0, 5.0
# How long a drain of an ended or unknown rollout is tolerated before it is released.
_ORPHANED_DRAIN_SECONDS = 10.0

ChangeIntents = Callable[[Callable[[Intents], Intents]], Awaitable[int]]
EmitMessage = Callable[[str, str, str], None]


class RolloutController:
    """Advances the rollouts. Call every method from the event loop that runs `run`."""

    def __init__(
        self,
        repository: RolloutRepository,
        action_runner: ActionRunner,
        *,
        clock: Clock,
        term: Callable[[], int | None],
        cluster_state: Callable[[], ClusterState],
        change_intents: ChangeIntents,
        settings: Callable[[], Settings],
        emit: EmitMessage,
        wake: asyncio.Event,
    ) -> None:
        self._repository = repository
        self._action_runner = action_runner
        self._clock = clock
        self._term = term
        self._cluster_state = cluster_state
        self._change_intents = change_intents
        self._settings = settings
        self._emit = emit
        self._wake = wake
        self._observing_since = 0.0  # when observation began in this term
        self._last_term: int | None = None  # the term of the last pass
        self._health_streaks: dict[str, Mapping[str, HealthStreak]] = {}  # by rollout
        self._stuck: set[str] = set()  # rollouts reported as stuck
        self._orphaned_since: dict[str, float] = {}  # drains without an active rollout -> since when

    async def run(self) -> None:
        """Advance rollouts until cancelled; then stop the running actions."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                start = loop.time()
                await self._run_once()
                await asyncio.sleep(
                    min(
                        _MAX_INTERVAL_SECONDS,
                        max(_MIN_INTERVAL_SECONDS, _PAUSE_PER_RUN_FACTOR * (loop.time() - start)),
                    )
                )
                with suppress(TimeoutError):
                    async with asyncio.timeout(_MAX_INTERVAL_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._action_runner.stop()

    async def _run_once(self) -> None:
        term = self._term()
        if term is None:
            self._last_term = None
            return
        if term != self._last_term:
            self._last_term, self._observing_since = term, self._clock()
            self._health_streaks.clear()
            self._orphaned_since.clear()
            self._action_runner.logins.clear()
        active = self._repository.active()
        for rollout in active:
            try:
                await self._advance(rollout.id, term)
            except (NotLeader, UnknownRollout):
                continue
            except TidevoyError as error:
                self._report_stuck(rollout.id, str(error))
            else:
                self._stuck.discard(rollout.id)
        self._health_streaks = {
            r.id: self._health_streaks[r.id] for r in active if r.id in self._health_streaks
        }
        await self._release_orphaned_drains(term)
        await self._repository.forget_old()

    async def _advance(self, rollout_id: str, term: int) -> None:
        cluster = self._cluster_state()
        effects: tuple[Effect, ...] = ()
        finished_actions: list[ActionKey] = []  # actions whose outcome the decision used

        def decide(rollout: Rollout) -> Rollout:
            nonlocal cluster, effects, finished_actions
            # Read the state again: waiting for the repository's lock may have taken long.
            now, cluster = self._clock(), self._cluster_state()
            finished_actions = [key for key in self._action_runner.outcomes if key[0] == rollout_id]
            rollout = self._with_action_results(rollout, now)
            following_rollout, effects = state_machine.advance(
                rollout, self._observe(rollout, cluster, now), now
            )
            return following_rollout

        rollout = await self._repository.change(rollout_id, decide, term)
        for key in finished_actions:
            del self._action_runner.outcomes[key]
        # Await nothing between the record of `started` and the start of the action.
        for effect in effects:
            if isinstance(effect, RunAction) and self._term() == term:
                self._start_action(rollout, effect, term)
            elif isinstance(effect, ProbeLogin):
                self._start_login_probe(effect.address, cluster)
        await self._apply_drains(rollout, effects, term)

    def _with_action_results(self, rollout: Rollout, now: float) -> Rollout:
        """Record the results of finished actions, and interruptions of actions that nothing runs."""
        for address, step in rollout.steps.items():
            key = (rollout.id, address, step.attempts)
            if step.stage is not Stage.STARTED:
                continue
            if key in self._action_runner.outcomes:
                rollout = state_machine.action_finished(
                    rollout, address, step.attempts, self._action_runner.outcomes[key], now
                )
            elif not self._action_runner.is_running(key):
                rollout = state_machine.action_interrupted(rollout, address, now)
        return rollout

    def _observe(self, rollout: Rollout, cluster: ClusterState, now: float) -> RolloutView:
        view, health_streaks = observe(cluster, rollout, self._health_streaks.get(rollout.id, {}), now)
        self._health_streaks[rollout.id] = health_streaks
        logins = self._action_runner.logins
        nodes = {a: replace(n, login_result=logins[a]) if a in logins else n for a, n in view.nodes.items()}
        probes_login = self._settings().rollouts.probe.user is not None
        view = replace(view, nodes=nodes, observing_since=self._observing_since, probes_login=probes_login)
        return with_other_rollouts(view, rollout, self._repository.active())

    def _start_action(self, rollout: Rollout, effect: RunAction, term: int) -> None:
        spec = rollout.spec
        context = ActionContext(rollout.id, spec.action, effect.address, effect.attempt, spec.version)
        self._action_runner.start(context, self._settings().rollouts.actions.get(spec.action), term)

    def _start_login_probe(self, address: str, cluster: ClusterState) -> None:
        endpoint, settings = cluster.plan.nodes[address].endpoint, self._settings()
        if endpoint is not None:
            host, _ = addresses.split(address)
            open_session = partial(
                login_probe.probe_login,
                endpoint,
                host,
                settings.rollouts.probe,
                proxy_protocol=settings.backend.proxy_protocol != "off",
            )
            self._action_runner.probe_login(address, open_session)

    async def _apply_drains(self, rollout: Rollout, effects: Iterable[Effect], term: int) -> None:
        """Drain and undrain nodes; a failure is retried in the next pass."""
        drained = [effect.address for effect in effects if isinstance(effect, DrainNode)]
        undrained = [effect.address for effect in effects if isinstance(effect, UndrainNode)]
        if not drained and not undrained:
            return

        def with_drains(intents: Intents) -> Intents:
            self._require_term(term)
            spec, now = rollout.spec, self._clock()
            for address in drained:
                intents = intent_changes.drain(
                    intents, address, now, spec.drain_deadline, spec.on_deadline, owner=rollout.id
                )
            for address in undrained:
                intents = intent_changes.undrain(intents, address, owner=rollout.id)
            return intents

        await self._change_intents(with_drains)
        self._wake.set()  # the next pass observes the new intents

    async def _release_orphaned_drains(self, term: int) -> None:
        """Release drains of ended or forgotten rollouts, which a stalled leader may have left."""
        active = {rollout.id for rollout in self._repository.active()}
        drains = self._cluster_state().intents.drains
        orphans = {
            address: drain.owner
            for address, drain in drains.items()
            if drain.owner and drain.owner not in active
        }
        now = self._clock()
        self._orphaned_since = {address: self._orphaned_since.get(address, now) for address in orphans}
        due = [
            address
            for address, since in self._orphaned_since.items()
            if now - since >= _ORPHANED_DRAIN_SECONDS
        ]
        if not due:
            return

        def without_orphans(intents: Intents) -> Intents:
            self._require_term(term)
            for address in due:
                intents = intent_changes.undrain(intents, address, owner=orphans[address])
            return intents

        with suppress(TidevoyError):  # retried in the next pass
            await self._change_intents(without_orphans)

    def _require_term(self, term: int) -> None:
        """Raise NotLeader if our term has ended: then the new leader decides."""
        if self._term() != term:
            raise NotLeader("running a rollout")

    def _report_stuck(self, rollout_id: str, problem: str) -> None:
        """Emit once that a rollout is stuck because its next step cannot be recorded."""
        if rollout_id not in self._stuck:
            self._stuck.add(rollout_id)
            message = (
                f"the rollout {rollout_id} is stuck, because its next step cannot be recorded: {problem}"
            )
            self._emit("rollout.not_recorded", rollout_id, message)
