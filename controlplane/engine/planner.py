"""The loop from facts to a plan, and everything that follows from a change of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from controlplane.clock import Clock
from controlplane.config.settings import Settings, policy
from controlplane.decide import plan as decide
from controlplane.decide.session_counts import awaited
from controlplane.engine.drain_progress import Departures
from controlplane.engine.plan_generation import Offers
from controlplane.engine.publish_gate import FirstPublish
from controlplane.events.event_messages import departed, node_events, rebalance_events
from controlplane.intents.repository import Intentions
from controlplane.metrics.registry import Metrics
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.views import Departure
from controlplane.observe.observers import Observation
from controlplane.replicas.merged_fleet import Placed
from controlplane.storage.clamp_timestamps import plan_until
from controlplane.storage.store import SavedPlan
from controlplane.xds.server import XdsServer

# Time itself changes plans (graces, slow start): a decision is made at least this often, in seconds. Where
# one takes long it is so many times as long instead, but not longer than until there are new counts.
_TICK, _TICK_FACTOR = 1.0, 100.0
# After a decision the loop rests this many times as long as the decision took, so that a flood of facts
# costs at most a third of a core; and this long at least, so that facts that come together are used together.
_REST_FACTOR, _REST_AT_LEAST = 2.0, 0.002


class Planner:
    """Decides and publishes, or publishes what another control plane decided.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        intentions: Intentions,
        observation: Observation,
        xds: XdsServer,
        fleet: Callable[[], Sequence[Placed]],
        metrics: Metrics,
        tell: Callable[..., None],
        on_change: Callable[[Plan, Plan], None],
        wake: asyncio.Event,
    ) -> None:
        """`fleet` has the Envoys of all control planes; replica "" is this one.

        `on_change` gets the plan before and another one now, or one twice when all are to have it at once.
        `wake` is set when a decision may be due.
        """
        self.policy = policy(settings)
        self.plan = Plan()
        self.first = FirstPublish()
        self.stands_by = False  # another one decides
        self._clock = clock
        self._intentions = intentions
        self._observation = observation
        self._xds = xds
        self._fleet = fleet
        self._metrics = metrics
        self._tell = tell
        self._on_change = on_change
        self._wake = wake
        self._departures = Departures()
        self._offers = Offers()
        self._adopted = asyncio.Event()  # another plan has come; a new one for each

    def configure(self, settings: Settings) -> None:
        """Take over changed settings."""
        self.policy = policy(settings)

    @property
    def saved(self) -> SavedPlan | None:
        """The plan, to be kept. None: not yet, for it would be published with all that it lacks."""
        if not self.first.open:
            return None
        term, serial = self._offers.stamp or (0, 0)
        envoys = dict(self._observation.store.facts().envoys)
        return SavedPlan(self.plan, envoys, self._heeds, term, serial)

    def departure(self, planned: NodePlan, facts: Facts, now: float) -> Departure | None:
        """What has come of a node's sessions since it is being left."""
        return self._departures.of(planned, facts, now)

    async def run(self) -> None:
        """Decide when there is a reason to, until cancelled."""
        loop, took = asyncio.get_running_loop(), 0.0
        while True:
            tick = max(_TICK, min(_TICK_FACTOR * took, self.policy.report_interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(tick):  # `wait_for` may swallow a cancellation in Python 3.11
                    await self._wake.wait()
            self._wake.clear()
            start = loop.time()
            self.decide()
            took = loop.time() - start
            await asyncio.sleep(max(_REST_AT_LEAST, _REST_FACTOR * took))

    # --- who decides ---

    def restore(self, saved: SavedPlan) -> None:
        """Go on from a plan that was kept. Its Envoys are seen now: our absence tells nothing of them."""
        self.first.waive()
        self.plan = saved.plan if self.stands_by else plan_until(saved.plan, self._clock())
        self._see_envoys(saved)
        self._offers.adopt(self.plan, saved.stamp, saved.intents_version)

    def lead(self, term: int, saved: SavedPlan | None) -> None:
        """Decide for all from now on. `saved` is the plan that all go on from, unless ours is made of it."""
        now = self._clock()
        before = self.plan
        is_news = saved is not None and saved.stamp > self._offers.origin
        if saved is not None and is_news:
            self.first.waive()
            self.plan = saved.plan
            self._offers.adopt(self.plan, saved.stamp)
        if self.stands_by or is_news:
            self._decide_from(now)
            if saved is not None:
                self._see_envoys(saved)
        self._offers.lead(term, self.plan)
        self._take_over(before, self._observation.store.facts(), now, at_once=True, is_new=True)
        self.decide(at_once=True)

    def decide_alone(self) -> None:
        """Decide for the Envoys that are connected here."""
        if self.stands_by:
            self._decide_from(self._clock())
        self._offers.stray()
        self.decide()

    def stand_by(self) -> None:
        """Another one decides from now on. Until its plan comes the one that there is stays."""
        self.stands_by = True

    def follow(self, saved: SavedPlan, term: int) -> None:
        """The plan that the leader of that term has written last; nothing comes of one that is known."""
        if not self._offers.is_news(saved.stamp, term):
            return
        now = self._clock()
        self._put_fleet(now)  # what Envoys have acknowledged is of the plan before
        before, self.plan = self.plan, saved.plan
        heeds_more = saved.intents_version > self._offers.intents_version
        self._offers.adopt(self.plan, saved.stamp, saved.intents_version)
        self.first.waive()
        self._take_over(before, self._observation.store.facts(), now, at_once=heeds_more, is_new=True)
        self._adopted.set()
        self._adopted = asyncio.Event()

    async def until_heeded(self, version: int) -> None:
        """Returns when the plan heeds the intents of that version."""
        while self._heeds < version:
            await self._adopted.wait()

    @property
    def _heeds(self) -> int:
        return self._offers.intents_version if self.stands_by else self._intentions.version

    def _decide_from(self, now: float) -> None:
        """The times in the plan may be by another clock, and what Envoys were asked may be so no more."""
        self.plan = plan_until(self.plan, now)
        self._observation.store.begin(now)
        self.stands_by = False

    def _see_envoys(self, saved: SavedPlan) -> None:
        now, ended = self._clock(), self._intentions.now.ended
        for envoy, seen in saved.envoys.items():
            if seen > ended.get(envoy, 0.0):
                self._observation.store.see_envoy(envoy, now)

    # --- the decision ---

    def decide(self, *, at_once: bool = False) -> None:
        """One pass from facts to a plan, and everything that follows from a change of it.

        `at_once`: a change is pushed without waiting for others, so that who asked for it can rely on it.
        """
        now = self._clock()
        self._put_fleet(now)
        before = self.plan
        facts = self._observation.store.facts()
        heeds_more = False
        if not self.stands_by:
            with self._metrics.plan_seconds.time():
                self.plan = decide.plan(before, facts, self._intentions.now, self.policy, now)
            # Others wait to hear that what they were asked for is heeded, also when nothing comes of it.
            heeds_more = self._offers.leads and self._heeds > self._offers.intents_version
            if heeds_more or self.plan != before:
                self._offers.decided(self.plan, self._heeds)
        self._take_over(before, facts, now, at_once=at_once, is_new=heeds_more)

    def _put_fleet(self, now: float) -> None:
        fleet = self._fleet()
        self._observation.store.put_fleet(
            [_followed(placed) if placed.replica else placed.status for placed in fleet],
            now,
            self.policy.envoy_memory,
            self._offers.closed,
            is_published=self._xds.is_pushed,
            ended=self._intentions.now.ended,
            told={p.status.id: self._offers.told(p.stamp) for p in fleet if p.replica},
        )

    def _take_over(
        self, before: Plan, facts: Facts, now: float, *, at_once: bool, is_new: bool = False
    ) -> None:
        """What follows from the plan. `is_new`: it is another one, even if it looks the same."""
        self._observation.awaited = awaited(self.plan)
        changed = self.plan != before
        if changed:
            self._metrics.count_changes(before, self.plan)
            for told in (*node_events(before, self.plan), *rebalance_events(before, self.plan)):
                self._tell(*told)
        opens = self._opens(facts, now)
        if changed or is_new or opens:
            self._on_change(self.plan if is_new or opens else before, self.plan)
        for address, departure in self._departures.follow(self.plan, facts, now):
            self._tell(*departed(address, departure))
        self._observation.look_where_needed(self.plan, self._intentions.now, before.nodes.keys())
        if opens or ((changed or is_new) and self.first.open):
            self._xds.publish(self.plan, at_once=at_once, stamp=self._offers.stamp)

    def _opens(self, facts: Facts, now: float) -> bool:
        if self.stands_by and not self.first.is_waived:
            return False  # there is no plan yet, and it is not ours to make one
        return self.first.opens(self.plan, facts, self.policy, now)


def _followed(placed: Placed) -> EnvoyStatus:
    """An Envoy at another control plane. What that one decides by itself is not what we have published."""
    return placed.status if placed.stamp is not None else replace(placed.status, endpoints_acked=False)
