"""In which term a control plane may act: that of the lease that it has, as long as this surely holds."""

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
class Held:
    """A lease."""

    id: int | None = 0xA
    is_valid: bool = True


class Heard:
    """What is in PD, as it is known here; and, as a store, the plan of the former leader there."""

    is_readable = True

    def __init__(self) -> None:
        self.is_current = True
        self.entries = {KEYS.leader: Entry(encode_leader("us", 0xA, 0.0), 7)}

    async def refresh(self, entries: object) -> LoadedState:
        return LoadedState(Versioned(Intents()), SavedPlan(Plan(), term=7, serial=1))


class Helm:
    """Keeps what it is told to do."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def become_leader(self, term: int, saved: object) -> None:
        self.told.append(f"lead in {term}")

    def become_follower(self) -> None:
        self.told.append("stand by")

    def adopt_plan(self, saved: SavedPlan, term: int) -> None:
        self.told.append(f"follow in {term}")

    def become_standalone(self) -> None:
        self.told.append("decide alone")


class Rig:
    """A control plane that leads in term 7 by the lease a."""

    def __init__(self) -> None:
        self.lease, self.heard, self.helm = Held(), Heard(), Helm()
        unused: Any = None
        self.succession = LeaderElection(
            "us",
            unused,
            KEYS,
            self.heard,  # type: ignore[arg-type]
            self.lease,  # type: ignore[arg-type]
            self.heard,  # type: ignore[arg-type]
            self.helm,
            clock=lambda: 0.0,
            boottime_clock=lambda: 0.0,
            lease_seconds=5,
            on_shared_state_changed=lambda _: None,
            emit=lambda *_: None,
            leader_changes=Counter("changes", "", registry=CollectorRegistry()),
        )

    async def step(self) -> tuple[int | None, int | None]:
        """The term in which it may act, and that in which it may write."""
        await self.succession._step()
        return self.terms

    @property
    def terms(self) -> tuple[int | None, int | None]:
        return self.succession.term, self.succession.fenced_term


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    assert await rig.step() == (7, 7)
    return rig


async def test_nothing_is_begun_when_the_lease_may_be_over(rig: Rig) -> None:
    rig.lease.is_valid = False
    assert rig.terms == (None, 7)
    assert await rig.step() == (None, None)
    assert rig.helm.told == ["lead in 7", "decide alone"]
    rig.lease.is_valid = True
    assert await rig.step() == (7, 7)
    assert rig.helm.told[2:] == ["lead in 7"]


async def test_a_new_lease_is_not_that_of_an_old_term(rig: Rig) -> None:
    rig.lease.id = 0xB  # had before anybody looked at who leads now
    assert rig.terms == (None, 7)


async def test_who_has_led_does_not_follow_itself(rig: Rig) -> None:
    """The new lease is there before it is heard that the old one has ended."""
    rig.lease.is_valid = False
    await rig.step()
    rig.lease.id, rig.lease.is_valid = 0xB, True
    assert await rig.step() == (None, None)
    rig.heard.entries = {}
    assert await rig.step() == (None, None)
    assert rig.helm.told == ["lead in 7", "decide alone"]
    rig.heard.entries = {KEYS.leader: Entry(encode_leader("other", 0xC, 0.0), 9)}
    assert await rig.step() == (None, None)
    assert rig.helm.told[2:] == ["stand by", "follow in 9"]
