"""Changes of intents: each alone, repeated, and in any order."""

from __future__ import annotations

from dataclasses import fields, replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.errors import CaptureRunning
from controlplane.intents import changes as intent_changes
from controlplane.model.capture import Capture
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.module_switches import SwitchOverrides

A, B = "tidb-0:4000", "tidb-1:4000"
ADDRESSES = st.sampled_from([A, B, "[fd00::1]:4000"])
TIMES = st.floats(0, 1e10)
LABELS = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)


def test_add_stores_all_parameters() -> None:
    intents = intent_changes.add(Intents(), A, status_address="tidb-0:10080", weight=5, labels={"zone": "a"})
    assert intents.added == {A: AddedNode(A, "tidb-0:10080", 5, {"zone": "a"})}


def test_add_drops_earlier_intents() -> None:
    old = intent_changes.update(Intents(), A, weight=7, labels={"zone": "b"})
    old = intent_changes.drain(intent_changes.remove(old, A, 1.0), A, 1.0, 600.0)
    assert intent_changes.add(old, A) == Intents(added={A: AddedNode(A)})


def test_restore_revokes_removal_and_drain() -> None:
    old = intent_changes.drain(intent_changes.remove(Intents(), A, 1.0), A, 1.0, 600.0)
    assert intent_changes.restore(old, A, weight=3) == Intents(weights={A: 3})


def test_repeated_removal_keeps_the_first_time() -> None:
    first = intent_changes.remove(Intents(), A, 1.0)
    assert intent_changes.remove(first, A, 2.0) is first
    assert first.removed == {A: 1.0}


def test_repeated_drain_changes_nothing() -> None:
    first = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(first, A, 2.0, 600.0) is first
    assert first.drains == {A: DrainIntent(1.0, 600.0, OnDeadline.KEEP)}


def test_changed_drain_deadline_counts_from_now() -> None:
    first = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(first, A, 100.0, 60.0).drains == {A: DrainIntent(100.0, 60.0)}
    terminating = intent_changes.drain(first, A, 100.0, 600.0, OnDeadline.CLOSE)
    assert terminating.drains == {A: DrainIntent(100.0, 600.0, OnDeadline.CLOSE)}


def test_undrain_revokes_the_drain() -> None:
    drained = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.undrain(drained, A) == Intents()
    assert intent_changes.undrain(Intents(), A) == Intents()


def test_update_leaves_none_values_unchanged() -> None:
    updated = intent_changes.update(Intents(), A, weight=5, labels={"zone": "a", "rack": "1"})
    assert intent_changes.update(updated, A) == updated
    assert intent_changes.update(updated, A, weight=6) == Intents(weights={A: 6}, labels=updated.labels)
    assert intent_changes.update(updated, A, labels={"zone": "b"}).labels == {A: {"zone": "b"}}
    assert intent_changes.update(updated, A, labels={}).labels == {A: {}}


def test_forget_drops_all_intents() -> None:
    intents = intent_changes.update(intent_changes.add(Intents(), A), A, weight=5, labels={"zone": "a"})
    intents = intent_changes.remove(intent_changes.drain(intents, A, 1.0, 600.0), A, 2.0)
    assert intent_changes.forget(intents, A) == Intents()


def test_forget_keeps_removal_if_another_source_has_the_node() -> None:
    intents = intent_changes.remove(intent_changes.update(Intents(), A, weight=5), A, 2.0)
    assert intent_changes.forget(intents, A, has_other_source=True) == Intents(removed={A: 2.0})


def test_intents_copy_the_labels_of_the_caller() -> None:
    labels = {"zone": "a"}
    intents = intent_changes.update(intent_changes.add(Intents(), A, labels=labels), A, labels=labels)
    labels["zone"] = "b"
    assert intents.added[A].labels == intents.labels[A] == {"zone": "a"}


@given(TIMES, st.floats(0, 1e6), st.sampled_from(OnDeadline))
def test_undrain_reverts_drain(at: float, deadline: float, end: OnDeadline) -> None:
    before = intent_changes.update(intent_changes.add(Intents(), B), B, weight=3)
    assert intent_changes.undrain(intent_changes.drain(before, A, at, deadline, end), A) == before


