"""Registers this control plane in etcd and tracks the other registered control planes."""

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
from controlplane.storage.etcd_keys import (
    EtcdKeys,
    LeaderRecord,
    ReplicaRecord,
    decode_replicas,
    encode_replica,
)

log = structlog.get_logger("tidevoy.replicas")

_CHECK_INTERVAL_SECONDS = 0.5  # how often the registration is checked


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One control plane as `GET /v1/replicas` shows it."""

    name: str
    address: str  # where other replicas reach its xDS server
    version: str  # of Tidevoy
    since: float  # when it started
    is_leader: bool = False
    leader_since: float | None = None
    is_self: bool = False
    unreachable: str = ""  # why it does not report its Envoys, as a clause about it; empty: it does


class Membership:
    """Keeps this control plane registered and reports when others join or leave."""

    def __init__(
        self,
        own_record: ReplicaRecord,
        client: EtcdClient,
        keys: EtcdKeys,
        lease: Lease,
        *,
        on_change: Callable[[Mapping[str, str]], None],
        emit: Callable[..., None],
    ) -> None:
        """`on_change` gets the advertised addresses of the other replicas by name."""
        self._own_record = own_record
        self._client = client
        self._keys = keys
        self._lease = lease
        self._on_change = on_change
        self._emit = emit
        self._others: dict[str, ReplicaRecord] = {}
        self._has_notified = False
        self._conflicting_instance = ""
        self._registration_due = asyncio.Event()
        self._registered_lease: int | None = None  # the lease of the registration

    def request_registration(self) -> None:
        """Check soon whether this replica has to register again."""
        self._registration_due.set()

    async def run(self) -> None:
        """Keep this replica registered until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_SECONDS):
                    await self._registration_due.wait()
            self._registration_due.clear()
            lease = self._lease.id
            if lease is None or not self._lease.is_valid or lease == self._registered_lease:
                continue
            try:
                await self._client.put(
                    self._keys.replica(self._own_record.name), encode_replica(self._own_record), lease
                )
                self._registered_lease = lease
            except LeaseLost:
                self._lease.expire()
            except PdError as error:
                log.info("could not register", error=str(error))

    def update(self, entries: Mapping[str, Entry], *, is_current: bool) -> None:
        """Apply the current keys. While the mirror is not current, no replica counts as having left."""
        registered = decode_replicas(entries, self._keys)
        if not is_current:
            registered = {**self._others, **registered}
        self._check_conflict(registered.get(self._own_record.name))
        others = {name: replica for name, replica in registered.items() if name != self._own_record.name}
        if is_current:
            self._report_changes(others)
        if others != self._others or not self._has_notified:
            self._has_notified = True
            self._others = others
            self._on_change({name: replica.address for name, replica in others.items()})

    def views(self, leader: LeaderRecord | None, unreachable: Mapping[str, str]) -> list[ReplicaView]:
        """Return all control planes including this one, sorted by name."""
        views = []
        for name, replica in sorted({**self._others, self._own_record.name: self._own_record}.items()):
            is_leader = leader is not None and leader.name == name
            views.append(
                ReplicaView(
                    name,
                    replica.address,
                    replica.version,
                    replica.since,
                    is_leader=is_leader,
                    leader_since=leader.since if is_leader and leader is not None else None,
                    is_self=name == self._own_record.name,
                    unreachable=unreachable.get(name, ""),
                )
            )
        return views

    def _report_changes(self, now: Mapping[str, ReplicaRecord]) -> None:
        for name, replica in now.items():
            past = self._others.get(name)
            if past is None or past.instance != replica.instance:
                self._emit(
                    "replica.joined", name, f"the control plane {name} has joined, at {replica.address}"
                )
        for name in self._others.keys() - now.keys():
            self._emit("replica.left", name, f"the control plane {name} has left or lost its lease")

    def _check_conflict(self, registered_record: ReplicaRecord | None) -> None:
        if registered_record is None:
            self._registered_lease = None  # our lease expired, or someone deleted the key
            self.request_registration()
            return
        # Until this process has registered, the record may be from its predecessor.
        conflicting = (
            registered_record.instance
            if self._registered_lease is not None and registered_record.instance != self._own_record.instance
            else ""
        )
        if conflicting and conflicting != self._conflicting_instance:
            self._emit(
                "replica.duplicate",
                self._own_record.name,
                f"another control plane, at {registered_record.address}, is also registered as"
                f" {self._own_record.name}; give each control plane its own replicas.name",
            )
        self._conflicting_instance = conflicting
