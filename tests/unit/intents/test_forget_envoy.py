"""Envoys that an operator has forgotten: facts about such an Envoy are ignored until it is seen again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.views import envoy_views
from controlplane.events.event_messages import intent_events
from controlplane.intents import changes as intent_changes
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad
from controlplane.model.intents import Intents
from controlplane.model.plan import Policy
from controlplane.observe.fact_store import FactStore
from controlplane.storage.restored_state import clamp_intent_times
from tests.support.controlplane.running_xds import RecordedEvents

NODE = "10.0.0.1:4000"
RETENTION = 600.0
CONNECTED = EnvoyStatus(
    id="a",
    address="10.0.0.5",
    version="1.40.0",
    filter="module",
    group="",
    zone="",
    module_version="",
    problem="",
    connected_since=1.0,
    last_seen=100.0,
    acked_version="v",
    published_version="v",
    has_acknowledged_endpoints=True,
    streams=1,
    stale_resources=(),
    stale_settings=(),
    last_nack=None,
    nacks=0,
)
DISCONNECTED = replace(CONNECTED, connected_since=None, streams=0)


def store_with(status: EnvoyStatus, ended: dict[str, float], now: float = 101.0) -> FactStore:
    """Return a store that has received a session report of Envoy `a` at 100 s, and its status at `now`."""
    store = FactStore(RecordedEvents(), Policy())
    store.put_load(EnvoyLoad("a", 100.0, {NODE: 1}))
    store.put_fleet([status], now, RETENTION, ended_envoys=ended)
    return store


def test_ended_envoy_is_not_awaited() -> None:
    awaited = store_with(DISCONNECTED, {}).view()
    assert (awaited.sessions_by_endpoint, set(awaited.envoys_last_seen), awaited.unsynced_envoys) == (
        {NODE: 1},
        {"a"},
        {"a"},
    )
    ended = store_with(DISCONNECTED, {"a": 100.5}).view()
    assert (ended.sessions_by_endpoint, set(ended.envoys_last_seen), ended.unsynced_envoys) == (
        {},
        set(),
        set(),
    )


def test_envoy_seen_after_its_end_counts_again() -> None:
    for status, ended in ((DISCONNECTED, 99.0), (CONNECTED, 100.5)):
        facts = store_with(status, {"a": ended}).view()
        assert (facts.sessions_by_endpoint, set(facts.envoys_last_seen)) == ({NODE: 1}, {"a"})


def test_ended_envoy_has_no_view() -> None:
    facts = FactStore(RecordedEvents(), Policy()).view()
    assert [view.status.id for view in envoy_views([DISCONNECTED], facts)] == ["a"]
    assert envoy_views([DISCONNECTED], facts, Intents(ended_envoys={"a": 100.0})) == []
    assert len(envoy_views([DISCONNECTED], facts, Intents(ended_envoys={"a": 99.0}))) == 1
    assert len(envoy_views([CONNECTED], facts, Intents(ended_envoys={"a": 500.0}))) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5000)), max_size=20))
def test_ended_envoys_are_dropped_after_retention(ended: list[tuple[str, float]]) -> None:
    intents = Intents()
    for envoy, at in sorted(ended, key=lambda entry: entry[1]):
        intents = intent_changes.forget_envoy(intents, envoy, at, RETENTION)
        assert intents.ended_envoys[envoy] == at
        assert all(at - ended_at <= RETENTION for ended_at in intents.ended_envoys.values())


def test_ended_envoy_survives_other_changes_with_one_event() -> None:
    ended = intent_changes.forget_envoy(Intents(), "a", 100.0, RETENTION)
    assert intent_changes.forget(ended, NODE).ended_envoys == {"a": 100.0}
    assert [event.kind for event in intent_events(Intents(), ended)] == ["intent.envoy_ended"]
    drained = intent_changes.drain(ended, NODE, 1.0, 1.0)
    assert [event.kind for event in intent_events(ended, drained)] == ["intent.drain"]
    assert clamp_intent_times(ended, 50.0).ended_envoys == {"a": 50.0}
