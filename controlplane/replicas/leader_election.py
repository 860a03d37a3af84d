"""Leader election in PD's etcd, and the role changes that follow from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog
from prometheus_client import Counter

from controlplane.errors import LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from controlplane.replicas.lease import Lease
from controlplane.replicas.role import ElectionView, Role, decide_role
from controlplane.storage.etcd_keys import EtcdKeys, LeaderRecord, decode_leader, encode_leader
from controlplane.storage.etcd_mirror import EtcdMirror
from controlplane.storage.etcd_store import EtcdStore
from controlplane.storage.store import LoadedState, SavedPlan

log = structlog.get_logger("tidevoy.replicas")

_CHECK_INTERVAL_SECONDS = 0.25  # polled, because no event announces that a lease has expired
_CAMPAIGN_RETRY_SECONDS = 0.5
_WRITE_TIMEOUT_SECONDS = 2.0


class Decider(Protocol):
    """The planner of this replica."""

    def become_leader(self, term: int, saved: SavedPlan | None) -> None: ...

    def become_follower(self) -> None: ...

    def adopt_plan(self, saved: SavedPlan, term: int) -> None: ...

    def become_standalone(self) -> None: ...


class LeaderElection:
    """Campaigns whenever there is no leader; the `Leadership` of this control plane."""

    def __init__(
        self,
        name: str,
        client: EtcdClient,
        keys: EtcdKeys,
        mirror: EtcdMirror,
        lease: Lease,
        store: EtcdStore,
        decider: Decider,
        *,
        clock: Callable[[], float],
        boottime_clock: Callable[[], float],
        lease_seconds: int,
        on_shared_state_changed: Callable[[LoadedState], None],
        emit: Callable[..., None],
        leader_changes: Counter,
    ) -> None:
        """`clock` returns Unix seconds; `boottime_clock` times leases, which last `lease_seconds`.

        `on_shared_state_changed` gets the shared state whenever it may have changed.
        """
        self._name = name
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._lease = lease
        self._store = store
        self._decider = decider
        self._clock, self._boottime_clock = clock, boottime_clock
        self._lease_seconds = lease_seconds
        self._on_shared_state_changed = on_shared_state_changed
        self._emit = emit
        self._leader_changes = leader_changes
        self._wake = asyncio.Event()
        self._campaign_due = asyncio.Event()  # set when a campaign may be possible
        self._role = Role.FOLLOWER
        self._term: int | None = None
        self._last_led_term: int | None = None  # the last term in which this replica led
        self._leader_last_seen = boottime_clock()
        self._loaded: LoadedState | None = None
        self._reported_load_errors: frozenset[str] = frozenset()  # load errors that were emitted
        self.leader: LeaderRecord | None = None

    @property
    def role(self) -> Role:
        """The current role."""
        return self._role

    @property
    def term(self) -> int | None:
        """The term in which this replica leads, while its lease is certainly valid; else None."""
        ours = self.leader is not None and self._is_own_record(self.leader)
        return self._term if ours and self._lease.is_valid else None

    @property
    def fenced_term(self) -> int | None:
        """The term of our decisions. PD rejects a write if this replica no longer leads in it."""
        return self._term

    def wake(self) -> None:
        """Run a step soon: the mirror or the lease has changed."""
        self._wake.set()
        self._campaign_due.set()

    async def run(self) -> None:
        """Campaign, lead and follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._campaign())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_INTERVAL_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
                await self._step()

    def resign(self) -> None:
        """Stop leading."""
        self._term = None

    async def _step(self) -> None:
        # Earlier leaders wrote everything before the key that makes us the leader, so the state applied here
        # is complete before anyone reads our term.
        entries = self._mirror.entries
        is_current = self._mirror.is_current
        loaded = await self._store.refresh(entries)
        if loaded is not self._loaded:
            self._loaded = loaded
            self._report_load_errors(loaded)
            self._on_shared_state_changed(loaded)
        self._observe_leader(decode_leader(entries.get(self._keys.leader)))
        view = self._election_view(is_current)
        before, self._role = self._role, decide_role(view, self._boottime_clock(), self._lease_seconds)
        if self._role is Role.LEADER:
            assert self.leader is not None
            if self._term != self.leader.term:
                self._decider.become_leader(self.leader.term, loaded.plan)
                self._term = self._last_led_term = self.leader.term
            return
        self._term = None
        if self._role is Role.STANDALONE:
            if before is not Role.STANDALONE:
                self._report_standalone()
                self._decider.become_standalone()
            return
        if before is not Role.FOLLOWER:
            self._decider.become_follower()
        if loaded.plan is not None and self.leader is not None and self._store.is_readable:
            self._decider.adopt_plan(loaded.plan, self.leader.term)

    def _report_standalone(self) -> None:
        cause = "no leader is known" if self._store.is_readable else "the shared state cannot be read"
        self._emit(
            "replica.standalone", self._name, f"{cause}, so this control plane decides for its own Envoys"
        )

    def _election_view(self, is_current: bool) -> ElectionView:
        ours = self.leader is not None and self._is_own_record(self.leader)
        # Our own ended term does not count, although a lagging mirror may still show it: following its plan
        # would revert later decisions.
        has_other_leader = (
            self.leader is not None and not ours and is_current and self.leader.term != self._last_led_term
        )
        if has_other_leader:
            self._leader_last_seen = self._boottime_clock()
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
                self._emit("state.load_failed", self._keys.prefix, error)
        self._reported_load_errors = frozenset(loaded.load_errors)

    async def _campaign(self) -> None:
        """Become the leader when there is none. The mirror shows the success."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CAMPAIGN_RETRY_SECONDS):
                    await self._campaign_due.wait()
            self._campaign_due.clear()
            if self._can_campaign():
                await self._campaign_once()

    def _can_campaign(self) -> bool:
        return (
            self._lease.is_valid
            and self._mirror.is_current
            and self._keys.leader not in self._mirror.entries
            and self._store.is_readable
        )

    async def _campaign_once(self) -> None:
        lease = self._lease.id
        assert lease is not None
        try:
            await self._client.txn(
                {self._keys.leader: 0},
                puts={self._keys.leader: encode_leader(self._name, lease, self._clock())},
                lease=lease,
                within=_WRITE_TIMEOUT_SECONDS,
            )
        except LeaseLost:
            self._lease.expire()
        except PdError as error:
            log.info("could not campaign for leader", error=str(error))
