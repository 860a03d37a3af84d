"""Registers this control plane in etcd and tracks the other registered control planes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from controlplane.aio import wait_at_most
from controlplane.errors import LeaseLost, PdError
from controlplane.replicas.lease import Lease
from controlplane.storage.etcd_keys import LeaderRecord, ReplicaRecord, decode_replicas
from controlplane.storage.etcd_store import EtcdStore

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
    unreachable: str = ""  # why it does not report its Envoys, as a clause; empty if it does


class Membership:
    """Keeps this control plane registered and reports when others join or leave."""

    def __init__(
        self,
        own_record: ReplicaRecord,
        store: EtcdStore,
        lease: Lease,
        *,
        on_change: Callable[[Mapping[str, str]], None],
        emit: Callable[..., None],
    ) -> None:
        """`on_change` gets the advertised addresses of the other replicas by name."""
        self._own_record = own_record
        self._store = store
        self._lease = lease
        self._on_change = on_change
        self._emit = emit
        self._other_replicas: dict[str, ReplicaRecord] = {}
        self._has_notified = False
        self._conflicting_instance = ""
        self._registration_due = asyncio.Event()
        self._registered_lease: int | None = None  # the lease with which we registered

    def request_registration(self) -> None:
        """Check soon whether this replica has to register again."""
        self._registration_due.set()

    async def run(self) -> None:
        """Keep this replica registered until cancelled."""
        while True:
            await wait_at_most(self._registration_due, _CHECK_INTERVAL_SECONDS)
            self._registration_due.clear()
            lease = self._lease.id
            if lease is None or not self._lease.is_valid or lease == self._registered_lease:
                continue
            try:
                key = self._store.keys.replica(self._own_record.name)
                await self._store.client.put(key, self._own_record.encode(), lease)
                self._registered_lease = lease
            except LeaseLost:
                self._lease.expire()
            except PdError as error:
                log.info("could not register", error=str(error))

    def update(self) -> None:
        """Apply our mirror of PD's keys. While it is outdated, missing replicas count as registered."""
        mirror = self._store.mirror
        registered = decode_replicas(mirror.entries, self._store.keys)
        if not mirror.is_current:
            registered = {**self._other_replicas, **registered}
        self._check_conflict(registered.pop(self._own_record.name, None))
        if mirror.is_current:
            self._report_changes(registered)
        if registered != self._other_replicas or not self._has_notified:
            self._has_notified = True
            self._other_replicas = registered
            self._on_change({name: replica.address for name, replica in registered.items()})

    def views(self, leader: LeaderRecord | None, unreachable: Mapping[str, str]) -> list[ReplicaView]:
        """Return all control planes including this one, sorted by name."""
        replicas = {**self._other_replicas, self._own_record.name: self._own_record}
        return [
            ReplicaView(
                name,
                replica.address,
                replica.version,
                replica.since,
                is_leader=leader is not None and leader.name == name,
                leader_since=leader.since if leader is not None and leader.name == name else None,
                is_self=replica is self._own_record,
                unreachable=unreachable.get(name, ""),
            )
            for name, replica in sorted(replicas.items())
        ]

    def _report_changes(self, now: Mapping[str, ReplicaRecord]) -> None:
        for name, replica in now.items():
            past = self._other_replicas.get(name)
            if past is None or past.instance != replica.instance:
                self._emit(
                    "replica.joined", name, f"the control plane {name} has joined, at {replica.address}"
                )
        for name in self._other_replicas.keys() - now.keys():
            self._emit("replica.left", name, f"the control plane {name} has left or lost its lease")

    def _check_conflict(self, registered_record: ReplicaRecord | None) -> None:
        if registered_record is None:
            self._registered_lease = None  # our lease expired, or someone deleted the key
            self.request_registration()
            return
        # Until this process has registered, the record may be from its previous run.
        conflicting = registered_record.instance if self._registered_lease is not None else ""
        if conflicting == self._own_record.instance:
            conflicting = ""
        if conflicting and conflicting != self._conflicting_instance:
            self._emit(
                "replica.duplicate",
                self._own_record.name,
                f"another control plane, at {registered_record.address}, is also registered as"
                f" {self._own_record.name}; give each control plane its own replicas.name",
            )
        self._conflicting_instance = conflicting
