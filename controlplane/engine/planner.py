"""The planning loop: turns facts into a plan and publishes every change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from controlplane.clock import Clock
from controlplane.config.settings import Settings, build_policy
from controlplane.decide import plan as decide
from controlplane.decide.session_counts import nodes_awaiting_empty
from controlplane.engine.drain_progress import DrainProgressTracker
from controlplane.engine.plan_generation import PlanGeneration
from controlplane.engine.publish_gate import InitialPublishGate
from controlplane.events.event_messages import drain_finished, node_events, rebalance_events
from controlplane.intents.repository import IntentRepository
from controlplane.metrics.registry import Metrics
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.views import DrainProgress
from controlplane.observe.observers import Observers
from controlplane.replicas.merged_fleet import ReplicaEnvoy
from controlplane.storage.clamp_timestamps import clamp_plan_times
from controlplane.storage.store import SavedPlan
from controlplane.xds.server import XdsServer

# Time alone changes plans (grace periods, slow start), so the loop decides at least this often. After a
# slow decision the interval is _TICK_FACTOR times its duration, at most the load report interval.
_TICK_SECONDS, _TICK_FACTOR = 1.0, 100.0
# After a decision the loop pauses for this multiple of its duration, so that a flood of facts costs at most
# a third of a core. The minimum pause lets facts that arrive together go into one decision.
_REST_FACTOR, _MIN_REST_SECONDS = 2.0, 0.002


class Planner:
    """Decides and publishes plans, or publishes the plans of the leader.

    Call every method from one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        intents: IntentRepository,
        observers: Observers,
        xds: XdsServer,
        fleet: Callable[[], Sequence[ReplicaEnvoy]],
        metrics: Metrics,
        emit: Callable[..., None],
        on_change: Callable[[Plan, Plan], None],
        wake: asyncio.Event,
    ) -> None:
        """`fleet` returns the Envoys of all control planes; replica "" is this one.

        `on_change` gets the previous and the new plan, or the same plan twice to have it replicated at once.
        `wake` is set when a decision may be due.
        """
        self.policy = build_policy(settings)
        self.plan = Plan()
        self.publish_gate = InitialPublishGate()
        self.is_follower = False  # another replica decides
        self._clock = clock
        self._intents = intents
        self._observers = observers
        self._xds = xds
        self._fleet = fleet
        self._metrics = metrics
        self._emit = emit
        self._on_change = on_change
        self._wake = wake
        self._drain_progress_tracker = DrainProgressTracker()
        self._generation = PlanGeneration()
        self._plan_adopted = asyncio.Event()  # set, then replaced, with each adopted plan

    def configure(self, settings: Settings) -> None:
        """Apply changed settings."""
        self.policy = build_policy(settings)

    @property
    def saved_plan(self) -> SavedPlan | None:
        """The plan to save. None before the first publish: a restart would publish an incomplete plan."""
        if not self.publish_gate.is_open:
            return None
        term, serial = self._generation.stamp or (0, 0)
        envoys = dict(self._observers.fact_store.view().envoys_last_seen)
        return SavedPlan(self.plan, envoys, self._applied_intents_version, term, serial)

    def drain_progress(self, planned: NodePlan, facts: Facts, now: float) -> DrainProgress | None:
        """Return the progress of a node's drain; None if it has none."""
        return self._drain_progress_tracker.get(planned, facts, now)

    async def run(self) -> None:
        """Decide whenever facts change or the tick is due, until cancelled."""
        loop, duration = asyncio.get_running_loop(), 0.0
        while True:
            tick = max(_TICK_SECONDS, min(_TICK_FACTOR * duration, self.policy.report_interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(tick):  # `wait_for` may swallow a cancellation in Python 3.11
                    await self._wake.wait()
            self._wake.clear()
            start = loop.time()
            self.decide()
            duration = loop.time() - start
            await asyncio.sleep(max(_MIN_REST_SECONDS, _REST_FACTOR * duration))

    # --- role changes ---

    def restore(self, saved: SavedPlan) -> None:
        """Continue from a saved plan. Its Envoys count as seen now: they may have run during our downtime."""
        self.publish_gate.skip()
        self.plan = saved.plan if self.is_follower else clamp_plan_times(saved.plan, self._clock())
        self._mark_envoys_seen(saved)
        self._generation.adopt(self.plan, saved.stamp, saved.intents_version)

    def become_leader(self, term: int, saved: SavedPlan | None) -> None:
        """Start to decide for all replicas, from the shared plan `saved` if it is newer than ours."""
        now = self._clock()
        before = self.plan
        is_newer = saved is not None and saved.stamp > self._generation.base_stamp
        if saved is not None and is_newer:
            self.publish_gate.skip()
            self.plan = saved.plan
            self._generation.adopt(self.plan, saved.stamp)
        if self.is_follower or is_newer:
            self._start_deciding(now)
            if saved is not None:
                self._mark_envoys_seen(saved)
        self._generation.become_leader(term, self.plan)
        self._publish_changes(before, self._observers.fact_store.view(), now, at_once=True, must_publish=True)
        self.decide(at_once=True)

    def become_standalone(self) -> None:
        """Decide only for the Envoys that are connected here."""
        if self.is_follower:
            self._start_deciding(self._clock())
        self._generation.go_standalone()
        self.decide()

    def become_follower(self) -> None:
        """Stop deciding. The current plan stays until the leader's plan arrives."""
        self.is_follower = True

    def adopt_plan(self, saved: SavedPlan, term: int) -> None:
        """Adopt and publish the latest plan of the leader of `term`. A known plan is ignored."""
        if not self._generation.is_newer(saved.stamp, term):
            return
        now = self._clock()
        self._update_fleet(now)  # the current acknowledgements are for the previous plan
        before, self.plan = self.plan, saved.plan
        applies_newer_intents = saved.intents_version > self._generation.intents_version
        self._generation.adopt(self.plan, saved.stamp, saved.intents_version)
        self.publish_gate.skip()
        self._publish_changes(
            before, self._observers.fact_store.view(), now, at_once=applies_newer_intents, must_publish=True
        )
        self._plan_adopted.set()
        self._plan_adopted = asyncio.Event()

    async def wait_applied(self, version: int) -> None:
        """Return when the plan applies the intents of this version."""
        while self._applied_intents_version < version:
            await self._plan_adopted.wait()

    @property
    def _applied_intents_version(self) -> int:
        return self._generation.intents_version if self.is_follower else self._intents.version

    def _start_deciding(self, now: float) -> None:
        """Become the decider. Clamp the plan's times: another clock may have set them."""
        self.plan = clamp_plan_times(self.plan, now)
        self._observers.fact_store.reset_start(now)
        self.is_follower = False

    def _mark_envoys_seen(self, saved: SavedPlan) -> None:
        now, forgotten_at = self._clock(), self._intents.current.ended_envoys
        for envoy, last_seen in saved.envoys.items():
            if last_seen > forgotten_at.get(envoy, 0.0):
                self._observers.fact_store.mark_envoy_seen(envoy, now)

    # --- the decision ---

    def decide(self, *, at_once: bool = False) -> None:
        """Compute a plan from the facts and publish it if it changed.

        `at_once` pushes without debouncing, so that the caller can rely on the change.
        """
        now = self._clock()
        self._update_fleet(now)
        before = self.plan
        facts = self._observers.fact_store.view()
        applies_newer_intents = False
        if not self.is_follower:
            with self._metrics.plan_duration.time():
                self.plan = decide.plan(before, facts, self._intents.current, self.policy, now)
            # Other replicas wait until their intents are applied, even if the plan does not change.
            applies_newer_intents = (
                self._generation.is_leader
                and self._applied_intents_version > self._generation.intents_version
            )
            if applies_newer_intents or self.plan != before:
                self._generation.advance(self.plan, self._applied_intents_version)
        self._publish_changes(before, facts, now, at_once=at_once, must_publish=applies_newer_intents)

    def _update_fleet(self, now: float) -> None:
        fleet = self._fleet()
        self._observers.fact_store.put_fleet(
            [_remote_status(envoy) if envoy.replica else envoy.status for envoy in fleet],
            now,
            self.policy.envoy_retention,
            self._generation.closed,
            is_published=self._xds.is_pushed,
            ended_envoys=self._intents.current.ended_envoys,
            known_closed={e.status.id: self._generation.known_closed(e.stamp) for e in fleet if e.replica},
        )

    def _publish_changes(
        self, before: Plan, facts: Facts, now: float, *, at_once: bool, must_publish: bool = False
    ) -> None:
        """Emit events, update the observers and publish the plan if it has changed.

        `must_publish`: publish even if the plan equals the previous one, for example because it applies newer
        intents.
        """
        self._observers.awaiting_empty = nodes_awaiting_empty(self.plan)
        changed = self.plan != before
        if changed:
            self._metrics.count_state_changes(before, self.plan)
            for draft in (*node_events(before, self.plan), *rebalance_events(before, self.plan)):
                self._emit(*draft)
        just_opened = self._try_open_gate(facts, now)
        if changed or must_publish or just_opened:
            self._on_change(self.plan if must_publish or just_opened else before, self.plan)
        for address, progress in self._drain_progress_tracker.update(self.plan, facts, now):
            self._emit(*drain_finished(address, progress))
        self._observers.update_targets(self.plan, self._intents.current, before.nodes.keys())
        if just_opened or ((changed or must_publish) and self.publish_gate.is_open):
            self._xds.publish(self.plan, at_once=at_once, stamp=self._generation.stamp)

    def _try_open_gate(self, facts: Facts, now: float) -> bool:
        if self.is_follower and not self.publish_gate.is_skipped:
            return False  # only the leader makes the first plan
        return self.publish_gate.try_open(self.plan, facts, self.policy, now)


def _remote_status(envoy: ReplicaEnvoy) -> EnvoyStatus:
    """Return the status of an Envoy at another replica.

    A replica without a stamp publishes its own plan, so its Envoys have not acknowledged ours.
    """
    return envoy.status if envoy.stamp is not None else replace(envoy.status, eds_acked=False)
