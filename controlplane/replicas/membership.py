"""Which control planes there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from controlplane.errors import LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.etcd.types import Entry
from controlplane.replicas.lease import Lease
from controlplane.storage.etcd_keys import Keys, Registered, Reign, registered, registered_value

log = structlog.get_logger("tidevoy.replicas")

_AGAIN = 0.5  # seconds between two looks at whether there is something to write


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One control plane as `GET /v1/replicas` shows it."""

    name: str
    address: str  # at which other replicas reach its xDS server
    version: str  # of Tidevoy
    since: float  # when it started
    leads: bool = False
    led_since: float | None = None
    is_us: bool = False
    unheard: str = ""  # why nothing is heard of its Envoys, as a clause about it; empty: it tells of them


class Registry:
    """Registers this control plane, and follows which others are."""

    def __init__(
        self,
        us: Registered,
        client: EtcdClient,
        keys: Keys,
        lease: Lease,
        *,
        on_change: Callable[[Mapping[str, str]], None],
        tell: Callable[..., None],
    ) -> None:
        """`on_change` gets the advertised addresses of the others by name."""
        self._us = us
        self._client = client
        self._keys = keys
        self._lease = lease
        self._on_change = on_change
        self._tell = tell
        self._known: dict[str, Registered] = {}
        self._is_listed = False
        self._rival = ""
        self._due = asyncio.Event()
        self._written_for: int | None = None  # the lease

    def register(self) -> None:
        """There may be a reason to register anew."""
        self._due.set()

    async def run(self) -> None:
        """Be registered until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN):
                    await self._due.wait()
            self._due.clear()
            lease = self._lease.id
            if lease is None or not self._lease.holds or lease == self._written_for:
                continue
            try:
                await self._client.put(self._keys.replica(self._us.name), registered_value(self._us), lease)
                self._written_for = lease
            except LeaseLost:
                self._lease.lose()
            except PdError as error:
                log.info("could not register", error=str(error))

    def look(self, entries: Mapping[str, Entry], *, stands: bool) -> None:
        """The keys as they are now. While the mirror does not stand, nobody is known to have left."""
        found = registered(entries, self._keys)
        if not stands:
            found = {**self._known, **found}
        self._look_at_rival(found.get(self._us.name))
        others = {name: replica for name, replica in found.items() if name != self._us.name}
        if stands:
            self._tell_changes(others)
        if others != self._known or not self._is_listed:
            self._is_listed = True
            self._known = others
            self._on_change({name: replica.address for name, replica in others.items()})

    def views(self, reign: Reign | None, unheard: Mapping[str, str]) -> list[ReplicaView]:
        """All control planes, ours among them, by name."""
        views = []
        for name, replica in sorted({**self._known, self._us.name: self._us}.items()):
            leads = reign is not None and reign.name == name
            views.append(
                ReplicaView(
                    name,
                    replica.address,
                    replica.version,
                    replica.since,
                    leads=leads,
                    led_since=reign.since if leads and reign is not None else None,
                    is_us=name == self._us.name,
                    unheard=unheard.get(name, ""),
                )
            )
        return views

    def _tell_changes(self, now: Mapping[str, Registered]) -> None:
        for name, replica in now.items():
            past = self._known.get(name)
            if past is None or past.instance != replica.instance:
                self._tell("replica.joined", name, f"the control plane {name} is there, at {replica.address}")
        for name in self._known.keys() - now.keys():
            self._tell("replica.left", name, f"the control plane {name} has left, or is not heard of by PD")

    def _look_at_rival(self, ours: Registered | None) -> None:
        if ours is None:
            self._written_for = None  # our lease ran out, or a hand has deleted it
            self.register()
            return
        # What a former process of ours wrote is there until we have written.
        rival = ours.instance if self._written_for is not None and ours.instance != self._us.instance else ""
        if rival and rival != self._rival:
            self._tell(
                "replica.duplicate",
                self._us.name,
                f"another control plane, at {ours.address}, is registered as {self._us.name} too; give each a"
                " replicas.name of its own",
            )
        self._rival = rival