class Operators(RuleBasedStateMachine):
    """Any changes in any order: none affects another node or modifies earlier intents in place."""

    def __init__(self) -> None:
        super().__init__()
        self.intents = Intents()

    def apply(self, after: Intents, address: str) -> None:
        assert (after.rules, after.capture) == (self.intents.rules, self.intents.capture)
        for field in fields(Intents):
            if field.name in ("rules", "capture"):
                continue
            old = {key: value for key, value in getattr(self.intents, field.name).items() if key != address}
            new = {key: value for key, value in getattr(after, field.name).items() if key != address}
            assert old == new
        self.intents = after

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=LABELS)
    def add(self, address: str, weight: int | None, labels: dict[str, str]) -> None:
        self.apply(intent_changes.add(self.intents, address, weight=weight, labels=labels), address)
        assert address in self.intents.added
        assert address not in self.intents.removed.keys() | self.intents.drains.keys()

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=st.none() | LABELS)
    def restore(self, address: str, weight: int | None, labels: dict[str, str] | None) -> None:
        self.apply(intent_changes.restore(self.intents, address, weight=weight, labels=labels), address)
        assert address not in self.intents.removed

    @rule(address=ADDRESSES, at=TIMES)
    def remove(self, address: str, at: float) -> None:
        self.apply(intent_changes.remove(self.intents, address, at), address)
        assert address in self.intents.removed

    @rule(address=ADDRESSES, at=TIMES, deadline=st.floats(0, 1e6), end=st.sampled_from(OnDeadline))
    def drain(self, address: str, at: float, deadline: float, end: OnDeadline) -> None:
        self.apply(intent_changes.drain(self.intents, address, at, deadline, end), address)
        assert self.intents.drains[address].deadline_seconds == deadline

    @rule(address=ADDRESSES)
    def undrain(self, address: str) -> None:
        self.apply(intent_changes.undrain(self.intents, address), address)
        assert address not in self.intents.drains

    @rule(address=ADDRESSES, weight=st.none() | st.integers(1, 10), labels=st.none() | LABELS)
    def update(self, address: str, weight: int | None, labels: dict[str, str] | None) -> None:
        self.apply(intent_changes.update(self.intents, address, weight=weight, labels=labels), address)

    @rule(address=ADDRESSES, has_other_source=st.booleans())
    def forget(self, address: str, has_other_source: bool) -> None:
        before = self.intents
        self.apply(intent_changes.forget(self.intents, address, has_other_source=has_other_source), address)
        retained = {address} & before.removed.keys() if has_other_source else set()
        assert {address} & self.intents.removed.keys() == retained

    @invariant()
    def all_mappings_are_read_only(self) -> None:
        collections = {field.name: getattr(self.intents, field.name) for field in fields(Intents)}
        assert isinstance(collections.pop("rules"), tuple)
        assert collections.pop("capture") is None
        assert all(isinstance(collection, MappingProxyType) for collection in collections.values())


TestOperators = Operators.TestCase


def test_rollout_drains_undrained_nodes_and_revokes_its_own_drain() -> None:
    by_rollout = intent_changes.drain(Intents(), A, 1.0, 600.0, owner="r1")
    assert by_rollout.drains == {A: DrainIntent(1.0, 600.0, OnDeadline.KEEP, "r1")}
    assert intent_changes.drain(by_rollout, A, 2.0, 60.0, owner="r1") is by_rollout
    assert intent_changes.undrain(by_rollout, A, owner="r2") is by_rollout
    assert (
        intent_changes.undrain(by_rollout, A, owner="r1")
        == intent_changes.undrain(by_rollout, A)
        == Intents()
    )
    by_operator = intent_changes.drain(Intents(), A, 1.0, 600.0)
    assert intent_changes.drain(by_operator, A, 2.0, 60.0, owner="r1") is by_operator
    assert intent_changes.undrain(by_operator, A, owner="r1") is by_operator


def test_operator_takes_over_the_drain_of_a_rollout() -> None:
    by_rollout = intent_changes.drain(Intents(), A, 1.0, 600.0, owner="r1")
    assert intent_changes.drain(by_rollout, A, 5.0, 600.0).drains == {A: DrainIntent(5.0, 600.0)}


def test_switches_of_an_envoy_are_overridden_one_by_one() -> None:
    off = intent_changes.override_switches(Intents(), "one", {"offload": False})
    assert off.switch_overrides == {"one": SwitchOverrides(offload=False)}
    assert intent_changes.override_switches(off, "one", {}) == off
    both = intent_changes.override_switches(off, "one", {"migration": True})
    assert both.switch_overrides == {"one": SwitchOverrides(offload=False, migration=True)}
    none = {"offload": None, "migration": None}
    assert intent_changes.override_switches(both, "one", none) == Intents()
    assert intent_changes.override_switches(both, "two", none) == both
    assert intent_changes.forget_envoy(both, "one", 1.0, 600.0).switch_overrides == {}


def test_one_capture_runs_at_a_time_and_each_has_its_own_end() -> None:
    first = Capture("one", 1.0, 61.0, ("e1",), ("app",))
    running = intent_changes.start_capture(Intents(), first)
    assert running.capture == first
    with pytest.raises(CaptureRunning, match="the capture one is running"):
        intent_changes.start_capture(running, Capture("two", 60.9, 70.0))
    stopped = intent_changes.stop_capture(running, 5.0)
    assert stopped.capture == replace(first, stopped_at=5.0)
    assert intent_changes.stop_capture(stopped, 6.0) is stopped
    assert intent_changes.stop_capture(running, 61.0) is running  # it has ended by itself
    assert intent_changes.stop_capture(Intents(), 1.0) == Intents()
    again = intent_changes.start_capture(stopped, Capture("one", 6.0, 61.0))
    assert again.capture == Capture("one", 6.0, 61.001)
    assert intent_changes.start_capture(running, Capture("two", 61.0, 62.0)).capture is not None
