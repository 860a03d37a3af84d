"""The loop that moves rollouts on while this control plane leads: look, decide, write down, do."""

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

# Seconds between two looks at least, and at most: time itself moves rollouts on. With thousands of nodes a
# look takes its time, and is followed by a rest that is so many times as long.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS, _PAUSE_PER_RUN_FACTOR = 0.1, 1.0, 5.0
# Seconds for which a drain of a rollout that is over, or not known, is borne before it is taken back.
_ORPHANED_DRAIN_SECONDS = 10.0

ChangeIntents = Callable[[Callable[[Intents], Intents]], Awaitable[int]]
EmitMessage = Callable[[str, str, str], None]


class RolloutController:
    """Moves the rollouts on. All methods belong to the event loop that `run` runs in."""

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
        self._observing_since = 0.0  # when we began to look in this term
        self._last_term: int | None = None  # the term of the last look
        self._health_streaks: dict[str, Mapping[str, HealthStreak]] = {}  # by rollout
        self._stuck: set[str] = set()  # rollouts of which it was told that they cannot be recorded
        self._orphaned_since: dict[str, float] = {}  # drains that nobody stands for -> since when

    async def run(self) -> None:
        """Move rollouts on until cancelled; then actions that are under way are ended."""
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
        finished_actions: list[ActionKey] = []  # actions whose outcome was considered

        def decide(rollout: Rollout) -> Rollout:
            nonlocal cluster, effects, finished_actions
            now, cluster = (
                self._clock(),
                self._cluster_state(),
            )  # of now: who was there before may have taken long
            finished_actions = [key for key in self._action_runner.outcomes if key[0] == rollout_id]
            rollout = self._with_action_results(rollout, now)
            following, effects = state_machine.advance(rollout, self._observe(rollout, cluster, now), now)
            return following

        rollout = await self._repository.change(rollout_id, decide, term)
        for key in finished_actions:
            del self._action_runner.outcomes[key]
        # Nothing is awaited between the record that says "started" and the start.
        for effect in effects:
            if isinstance(effect, RunAction) and self._term() == term:
                self._start_action(rollout, effect, term)
            elif isinstance(effect, ProbeLogin):
                self._start_login_probe(effect.address, cluster)
        await self._apply_drains(rollout, effects, term)

    def _with_action_results(self, rollout: Rollout, now: float) -> Rollout:
        """With what is known here of its actions: those that have ended, and those that nobody runs."""
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
        """Drain and undrain; done again with the next look if it fails."""
        drained = [effect.address for effect in effects if isinstance(effect, DrainNode)]
        undrained = [effect.address for effect in effects if isinstance(effect, UndrainNode)]
        if not drained and not undrained:
            return

        def with_drains(intents: Intents) -> Intents:
            self._require_term(term)
            order, now = rollout.spec, self._clock()
            for address in drained:
                intents = intent_changes.drain(
                    intents, address, now, order.drain_deadline, order.on_deadline, owner=rollout.id
                )
            for address in undrained:
                intents = intent_changes.undrain(intents, address, owner=rollout.id)
            return intents

        await self._change_intents(with_drains)
        self._wake.set()  # what was asked for is seen with the next look

    async def _release_orphaned_drains(self, term: int) -> None:
        """Drains of rollouts that are over or forgotten: a leader that stood still may have left them."""
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

        with suppress(TidevoyError):  # tried again with the next look
            await self._change_intents(without_orphans)

    def _require_term(self, term: int) -> None:
        """NotLeading, when our term is over: then a successor decides."""
        if self._term() != term:
            raise NotLeader("running a rollout")

    def _report_stuck(self, rollout_id: str, problem: str) -> None:
        """Tell once that a rollout stands still because it cannot be written down."""
        if rollout_id not in self._stuck:
            self._stuck.add(rollout_id)
            message = f"the rollout {rollout_id} waits, for its next step cannot be recorded: {problem}"
            self._emit("rollout.not_recorded", rollout_id, message)
