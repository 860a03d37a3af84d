"""The planning loop: computes a plan from facts and intents, and publishes each change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from controlplane.clock import Clock
from controlplane.config.settings import Settings, build_policy
from controlplane.decide.node_sources import all_sources_complete
from controlplane.decide.plan import compute_plan, has_completed_first_checks
from controlplane.decide.session_counts import nodes_awaiting_empty
from controlplane.engine.drain_progress import DrainProgressTracker
from controlplane.engine.plan_generation import PlanGeneration
from controlplane.engine.plan_saver import PlanSaver
from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import (
    capture_events,
    drain_finished,
    node_events,
    rebalance_events,
)
from controlplane.intents.repository import IntentRepository
from controlplane.metrics.registry import Metrics
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.plan import Plan, Policy
from controlplane.observe.fact_store import FactStore
from controlplane.observe.observers import Observers
from controlplane.replicas.merged_fleet import ReplicaEnvoy
from controlplane.replicas.replica_set import ReplicaSet
from controlplane.storage.restored_state import clamp_plan_times
from controlplane.storage.store import SavedPlan
from controlplane.xds.server import XdsServer

# Some changes depend on time alone (grace periods, slow start), so the loop plans at least this often. If
# planning is slow, the interval is _TICK_FACTOR times its duration, at most the load report interval.
_TICK_SECONDS, _TICK_FACTOR = 1.0, 100.0
# After planning, the loop pauses for this multiple of its duration, so that it uses at most a third of a
# core. The minimum pause combines facts that arrive together.
_REST_FACTOR, _MIN_REST_SECONDS = 2.0, 0.002
# How long the first publish waits for the first checks of the nodes after all sources are complete.
_FIRST_CHECKS_TIMEOUT_SECONDS = 3.0


class Planner:
    """Computes and publishes plans; a follower publishes the plans of the leader (another replica).

    Call every method from one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        facts: FactStore,
        intents: IntentRepository,
        observers: Observers,
        xds: XdsServer,
        saver: PlanSaver,
        events: EventLog,
        metrics: Metrics,
        replicas: ReplicaSet | None,
    ) -> None:
        """`replicas` is None without replication."""
        self.policy = build_policy(settings)
        self.plan = Plan()
        self.publish_gate = InitialPublishGate()
        self.drain_progress = DrainProgressTracker(self.policy)
        self.is_follower = replicas is not None  # whether another replica computes the plan
        self._clock = clock
        self._facts = facts
        self._intents = intents
        self._observers = observers
        self._xds = xds
        self._saver = saver
        self._events = events
        self._metrics = metrics
        self._replicas = replicas
        self._generation = PlanGeneration()
        self._updated = asyncio.Event()  # set, then replaced, when the plan or its intents version changes

    def configure(self, settings: Settings) -> None:
        self.policy = self.drain_progress.policy = build_policy(settings)
        self._facts.configure(self.policy)

    @property
    def saved_plan(self) -> SavedPlan | None:
        """The plan to save; None before the first publish, because the plan may be incomplete."""
        if not self.publish_gate.is_open:
            return None
        term, serial = self._generation.stamp or (0, 0)
        envoys = dict(self._facts.view().envoys_last_seen)
        return SavedPlan(self.plan, envoys, self._generation.intents_version, term, serial)

    def fleet(self) -> Sequence[ReplicaEnvoy]:
        """Return the Envoys of all replicas; `replica` is empty for an Envoy that is connected here."""
        if self._replicas is not None:
            return self._replicas.fleet()
        return [ReplicaEnvoy(status, "") for status in self._xds.statuses()]

    async def run(self) -> None:
        """Plan whenever facts change or the tick is due, until cancelled."""
        loop, duration = asyncio.get_running_loop(), 0.0
        while True:
            tick = max(_TICK_SECONDS, min(_TICK_FACTOR * duration, self.policy.report_interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(tick):  # `wait_for` may swallow a cancellation in Python 3.11
                    await self._facts.changed.wait()
            self._facts.changed.clear()
            start = loop.time()
            self.decide()
            duration = loop.time() - start
            await asyncio.sleep(max(_MIN_REST_SECONDS, _REST_FACTOR * duration))

    # --- role changes ---

    def restore(self, saved: SavedPlan) -> None:
        """Continue from a saved plan. Its Envoys count as seen now, since they may still be running."""
        self.publish_gate.skip()
        self.plan = saved.plan if self.is_follower else clamp_plan_times(saved.plan, self._clock())
        self._mark_envoys_seen(saved)
        self._generation.adopt(self.plan, saved.stamp, saved.intents_version)

    def become_leader(self, term: int, saved: SavedPlan | None) -> None:
        """Start to plan for all replicas, from the shared plan `saved` if that is newer."""
        now = self._clock()
        before = self.plan
        is_newer = saved is not None and saved.stamp > self._generation.last_shared_stamp
        if saved is not None and is_newer:
            self.publish_gate.skip()
            self.plan = saved.plan
            self._generation.adopt(self.plan, saved.stamp)
        if self.is_follower or is_newer:
            self._start_deciding(now)
            if saved is not None:
                self._mark_envoys_seen(saved)
        self._generation.become_leader(term, self.plan)
        self._publish_changes(before, self._facts.view(), now, at_once=True, must_publish=True)
        self.decide(at_once=True)

    def become_standalone(self) -> None:
        """Start to plan only for the Envoys that are connected to this replica."""
        if self.is_follower:
            self._start_deciding(self._clock())
        self._generation.go_standalone()
        self.decide()

    def become_follower(self) -> None:
        """Stop planning. The current plan stays until the leader's plan arrives."""
        self.is_follower = True

    def adopt_plan(self, saved: SavedPlan, term: int) -> None:
        """Adopt and publish a plan of the leader of `term`, if it is newer than the current plan."""
        if not self._generation.is_newer(saved.stamp, term):
            return
        now = self._clock()
        self._update_fleet(now)  # acknowledgements so far are for the previous plan
        before, self.plan = self.plan, saved.plan
        applies_newer_intents = saved.intents_version > self._generation.intents_version
        self._generation.adopt(self.plan, saved.stamp, saved.intents_version)
        self.publish_gate.skip()
        self._publish_changes(
            before, self._facts.view(), now, at_once=applies_newer_intents, must_publish=True
        )

    async def wait_updated(self) -> None:
        """Return after the next change of the plan or of its intents version."""
        await self._updated.wait()

    async def wait_applied(self, version: int) -> None:
        """Return when the plan applies the intents of this version, also if the leader computes the plan."""
        while self._generation.intents_version < version:
            await self._updated.wait()

    def _start_deciding(self, now: float) -> None:
        """Start to compute plans. The plan's times are clamped, since another machine may have set them."""
        self.plan = clamp_plan_times(self.plan, now)
        self._facts.restart_observation(now)
        self.is_follower = False

    def _mark_envoys_seen(self, saved: SavedPlan) -> None:
        now, forgotten_at = self._clock(), self._intents.current.ended_envoys
        for envoy, last_seen in saved.envoys.items():
            if last_seen > forgotten_at.get(envoy, 0.0):
                self._facts.mark_envoy_seen(envoy, now)

    # --- planning ---

    def decide(self, *, at_once: bool = False) -> None:
        """Compute a plan from the facts, unless this replica is a follower; publish the plan if it changed.

        With `at_once`, the plan is pushed to Envoys without debouncing.
        """
        now, intents, intents_version = self._clock(), self._intents.current, self._intents.version
        self._observers.load_static_nodes(intents)
        self._update_fleet(now)
        before, facts = self.plan, self._facts.view()
        applies_other_intents = False
        if not self.is_follower:
            with self._metrics.plan_duration.time():
                self.plan = compute_plan(
                    before,
                    facts,
                    intents,
                    self.policy,
                    now,
                    is_standalone=self._generation.is_standalone,
                )
            applies_other_intents = intents_version != self._generation.intents_version
            if applies_other_intents or self.plan != before:
                self._generation.advance(self.plan, intents_version)
        self._publish_changes(before, facts, now, at_once=at_once, must_publish=applies_other_intents)

    def _update_fleet(self, now: float) -> None:
        fleet = self.fleet()
        self._facts.put_fleet(
            [_remote_status(envoy) if envoy.replica else envoy.status for envoy in fleet],
            now,
            self.policy.envoy_retention,
            self._generation.closed,
            is_published=self._xds.is_pushed,
            ended_envoys=self._intents.current.ended_envoys,
            closed_nodes_by_remote_envoy={
                envoy.status.id: self._generation.closed_since_plan(envoy.stamp)
                for envoy in fleet
                if envoy.replica
            },
        )

    def _publish_changes(
        self, before: Plan, facts: Facts, now: float, *, at_once: bool, must_publish: bool = False
    ) -> None:
        """If the plan has changed, emit events and publish it. Update the observers in any case.

        `must_publish`: publish even an equal plan, so that replicas learn that their intents are applied.
        """
        self._facts.awaiting_empty = nodes_awaiting_empty(self.plan)
        is_changed = self.plan != before
        if is_changed:
            self._metrics.count_state_changes(before, self.plan)
            for draft in (
                *node_events(before, self.plan),
                *rebalance_events(before, self.plan),
                *capture_events(before, self.plan, now),
            ):
                self._events.emit(*draft)
        has_opened = self._try_open_gate(facts, now)
        for address, progress in self.drain_progress.update(self.plan, facts, now):
            self._events.emit(*drain_finished(address, progress))
        self._observers.update_targets(self.plan, self._intents.current)
        if not (is_changed or must_publish or has_opened):
            return
        self._updated.set()
        self._updated = asyncio.Event()
        self._saver.mark_changed()
        if self._replicas is not None:
            self._replicas.notify_plan_changed(before, self.plan, is_urgent=must_publish or has_opened)
        if self.publish_gate.is_open:
            self._xds.publish(self.plan, at_once=at_once, stamp=self._generation.stamp)

    def _try_open_gate(self, facts: Facts, now: float) -> bool:
        if self.is_follower and not self.publish_gate.is_skipped:
            return False  # a follower waits for the first plan of the leader
        return self.publish_gate.try_open(self.plan, facts, self.policy, now)


def _remote_status(envoy: ReplicaEnvoy) -> EnvoyStatus:
    """Return the status of an Envoy that is connected to another replica.

    A replica without a stamp publishes its own plan, so its Envoys have not acknowledged this plan.
    """
    if envoy.stamp is not None:
        return envoy.status
    return replace(envoy.status, has_acknowledged_endpoints=False)


class InitialPublishGate:
    """Delays the first publish until the plan is complete.

    A saved plan is published at once. Otherwise the gate opens when all sources are complete and every node
    was checked once (or after a timeout): an earlier plan would lack nodes that an Envoy may already use.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_skipped = False
        self._sources_complete_at: float | None = None

    def skip(self) -> None:
        """Let the next attempt open the gate, because there is a saved or shared plan."""
        self.is_skipped = True

    def try_open(self, plan: Plan, facts: Facts, policy: Policy, now: float) -> bool:
        """Open the gate if the plan is complete; return whether this call opened it."""
        if self.is_open:
            return False
        if self._sources_complete_at is None and all_sources_complete(facts):
            self._sources_complete_at = now
        self.is_open = self.is_skipped or (
            self._sources_complete_at is not None
            and (
                has_completed_first_checks(plan, facts, policy)
                or now - self._sources_complete_at > _FIRST_CHECKS_TIMEOUT_SECONDS
            )
        )
        return self.is_open
