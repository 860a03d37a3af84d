"""Follows all other replicas, so that this replica gets the reports of all Envoys."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.events.event_log import EventLog
from controlplane.observe.envoy_reports.metrics_service import MetricsService
from controlplane.observe.fact_store import FactStore
from controlplane.observe.statements.collector import StatementCollector
from controlplane.replicas.merged_fleet import (
    DuplicateIdDetector,
    ReplicaEnvoy,
    ReplicaFleet,
    add_missing_envoys,
    mark_disconnected,
    merge_fleets,
    without_expired,
)
from controlplane.replicas.peer_feed_client import receive_messages
from controlplane.replicas.peer_messages import PeerMessageReader
from controlplane.xds.envoy_registry import RETENTION_SECONDS

log = structlog.get_logger("tidevoy.replicas")

_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0  # backoff between attempts to follow a replica
_CHECK_INTERVAL_SECONDS = 1.0  # how often duplicate ids and unreachable replicas are checked
_MAX_OUTAGES = 100  # that are remembered
_UNREACHABLE_AFTER_SECONDS = 10.0  # then an event reports that a replica is unreachable


@dataclass(frozen=True, slots=True)
class ReplicaOutage:
    """A time in which a registered replica did not report its Envoys. `until` is None while it lasts."""

    replica: str
    since: float
    until: float | None


class PeerSync:
    """The feeds of all other replicas. Call every method from the event loop that runs `run`."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        clock: Clock,
        facts: FactStore,
        events: EventLog,
        module_metrics: MetricsService,
        statements: StatementCollector,
        *,
        own_fleet: Callable[[], ReplicaFleet],
    ) -> None:
        """`name` is this replica's name; `facts` gets the reports that other replicas forward.
        `module_metrics` parses the reports of Envoys' modules; `statements` stores those of statements;
        `own_fleet` returns our own Envoys.
        """
        self._settings = settings
        self._name = name
        self._clock = clock
        self._facts = facts
        self._events = events
        self._module_metrics = module_metrics
        self._statements = statements
        self._own_fleet = own_fleet
        self._addresses: Mapping[str, str] = {}
        self._addresses_changed = asyncio.Event()
        self._fleets: dict[str, ReplicaFleet] = {}
        self._reachable: set[str] = set()
        self._unreachable: dict[str, tuple[float, str]] = {}  # registered replicas -> since when, and why
        self._reported_unreachable: set[str] = set()  # reported as events
        self._outages: deque[ReplicaOutage] = deque(maxlen=_MAX_OUTAGES)  # that have ended
        self._duplicate_ids = DuplicateIdDetector()

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Set the other registered replicas, name -> advertised xDS address.

        A replica is followed until it is neither registered nor reachable: etcd may lose all registrations
        for a moment while the replicas still run.
        """
        self._addresses = addresses
        for name in self._unreachable.keys() - addresses.keys():
            self._end_outage(name)
        for name in addresses.keys() - self._reachable:
            self._unreachable.setdefault(name, (self._clock(), "has sent nothing yet"))
        self._addresses_changed.set()
        self._notify_fleet_changed()

    async def run(self) -> None:
        """Follow the other replicas until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_periodically())
            following: dict[tuple[str, str], asyncio.Task[None]] = {}
            while True:
                following = {peer: task for peer, task in following.items() if not task.done()}
                ended = [task for peer, task in following.items() if not self._is_wanted(*peer)]
                for task in ended:
                    task.cancel()
                if ended:
                    await asyncio.wait(ended)  # mark a replica as lost before following its new address
                    continue
                for name, address in self._addresses.items() - following.keys():
                    following[name, address] = tasks.create_task(self._follow(name, address))
                await self._addresses_changed.wait()
                self._addresses_changed.clear()

    def fleet(self) -> list[ReplicaEnvoy]:
        """Return the Envoys of all replicas, sorted by id."""
        return merge_fleets(self._all_fleets())

    def unreachable(self) -> Mapping[str, str]:
        """Return the unreachable replicas, name -> reason as a clause about the replica."""
        return {name: reason for name, (_, reason) in self._unreachable.items()}

    def outages(self) -> list[ReplicaOutage]:
        """Return when registered replicas did not report their Envoys, the latest times."""
        current = [ReplicaOutage(name, since, None) for name, (since, _) in self._unreachable.items()]
        return [*self._outages, *current]

    def _is_wanted(self, name: str, address: str) -> bool:
        return self._addresses.get(name, address if name in self._reachable else None) == address

    async def _follow(self, name: str, address: str) -> None:
        pause = _MIN_RETRY_SECONDS
        try:
            while self._is_wanted(name, address):
                reason = await self._receive(name, address)
                if name in self._reachable:
                    log.info("a replica has become unreachable", replica=name, reason=reason)
                    pause = _MIN_RETRY_SECONDS
                self._mark_lost(name, reason)
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
        finally:
            self._mark_lost(name, "is not followed")

    async def _receive(self, name: str, address: str) -> str:
        """Receive the messages of a replica until the stream ends; return why it ended."""
        reader = PeerMessageReader(
            self._facts,
            self._events,
            self._module_metrics,
            self._statements,
            lambda fleet: self._put_fleet(name, fleet),
        )
        try:
            return await receive_messages(
                address,
                self._settings.xds.tls,
                self._name,
                lambda message: reader.receive(message, self._clock()),
            )
        except Exception as error:
            # Data of one Envoy arrives at every replica; a bad message must not stop all replicas at once.
            log.exception("could not process a message of a replica", address=address)
            return f"sent a message that could not be processed: {error!r}"

    def _put_fleet(self, name: str, fleet: ReplicaFleet) -> None:
        self._fleets[name] = add_missing_envoys(self._fleets.get(name), fleet, self._clock())
        self._reachable.add(name)
        self._end_outage(name)
        self._notify_fleet_changed()

    def _end_outage(self, name: str) -> None:
        if (outage := self._unreachable.pop(name, None)) is not None:
            self._outages.append(ReplicaOutage(name, outage[0], self._clock()))

    def _mark_lost(self, name: str, reason: str) -> None:
        if name in self._addresses:
            since, _ = self._unreachable.get(name, (self._clock(), ""))
            self._unreachable[name] = (since, reason)
        if name in self._reachable:
            self._reachable.discard(name)
            self._fleets[name] = mark_disconnected(self._fleets[name], self._clock())
            self._notify_fleet_changed()

    def _notify_fleet_changed(self) -> None:
        self._facts.set_unreachable_replicas(frozenset(self._unreachable))
        self._facts.notify_acks_changed()

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            now = self._clock()
            for name, fleet in list(self._fleets.items()):
                self._fleets[name] = without_expired(fleet, now - RETENTION_SECONDS)
                is_known = name in self._addresses or name in self._reachable
                if not self._fleets[name].statuses and not is_known:
                    del self._fleets[name]
            for envoy, message in self._duplicate_ids.check(self._all_fleets(), now):
                self._events.record_unforwarded("envoy.duplicate", envoy, message, {})
            self._report_unreachable(now)

    def _report_unreachable(self, now: float) -> None:
        for name in self._reported_unreachable - self._unreachable.keys():
            self._reported_unreachable.discard(name)
            if name in self._addresses:
                self._events.record_unforwarded("replica.reachable", name, "it reports its Envoys again", {})
        for name, (since, reason) in self._unreachable.items():
            if name not in self._reported_unreachable and now - since >= _UNREACHABLE_AFTER_SECONDS:
                self._reported_unreachable.add(name)
                message = f"it is registered, but {reason}; its Envoys count as not connected"
                self._events.record_unforwarded("replica.unreachable", name, message, {})

    def _all_fleets(self) -> Mapping[str, ReplicaFleet]:
        return {**self._fleets, self._name: self._own_fleet()}
