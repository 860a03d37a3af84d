"""What operators ask for: each step alone, repeated, and in any order."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.intents import changes as intent_changes
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline

A, B = "tidb-0:4000", "tidb-1:4000"
ADDRESSES = st.sampled_from([A, B, "[fd00::1]:4000"])
TIMES = st.floats(0, 1e10)
LABELS = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)


def test_a_node_is_added_with_all_that_was_said() -> None:
    intents = intent_changes.add(Intents(), A, status_address="tidb-0:10080", weight=5, labels={"zone": "a"})
    assert intents.added == {A: AddedNode(A, "tidb-0:10080", 5, {"zone": "a"})}


def test_a_node_that_is_added_begins_anew() -> None:
    old = intent_changes.update(Intents(), A, weight=7, labels={"zone": "b"})
    old = intent_changes.drain(intent_changes.remove(old, A, 1.0), A, 1.0, 600.0)
    assert intent_changes.add(old, A) == Intents(added={A: AddedNode(A)})


def test_a_node_of_others_comes_back_without_being_added() -> None:
    old = intent_changes.drain(intent_changes.remove(Intents(), A, 1.0), A, 1.0, 600.0)
    assert intent_changes.restore(old, A, weight=3) == Intents(weights={A: 3})


def test_the_first_removal_counts() -> None:
    once = intent_changes.remove(Intents(), A, 1.0)
    assert intent_changes.remove(once, A, 2.0) is once
    assert once.removed == {A: 1.0}


def test_a_drain_repeated_changes_nothing() -> None:
    once = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(once, A, 2.0, 600.0) is once
    assert once.drains == {A: DrainIntent(1.0, 600.0, OnDeadline.KEEP)}


def test_another_deadline_counts_from_when_it_was_asked_for() -> None:
    once = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(once, A, 100.0, 60.0).drains == {A: DrainIntent(100.0, 60.0)}
    closing = intent_changes.drain(once, A, 100.0, 600.0, OnDeadline.CLOSE)
    assert closing.drains == {A: DrainIntent(100.0, 600.0, OnDeadline.CLOSE)}


def test_a_drain_is_taken_back() -> None:
    drained = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.undrain(drained, A) == Intents()
    assert intent_changes.undrain(Intents(), A) == Intents()


def test_what_is_not_named_is_not_amended() -> None:
    amended = intent_changes.update(Intents(), A, weight=5, labels={"zone": "a", "rack": "1"})
    assert intent_changes.update(amended, A) == amended
    assert intent_changes.update(amended, A, weight=6) == Intents(weights={A: 6}, labels=amended.labels)
    assert intent_changes.update(amended, A, labels={"zone": "b"}).labels == {A: {"zone": "b"}}
    assert intent_changes.update(amended, A, labels={}).labels == {A: {}}


def test_a_finished_removal_leaves_nothing() -> None:
    intents = intent_changes.update(intent_changes.add(Intents(), A), A, weight=5, labels={"zone": "a"})
    intents = intent_changes.remove(intent_changes.drain(intents, A, 1.0, 600.0), A, 2.0)
    assert intent_changes.forget(intents, A) == Intents()


def test_a_removal_stays_while_others_name_the_node() -> None:
    intents = intent_changes.remove(intent_changes.update(Intents(), A, weight=5), A, 2.0)
    assert intent_changes.forget(intents, A, has_other_source=True) == Intents(removed={A: 2.0})


def test_intents_do_not_hold_on_to_what_the_caller_may_change() -> None:
    labels = {"zone": "a"}
    intents = intent_changes.update(intent_changes.add(Intents(), A, labels=labels), A, labels=labels)
    labels["zone"] = "b"
    assert intents.added[A].labels == intents.labels[A] == {"zone": "a"}


@given(TIMES, st.floats(0, 1e6), st.sampled_from(OnDeadline))
def test_undrain_is_the_opposite_of_drain(at: float, deadline: float, end: OnDeadline) -> None:
    before = intent_changes.update(intent_changes.add(Intents(), B), B, weight=3)
    assert intent_changes.undrain(intent_changes.drain(before, A, at, deadline, end), A) == before


class Operators(RuleBasedStateMachine):
    """Any steps in any order: none touches another node, none changes what went before it."""

    def __init__(self) -> None:
        super().__init__()
        self.intents = Intents()

    def step(self, after: Intents, address: str) -> None:
        for part in fields(Intents):
            old = {key: value for key, value in getattr(self.intents, part.name).items() if key != address}
            new = {key: value for key, value in getattr(after, part.name).items() if key != address}
            assert old == new
        self.intents = after

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=LABELS)
    def add(self, address: str, weight: int | None, labels: dict[str, str]) -> None:
        self.step(intent_changes.add(self.intents, address, weight=weight, labels=labels), address)
        assert address in self.intents.added
        assert address not in self.intents.removed.keys() | self.intents.drains.keys()

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=st.none() | LABELS)
    def readmit(self, address: str, weight: int | None, labels: dict[str, str] | None) -> None:
        self.step(intent_changes.restore(self.intents, address, weight=weight, labels=labels), address)
        assert address not in self.intents.removed

    @rule(address=ADDRESSES, at=TIMES)
    def remove(self, address: str, at: float) -> None:
        self.step(intent_changes.remove(self.intents, address, at), address)
        assert address in self.intents.removed

    @rule(address=ADDRESSES, at=TIMES, deadline=st.floats(0, 1e6), end=st.sampled_from(OnDeadline))
    def drain(self, address: str, at: float, deadline: float, end: OnDeadline) -> None:
        self.step(intent_changes.drain(self.intents, address, at, deadline, end), address)
        assert self.intents.drains[address].deadline_seconds == deadline

    @rule(address=ADDRESSES)
    def undrain(self, address: str) -> None:
        self.step(intent_changes.undrain(self.intents, address), address)
        assert address not in self.intents.drains

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=st.none() | LABELS)
    def amend(self, address: str, weight: int | None, labels: dict[str, str] | None) -> None:
        self.step(intent_changes.update(self.intents, address, weight=weight, labels=labels), address)

    @rule(address=ADDRESSES, named=st.booleans())
    def forget(self, address: str, named: bool) -> None:
        before = self.intents
        self.step(intent_changes.forget(self.intents, address, has_other_source=named), address)
        kept = {address} & before.removed.keys() if named else set()
        assert {address} & self.intents.removed.keys() == kept

    @invariant()
    def nothing_can_be_changed_in_place(self) -> None:
        assert all(isinstance(getattr(self.intents, part.name), MappingProxyType) for part in fields(Intents))


TestOperators = Operators.TestCase


def test_a_rollout_drains_what_nobody_has_drained_and_takes_back_its_own() -> None:
    ours = intent_changes.drain(Intents(), A, 1.0, 600.0, owner="r1")
    assert ours.drains == {A: DrainIntent(1.0, 600.0, OnDeadline.KEEP, "r1")}
    assert intent_changes.drain(ours, A, 2.0, 60.0, owner="r1") is ours
    assert intent_changes.undrain(ours, A, owner="r2") is ours
    assert intent_changes.undrain(ours, A, owner="r1") == intent_changes.undrain(ours, A) == Intents()
    asked = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(asked, A, 2.0, 60.0, owner="r1") is asked
    assert intent_changes.undrain(asked, A, owner="r1") is asked


def test_an_operator_takes_over_the_drain_of_a_rollout() -> None:
    ours = intent_changes.drain(Intents(), A, 1.0, 600.0, owner="r1")
    assert intent_changes.drain(ours, A, 5.0, 600.0).drains == {A: DrainIntent(5.0, 600.0)}
