"""Every replica knows the facts of all: each follows each other one, and tells what its own Envoys tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import structlog

from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.grpc_auth import Admit
from controlplane.model.facts import EnvoyLoad
from controlplane.model.traffic import ModuleReport
from controlplane.observe.envoy_reports.telemetry_stream import TelemetryStream
from controlplane.replicas import peer_authorization
from controlplane.replicas.merged_fleet import (
    Duplicates,
    Placed,
    ReplicaFleet,
    fleet_of_all,
    followed_by,
    lost,
    remembered,
)
from controlplane.replicas.peer_feed_client import hear
from controlplane.replicas.peer_feed_server import Feed
from controlplane.replicas.peer_messages import Hearing
from controlplane.xds.client_identity import peer
from controlplane.xds.envoy_registry import MEMORY

log = structlog.get_logger("tidevoy.replicas")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two tries to follow a replica
_LOOK = 1.0  # seconds between two looks at who is there twice, and who is not heard
_PATIENCE = 10.0  # seconds after which it is told that a replica is not heard


class Mesh:
    """The feeds from and to all other replicas. All methods belong to the event loop that `run` runs in."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        clock: Clock,
        *,
        ours: Callable[[], ReplicaFleet],
        on_load: Callable[[EnvoyLoad], None],
        on_report: Callable[[ModuleReport], None],
        on_fleet: Callable[[], None],
        on_event: Callable[[str, str, str, Mapping[str, Any]], None],
        new_stream: Callable[[str], TelemetryStream],
    ) -> None:
        """`name` is ours, `ours` gives our own Envoys. The others are called with what other replicas tell.

        `on_fleet` is called when `fleet` or `unheard` may have changed. `on_event` gets kind, subject,
        message and data; what it gets is not to be told to others again. `new_stream` gets the Envoy's id
        when the beginning of a stream was missed, else an empty text.
        """
        self._settings = settings
        self._name = name
        self._clock = clock
        self._ours = ours
        self._on_load, self._on_report = on_load, on_report
        self._on_fleet, self._on_event = on_fleet, on_event
        self._new_stream = new_stream
        self._feed = Feed(clock, ours=ours, refusal=self._refusal)
        self._addresses: Mapping[str, str] = {}
        self._addresses_changed = asyncio.Event()
        self._fleets: dict[str, ReplicaFleet] = {}
        self._heard: set[str] = set()
        self._unheard: dict[str, tuple[float, str]] = {}  # of those that are registered: since when, and why
        self._told: set[str] = set()  # of which it was told that they are not heard
        self._duplicates = Duplicates()
        self.load = self._feed.load
        self.telemetry = self._feed.telemetry
        self.telemetry_ended = self._feed.telemetry_ended
        self.event = self._feed.event
        self.changed = self._feed.changed

    def register(self, server: grpc.aio.Server, admit: Admit) -> None:
        """Let others follow us on a server that has not been started yet."""
        self._feed.register(server, admit)

    def peers(self, replicas: Mapping[str, str]) -> None:
        """All replicas that are registered: name -> advertised xDS address. They may follow us.

        Each is followed until it is neither registered nor heard: that etcd has lost all registrations for a
        moment does not tell that anybody is gone.
        """
        self._addresses = {name: address for name, address in replicas.items() if name != self._name}
        for name in self._unheard.keys() - self._addresses.keys():
            del self._unheard[name]
        for name in self._addresses.keys() - self._heard:
            self._unheard.setdefault(name, (self._clock(), "has told nothing yet"))
        self._addresses_changed.set()
        self._on_fleet()

    async def run(self) -> None:
        """Follow and be followed until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feed.run())
            tasks.create_task(self._keep_looking())
            following: dict[tuple[str, str], asyncio.Task[None]] = {}
            while True:
                following = {each: task for each, task in following.items() if not task.done()}
                ended = [task for each, task in following.items() if not self._is_wanted(*each)]
                for task in ended:
                    task.cancel()
                if ended:
                    await asyncio.wait(ended)  # one that has another address now is lost before it is heard
                    continue
                for name, address in self._addresses.items() - following.keys():
                    following[name, address] = tasks.create_task(self._follow(name, address))
                await self._addresses_changed.wait()
                self._addresses_changed.clear()

    def fleet(self) -> list[Placed]:
        """All Envoys of all replicas, by id."""
        return fleet_of_all(self._all())

    def unheard(self) -> Mapping[str, str]:
        """The replicas of which we hear nothing now: name -> why, as a clause about it."""
        return {name: why for name, (_, why) in self._unheard.items()}

    def _is_wanted(self, name: str, address: str) -> bool:
        """Whether that replica is to be followed at that address."""
        return self._addresses.get(name, address if name in self._heard else None) == address

    async def _follow(self, name: str, address: str) -> None:
        pause = _SHORTEST_PAUSE
        try:
            while self._is_wanted(name, address):
                hearing = Hearing(
                    on_load=self._on_load,
                    on_report=self._on_report,
                    on_fleet=lambda fleet: self._put_fleet(name, fleet),
                    on_event=self._on_event,
                    new_stream=self._new_stream,
                )
                why = await self._hear(address, hearing)
                if name in self._heard:
                    log.info("a replica is not heard any more", replica=name, why=why)
                    pause = _SHORTEST_PAUSE
                self._lose(name, why)
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._lose(name, "is not followed")

    async def _hear(self, address: str, hearing: Hearing) -> str:
        """Take in what a replica tells, until that ends; why it did."""
        try:
            return await hear(
                address,
                self._settings.xds.tls,
                self._name,
                lambda piece: hearing.take(piece, self._clock()),
            )
        except Exception as error:
            # What one Envoy sends comes here too, and may not end all replicas at once.
            log.exception("what a replica told could not be taken in", address=address)
            return f"told what could not be taken in: {error!r}"

    def _put_fleet(self, name: str, fleet: ReplicaFleet) -> None:
        self._fleets[name] = followed_by(self._fleets.get(name), fleet, self._clock())
        self._heard.add(name)
        self._unheard.pop(name, None)
        self._on_fleet()

    def _lose(self, name: str, why: str) -> None:
        if name in self._addresses:
            since, _ = self._unheard.get(name, (self._clock(), ""))
            self._unheard[name] = (since, why)
        if name in self._heard:
            self._heard.discard(name)
            self._fleets[name] = lost(self._fleets[name], self._clock())
            self._on_fleet()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            now = self._clock()
            for name, fleet in list(self._fleets.items()):
                self._fleets[name] = remembered(fleet, now - MEMORY)
                is_known = name in self._addresses or name in self._heard
                if not self._fleets[name].statuses and not is_known:
                    del self._fleets[name]
            for envoy, message in self._duplicates.look(self._all(), now):
                self._on_event("envoy.duplicate", envoy, message, {})
            self._tell_unheard(now)

    def _tell_unheard(self, now: float) -> None:
        for name in self._told - self._unheard.keys():
            self._told.discard(name)
            if name in self._addresses:
                self._on_event("replica.heard", name, "it tells of its Envoys again", {})
        for name, (since, why) in self._unheard.items():
            if name not in self._told and now - since >= _PATIENCE:
                self._told.add(name)
                message = f"it is registered, but {why}; its Envoys count as not connected"
                self._on_event("replica.unheard", name, message, {})

    def _all(self) -> Mapping[str, ReplicaFleet]:
        return {**self._fleets, self._name: self._ours()}

    def _refusal(self, context: grpc.aio.ServicerContext) -> str:
        tls = self._settings.xds.tls
        return peer_authorization.refusal(
            peer_authorization.credentials(peer(context.peer()), context.auth_context()),
            self._addresses.values(),
            is_checked=tls is not None and tls.client_ca is not None,
            is_open=self._settings.allow_unauthenticated,
        )
