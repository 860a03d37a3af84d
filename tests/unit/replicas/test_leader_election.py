"""A control plane acts only in the term of its own lease, and only while that lease is certainly valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.etcd.types import Entry
from controlplane.model.intents import Intents
from controlplane.model.plan import Plan
from controlplane.replicas.leader_election import LeaderElection
from controlplane.storage.etcd_keys import EtcdKeys, encode_leader
from controlplane.storage.store import LoadedState, SavedPlan, Versioned

KEYS = EtcdKeys("/tidevoy/")


@dataclass
class FakeLease:
    """A lease whose state the test sets."""

    id: int | None = 0xA
    is_valid: bool = True


class FakeMirror:
    """The mirror of etcd, and a store with the plan of the previous leader."""

    is_readable = True

    def __init__(self) -> None:
        self.is_current = True
        self.entries = {KEYS.leader: Entry(encode_leader("us", 0xA, 0.0), 7)}

    async def refresh(self, entries: object) -> LoadedState:
        return LoadedState(Versioned(Intents()), SavedPlan(Plan(), term=7, serial=1))


class RecordingDecider:
    """Records the role changes."""

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


class ElectionRig:
    """A control plane that leads in term 7 with the lease 0xA."""

    def __init__(self) -> None:
        self.lease, self.mirror, self.decider = FakeLease(), FakeMirror(), RecordingDecider()
        unused: Any = None
        self.election = LeaderElection(
            "us",
            unused,
            KEYS,
            self.mirror,  # type: ignore[arg-type]
            self.lease,  # type: ignore[arg-type]
            self.mirror,  # type: ignore[arg-type]
            self.decider,
            clock=lambda: 0.0,
            boottime_clock=lambda: 0.0,
            lease_seconds=5,
            on_shared_state_changed=lambda _: None,
            emit=lambda *_: None,
            leader_changes=Counter("changes", "", registry=CollectorRegistry()),
        )

    async def step(self) -> tuple[int | None, int | None]:
        """Run one step; return the term for decisions and the term for writes."""
        await self.election._step()
        return self.terms

    @property
    def terms(self) -> tuple[int | None, int | None]:
        return self.election.term, self.election.fenced_term


@pytest.fixture
async def rig() -> ElectionRig:
    rig = ElectionRig()
    assert await rig.step() == (7, 7)
    return rig


async def test_replica_stops_leading_when_its_lease_may_have_expired(rig: ElectionRig) -> None:
    rig.lease.is_valid = False
    assert rig.terms == (None, 7)
    assert await rig.step() == (None, None)
    assert rig.decider.calls == ["lead in 7", "standalone"]
    rig.lease.is_valid = True
    assert await rig.step() == (7, 7)
    assert rig.decider.calls[2:] == ["lead in 7"]


async def test_new_lease_does_not_continue_the_old_term(rig: ElectionRig) -> None:
    rig.lease.id = 0xB  # granted before the next step
    assert rig.terms == (None, 7)


async def test_former_leader_does_not_follow_its_own_old_term(rig: ElectionRig) -> None:
    """The new lease is granted before the mirror shows the end of the old one."""
    rig.lease.is_valid = False
    await rig.step()
    rig.lease.id, rig.lease.is_valid = 0xB, True
    assert await rig.step() == (None, None)
    rig.mirror.entries = {}
    assert await rig.step() == (None, None)
    assert rig.decider.calls == ["lead in 7", "standalone"]
    rig.mirror.entries = {KEYS.leader: Entry(encode_leader("other", 0xC, 0.0), 9)}
    assert await rig.step() == (None, None)
    assert rig.decider.calls[2:] == ["follow", "adopt in 9"]
