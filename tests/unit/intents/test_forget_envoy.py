"""Envoys of which an operator says that they have ended: nobody waits for them, unless they are back."""

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
from controlplane.observe.fact_store import FactStore
from controlplane.storage.clamp_timestamps import clamp_intent_times

NODE = "10.0.0.1:4000"
MEMORY = 600.0
THERE = EnvoyStatus(
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
    eds_acked=True,
    streams=1,
    stale_resources=(),
    last_nack=None,
    nacks=0,
)
AWAY = replace(THERE, connected_since=None, streams=0)


def known(status: EnvoyStatus, ended: dict[str, float], now: float = 101.0) -> FactStore:
    """An Envoy with a session on the node, as of 100 s, looked at a second later."""
    store = FactStore()
    store.put_load(EnvoyLoad("a", 100.0, {NODE: 1}), ())
    store.put_fleet([status], now, MEMORY, ended_envoys=ended)
    return store


def test_one_that_has_ended_is_not_waited_for() -> None:
    waited = known(AWAY, {}).view()
    assert (waited.sessions_by_endpoint, set(waited.envoys_last_seen), waited.unsynced_envoys) == (
        {NODE: 1},
        {"a"},
        {"a"},
    )
    ended = known(AWAY, {"a": 100.5}).view()
    assert (ended.sessions_by_endpoint, set(ended.envoys_last_seen), ended.unsynced_envoys) == (
        {},
        set(),
        set(),
    )


def test_one_that_was_seen_since_is_back() -> None:
    for status, ended in ((AWAY, 99.0), (THERE, 100.5)):
        facts = known(status, {"a": ended}).view()
        assert (facts.sessions_by_endpoint, set(facts.envoys_last_seen)) == ({NODE: 1}, {"a"})


def test_one_that_has_ended_is_not_shown() -> None:
    facts = FactStore().view()
    assert [view.status.id for view in envoy_views([AWAY], facts)] == ["a"]
    assert envoy_views([AWAY], facts, {"a": 100.0}) == []
    assert len(envoy_views([AWAY], facts, {"a": 99.0})) == 1
    assert len(envoy_views([THERE], facts, {"a": 500.0})) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5000)), max_size=20))
def test_what_is_kept_of_them_does_not_grow(said: list[tuple[str, float]]) -> None:
    intents = Intents()
    for envoy, at in sorted(said, key=lambda each: each[1]):
        intents = intent_changes.forget_envoy(intents, envoy, at, MEMORY)
        assert intents.ended_envoys[envoy] == at
        assert all(at - since <= MEMORY for since in intents.ended_envoys.values())


def test_it_outlives_other_wishes_and_is_told_once() -> None:
    ended = intent_changes.forget_envoy(Intents(), "a", 100.0, MEMORY)
    assert intent_changes.forget(ended, NODE).ended_envoys == {"a": 100.0}
    assert [told.kind for told in intent_events(Intents(), ended)] == ["intent.envoy_ended"]
    drained = intent_changes.drain(ended, NODE, 1.0, 1.0)
    assert [told.kind for told in intent_events(ended, drained)] == ["intent.drain"]
    assert clamp_intent_times(ended, 50.0).ended_envoys == {"a": 50.0}
