"""Leader election in PD's etcd, and the role changes that follow from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog
from prometheus_client import Counter

from controlplane.aio import wait_at_most
from controlplane.clock import Clock
from controlplane.errors import LeaseLost, PdError
from controlplane.replicas.lease import Lease
from controlplane.storage.etcd_keys import LeaderRecord, decode_leader
from controlplane.storage.etcd_store import EtcdStore
from controlplane.storage.store import LoadedState, SavedPlan

log = structlog.get_logger("tidevoy.replicas")

_CHECK_INTERVAL_SECONDS = 0.25  # polled, because no event announces that a lease has expired
_CAMPAIGN_RETRY_SECONDS = 0.5
_WRITE_TIMEOUT_SECONDS = 2.0
# After this many lease durations without a known leader, each replica decides for its own Envoys.
_STANDALONE_AFTER_LEASES = 3.0


class Role(StrEnum):
    """Which replica decides for our Envoys."""

    LEADER = "leader"  # this replica decides, for all replicas
    FOLLOWER = "follower"  # another replica decides and we publish its plan, or an election is in progress
    STANDALONE = "standalone"  # no leader is reachable: this replica decides for its own Envoys only


@dataclass(frozen=True, slots=True)
class ElectionView:
    """What a control plane knows about the leader."""

    is_leader_record_ours: bool = False  # the leader record in PD is ours
    has_valid_lease: bool = False  # our lease has certainly not expired
    has_other_leader: bool = False  # another replica leads in PD, and our mirror of PD is current
    # When another replica was last seen as leader; initially our start time; -inf after this replica led.
    leader_last_seen: float = 0.0
    is_plan_readable: bool = True  # this version can read the plan in PD


def decide_role(view: ElectionView, now: float, lease_seconds: float) -> Role:
    """Return the role to take now.

    A leader whose lease has expired becomes standalone at once, so that its Envoys still learn of failed
    nodes. A follower first waits for the next leader, so that plans do not diverge at every leader change.
    """
    if view.is_leader_record_ours and view.has_valid_lease:
        return Role.LEADER
    if not view.is_plan_readable:
        return Role.STANDALONE
    if view.has_other_leader or now - view.leader_last_seen < _STANDALONE_AFTER_LEASES * lease_seconds:
        return Role.FOLLOWER
    return Role.STANDALONE


class RoleListener(Protocol):
    """The planner, which follows or decides, depending on the role of this replica."""

    def become_leader(self, term: int, saved: SavedPlan | None) -> None: ...

    def become_follower(self) -> None: ...

    def adopt_plan(self, saved: SavedPlan, term: int) -> None: ...

    def become_standalone(self) -> None: ...


class LeaderElection:
    """Campaigns when there is no leader, and takes the role that follows from the leader record."""

    def __init__(
        self,
        name: str,
        store: EtcdStore,
        lease: Lease,
        role_listener: RoleListener,
        *,
        clock: Clock,
        on_shared_state_changed: Callable[[LoadedState], None],
        emit: Callable[..., None],
        leader_changes: Counter,
    ) -> None:
        """`on_shared_state_changed` gets the shared state whenever it may have changed."""
        self._name = name
        self._store = store
        self._lease = lease
        self._role_listener = role_listener
        self._clock = clock
        self._on_shared_state_changed = on_shared_state_changed
        self._emit = emit
        self._leader_changes = leader_changes
        self._wake = asyncio.Event()
        self._campaign_due = asyncio.Event()  # set when a campaign may be possible
        self._role = Role.FOLLOWER
        self._term: int | None = None
        self._last_led_term: int | None = None  # the last term in which this replica led
        self._leader_last_seen = lease.clock()
        self._loaded: LoadedState | None = None
        self._reported_load_errors: frozenset[str] = frozenset()  # load errors that were emitted
        self.leader: LeaderRecord | None = None

    @property
    def valid_term(self) -> int | None:
        """The term in which this replica leads, while its lease is certainly valid; else None."""
        ours = self.leader is not None and self._is_own_record(self.leader)
        return self._term if ours and self._lease.is_valid else None

    @property
    def write_term(self) -> int | None:
        """The term for writes: PD rejects a write if this replica no longer leads in this term."""
        return self._term

    def wake(self) -> None:
        """Run a step soon: the lease or the mirror (our copy of the keys in PD) has changed."""
        self._wake.set()
        self._campaign_due.set()

    async def run(self) -> None:
        """Campaign, lead and follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._campaign())
            while True:
                await wait_at_most(self._wake, _CHECK_INTERVAL_SECONDS)
                self._wake.clear()
                await self._step()

    def resign(self) -> None:
        self._term = None

    async def _step(self) -> None:
        # Earlier leaders wrote all state before PD created our leader key, so this step applies all of it
        # before it sets our term.
        entries = self._store.mirror.entries
        is_current = self._store.mirror.is_current
        loaded = await self._store.refresh(entries)
        if loaded is not self._loaded:
            self._loaded = loaded
            self._report_load_errors(loaded)
            self._on_shared_state_changed(loaded)
        self._observe_leader(decode_leader(entries.get(self._store.keys.leader)))
        view = self._election_view(is_current)
        before, self._role = self._role, decide_role(view, self._lease.clock(), self._lease.ttl_seconds)
        if self._role is Role.LEADER:
            assert self.leader is not None
            if self._term != self.leader.term:
                self._role_listener.become_leader(self.leader.term, loaded.plan)
                self._term = self._last_led_term = self.leader.term
            return
        self._term = None
        if self._role is Role.STANDALONE:
            if before is not Role.STANDALONE:
                self._report_standalone()
                self._role_listener.become_standalone()
            return
        if before is not Role.FOLLOWER:
            self._role_listener.become_follower()
        if loaded.plan is not None and self.leader is not None and self._store.is_readable:
            self._role_listener.adopt_plan(loaded.plan, self.leader.term)

    def _report_standalone(self) -> None:
        cause = "no leader is known" if self._store.is_readable else "the shared state cannot be read"
        self._emit(
            "replica.standalone", self._name, f"{cause}, so this control plane decides for its own Envoys"
        )

    def _election_view(self, is_current: bool) -> ElectionView:
        ours = self.leader is not None and self._is_own_record(self.leader)
        # A lagging mirror may still show our own ended term. That term does not count as another leader's,
        # because its plan would revert our later decisions.
        has_other_leader = (
            self.leader is not None and not ours and is_current and self.leader.term != self._last_led_term
        )
        if has_other_leader:
            self._leader_last_seen = self._lease.clock()
        elif ours:
            self._leader_last_seen = float("-inf")
        return ElectionView(
            ours, self._lease.is_valid, has_other_leader, self._leader_last_seen, self._store.is_readable
        )

    def _is_own_record(self, record: LeaderRecord) -> bool:
        return self._lease.id is not None and record.lease == f"{self._lease.id:x}"

    def _observe_leader(self, now: LeaderRecord | None) -> None:
        before, self.leader = self.leader, now
        if now is not None and (before is None or before.term != now.term):
            self._leader_changes.inc()
            leader = "this control plane" if self._is_own_record(now) else f"the control plane {now.name}"
            self._emit(
                "replica.leader_elected",
                now.name,
                f"{leader} now leads, in term {now.term}",
                {"term": now.term},
            )

    def _report_load_errors(self, loaded: LoadedState) -> None:
        for error in loaded.load_errors:
            if error not in self._reported_load_errors:
                self._emit("state.load_failed", self._store.keys.prefix, error)
        self._reported_load_errors = frozenset(loaded.load_errors)

    async def _campaign(self) -> None:
        """Try to become the leader when there is none. The mirror shows whether a campaign succeeded."""
        while True:
            await wait_at_most(self._campaign_due, _CAMPAIGN_RETRY_SECONDS)
            self._campaign_due.clear()
            if self._can_campaign():
                await self._campaign_once()

    def _can_campaign(self) -> bool:
        return (
            self._lease.is_valid
            and self._store.mirror.is_current
            and self._store.keys.leader not in self._store.mirror.entries
            and self._store.is_readable
        )

    async def _campaign_once(self) -> None:
        lease, key = self._lease.id, self._store.keys.leader
        assert lease is not None
        record = LeaderRecord(name=self._name, lease=f"{lease:x}", since=self._clock()).encode()
        try:
            await self._store.client.txn(
                {key: 0}, puts={key: record}, lease=lease, within=_WRITE_TIMEOUT_SECONDS
            )
        except LeaseLost:
            self._lease.expire()
        except PdError as error:
            log.info("could not campaign for leader", error=str(error))
