"""Shares facts between replicas: each replica follows all others and forwards its own Envoys' reports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import structlog

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.facts import EnvoyLoad
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.replicas import peer_authorization
from controlplane.replicas.merged_fleet import (
    DuplicateIdDetector,
    ReplicaEnvoy,
    ReplicaFleet,
    carry_over_missing,
    mark_disconnected,
    merge_fleets,
    without_expired,
)
from controlplane.replicas.peer_feed_client import receive_messages
from controlplane.replicas.peer_feed_server import PeerFeed
from controlplane.replicas.peer_messages import PeerMessageReader
from controlplane.xds.client_identity import peer_address
from controlplane.xds.envoy_registry import RETENTION_SECONDS

log = structlog.get_logger("tidevoy.replicas")

_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0  # backoff between attempts to follow a replica
_CHECK_INTERVAL_SECONDS = 1.0  # how often duplicate ids and unreachable replicas are checked
_UNREACHABLE_AFTER_SECONDS = 10.0  # when an unreachable replica is reported as an event


class PeerSync:
    """The feeds from and to all other replicas. Call every method from the event loop that runs `run`."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        clock: Clock,
        *,
        own_fleet: Callable[[], ReplicaFleet],
        on_load: Callable[[EnvoyLoad], None],
        on_report: Callable[[ModuleReport], None],
        on_fleet: Callable[[], None],
        on_event: Callable[[str, str, str, Mapping[str, Any]], None],
        new_stream: Callable[[str], TelemetryStream],
    ) -> None:
        """`name` is that of this replica; the callbacks get the facts that other replicas send.

        `on_fleet` is called when `fleet` or `unreachable` may have changed. `on_event` gets kind, subject,
        message and data; its events must not be sent on to other replicas. `new_stream` gets the Envoy's id
        if the start of a stream was missed, else an empty string.
        """
        self._settings = settings
        self._name = name
        self._clock = clock
        self._own_fleet = own_fleet
        self._on_load, self._on_report = on_load, on_report
        self._on_fleet, self._on_event = on_fleet, on_event
        self._new_stream = new_stream
        self._feed = PeerFeed(clock, own_fleet=own_fleet, denial_message=self._denial_message)
        self._addresses: Mapping[str, str] = {}
        self._addresses_changed = asyncio.Event()
        self._fleets: dict[str, ReplicaFleet] = {}
        self._reachable: set[str] = set()
        self._unreachable: dict[str, tuple[float, str]] = {}  # registered replicas -> since when, and why
        self._reported_unreachable: set[str] = set()  # reported as events
        self._duplicate_ids = DuplicateIdDetector()
        self.load = self._feed.send_load
        self.telemetry = self._feed.send_telemetry
        self.telemetry_ended = self._feed.send_telemetry_end
        self.send_event = self._feed.send_event
        self.notify_fleet_changed = self._feed.notify_fleet_changed

    def register(self, server: grpc.aio.Server, admit: AuthorizeEnvoy) -> None:
        """Add the feed service to a server before its start."""
        self._feed.register(server, admit)

    def set_peers(self, replicas: Mapping[str, str]) -> None:
        """Set the registered replicas, name -> advertised xDS address. They may follow this one.

        A replica is followed until it is neither registered nor reachable: etcd may lose all registrations
        for a moment while the replicas still run.
        """
        self._addresses = {name: address for name, address in replicas.items() if name != self._name}
        for name in self._unreachable.keys() - self._addresses.keys():
            del self._unreachable[name]
        for name in self._addresses.keys() - self._reachable:
            self._unreachable.setdefault(name, (self._clock(), "has sent nothing yet"))
        self._addresses_changed.set()
        self._on_fleet()

    async def run(self) -> None:
        """Follow the other replicas and serve followers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feed.run())
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

    def _is_wanted(self, name: str, address: str) -> bool:
        return self._addresses.get(name, address if name in self._reachable else None) == address

    async def _follow(self, name: str, address: str) -> None:
        pause = _MIN_RETRY_SECONDS
        try:
            while self._is_wanted(name, address):
                reader = PeerMessageReader(
                    on_load=self._on_load,
                    on_report=self._on_report,
                    on_fleet=lambda fleet: self._put_fleet(name, fleet),
                    on_event=self._on_event,
                    new_stream=self._new_stream,
                )
                reason = await self._receive(address, reader)
                if name in self._reachable:
                    log.info("a replica has become unreachable", replica=name, reason=reason)
                    pause = _MIN_RETRY_SECONDS
                self._mark_lost(name, reason)
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
        finally:
            self._mark_lost(name, "is not followed")

    async def _receive(self, address: str, reader: PeerMessageReader) -> str:
        """Receive the messages of a replica until the stream ends; return why it ended."""
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
        self._fleets[name] = carry_over_missing(self._fleets.get(name), fleet, self._clock())
        self._reachable.add(name)
        self._unreachable.pop(name, None)
        self._on_fleet()

    def _mark_lost(self, name: str, reason: str) -> None:
        if name in self._addresses:
            since, _ = self._unreachable.get(name, (self._clock(), ""))
            self._unreachable[name] = (since, reason)
        if name in self._reachable:
            self._reachable.discard(name)
            self._fleets[name] = mark_disconnected(self._fleets[name], self._clock())
            self._on_fleet()

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
                self._on_event("envoy.duplicate", envoy, message, {})
            self._report_unreachable(now)

    def _report_unreachable(self, now: float) -> None:
        for name in self._reported_unreachable - self._unreachable.keys():
            self._reported_unreachable.discard(name)
            if name in self._addresses:
                self._on_event("replica.reachable", name, "it reports its Envoys again", {})
        for name, (since, reason) in self._unreachable.items():
            if name not in self._reported_unreachable and now - since >= _UNREACHABLE_AFTER_SECONDS:
                self._reported_unreachable.add(name)
                message = f"it is registered, but {reason}; its Envoys count as not connected"
                self._on_event("replica.unreachable", name, message, {})

    def _all_fleets(self) -> Mapping[str, ReplicaFleet]:
        return {**self._fleets, self._name: self._own_fleet()}

    def _denial_message(self, context: grpc.aio.ServicerContext) -> str:
        tls = self._settings.xds.tls
        return peer_authorization.denial_message(
            peer_authorization.read_credentials(peer_address(context.peer()), context.auth_context()),
            self._addresses.values(),
            requires_certificate=tls is not None and tls.client_ca is not None,
            allows_unauthenticated=self._settings.allow_unauthenticated,
        )
