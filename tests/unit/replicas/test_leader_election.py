"""A control plane acts only in the term of its own lease, and only while that lease is certainly valid."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.etcd.types import Entry
from controlplane.model.intents import Intents
from controlplane.model.plan import Plan
from controlplane.replicas.leader_election import LeaderElection
from controlplane.storage.etcd_keys import EtcdKeys, LeaderRecord
from controlplane.storage.store import LoadedState, SavedPlan, Versioned

KEYS = EtcdKeys("/tidevoy/")


@dataclass
class FakeLease:
    """A lease whose state the test sets."""

    id: int | None = 0xA
    is_valid: bool = True
    ttl_seconds: int = 5

    def clock(self) -> float:
        return 0.0


class FakeStore:
    """A store with a plan of term 7; it is also its own mirror of etcd."""

    is_readable = True
    keys = KEYS

    def __init__(self) -> None:
        self.mirror = self
        self.is_current = True
        self.entries = {KEYS.leader: Entry(LeaderRecord(name="us", lease="a").encode(), 7)}

    async def refresh(self, entries: object) -> LoadedState:
        return LoadedState(Versioned(Intents()), SavedPlan(Plan(), term=7, serial=1))


class RecordingRoleListener:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def become_leader(self, term: int, saved: object) -> None:
        self.calls.append(f"lead in {term}")

    def become_follower(self) -> None:
        self.calls.append("follow")

    def adopt_plan(self, saved: SavedPlan, term: int) -> None:
        self.calls.append(f"adopt in {term}")

    def become_standalone(self) -> None:
        self.calls.append("standalone")


class ElectionTestBed:
    """A control plane that leads in term 7 with the lease 0xA."""

    def __init__(self) -> None:
        self.lease, self.store, self.role_listener = FakeLease(), FakeStore(), RecordingRoleListener()
        self.election = LeaderElection(
            "us",
            self.store,  # type: ignore[arg-type]
            self.lease,  # type: ignore[arg-type]
            self.role_listener,
            clock=lambda: 0.0,
            on_shared_state_changed=lambda _: None,
            emit=lambda *_: None,
            leader_changes=Counter("changes", "", registry=CollectorRegistry()),
        )

    async def step(self) -> tuple[int | None, int | None]:
        """Run one step; return the valid term and the term for writes."""
        await self.election._step()
        return self.terms

    @property
    def terms(self) -> tuple[int | None, int | None]:
        return self.election.valid_term, self.election.write_term


@pytest.fixture
async def election_test_bed() -> ElectionTestBed:
    election_test_bed = ElectionTestBed()
    assert await election_test_bed.step() == (7, 7)
    return election_test_bed


async def test_replica_stops_leading_when_its_lease_may_have_expired(
    election_test_bed: ElectionTestBed,
) -> None:
    election_test_bed.lease.is_valid = False
    assert election_test_bed.terms == (None, 7)
    assert await election_test_bed.step() == (None, None)
    assert election_test_bed.role_listener.calls == ["lead in 7", "standalone"]
    election_test_bed.lease.is_valid = True
    assert await election_test_bed.step() == (7, 7)
    assert election_test_bed.role_listener.calls[2:] == ["lead in 7"]


async def test_new_lease_does_not_continue_the_old_term(election_test_bed: ElectionTestBed) -> None:
    election_test_bed.lease.id = 0xB  # a new lease is granted before the next step
    assert election_test_bed.terms == (None, 7)


async def test_former_leader_does_not_follow_its_own_old_term(election_test_bed: ElectionTestBed) -> None:
    """The replica gets a new lease while the mirror still shows the leader record with its old lease."""
    election_test_bed.lease.is_valid = False
    await election_test_bed.step()
    election_test_bed.lease.id, election_test_bed.lease.is_valid = 0xB, True
    assert await election_test_bed.step() == (None, None)
    election_test_bed.store.entries = {}
    assert await election_test_bed.step() == (None, None)
    assert election_test_bed.role_listener.calls == ["lead in 7", "standalone"]
    election_test_bed.store.entries = {KEYS.leader: Entry(LeaderRecord(name="other", lease="c").encode(), 9)}
    assert await election_test_bed.step() == (None, None)
    assert election_test_bed.role_listener.calls[2:] == ["follow", "adopt in 9"]
