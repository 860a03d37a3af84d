"""When a node surely has no session: an earlier zero, a late one, or a missing one must not count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide import session_counts
from controlplane.decide.session_counts import is_confirmed_empty, nodes_awaiting_empty, session_count
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.model.traffic import SessionCounts

ENDPOINT, OTHER = "10.0.0.1:4000", "10.0.0.2:4000"
NODE = "tidb-0:4000"
SINCE = 1000.0
POLICY = Policy(report_interval=1.0, connect_timeout=0.5, envoy_retention=600.0, migration_timeout=3.0)
SETTLED = SINCE + 1.5  # a connection that was chosen before shows by then
ARRIVED = SINCE + 4.0  # and so does a session that was on its way


def facts(*loads: EnvoyLoad, seen: dict[str, float] | None = None) -> Facts:
    live: dict[str, int] = {}
    for load in loads:
        for endpoint, count in load.sessions.items():
            live[endpoint] = live.get(endpoint, 0) + count
    envoys = {load.envoy: load.at for load in loads} | (seen or {})
    heeded = {envoy: {NODE: SINCE} for envoy in envoys}
    return Facts(
        loads={load.envoy: load for load in loads},
        sessions_by_endpoint=live,
        envoys_last_seen=envoys,
        closed_acks=heeded,
    )


def zero(envoy: str, at: float) -> EnvoyLoad:
    return EnvoyLoad(envoy, at, {OTHER: 3})


def empty(known: Facts, now: float, policy: Policy = POLICY) -> bool:
    return is_confirmed_empty(NODE, ENDPOINT, SINCE, known, policy, now)


def test_without_any_envoy_nobody_can_have_a_session() -> None:
    assert empty(facts(), SINCE)


def test_a_node_without_an_endpoint_never_had_one() -> None:
    assert is_confirmed_empty(NODE, None, SINCE, facts(zero("one", 0.0)), POLICY, SINCE)


def test_a_session_is_a_session() -> None:
    busy = EnvoyLoad("one", SETTLED + 10, {ENDPOINT: 1})
    assert not empty(facts(busy, zero("two", SETTLED + 10)), SETTLED + 10)


@pytest.mark.parametrize(
    ("reported", "now", "counts"),
    [
        (SINCE - 1, SINCE, False),  # from before it was closed
        (SETTLED - 0.01, SETTLED, False),  # a connection that was being made may not show yet
        (SETTLED, SETTLED, True),
        (SETTLED, SETTLED + 5.0, True),
        (SETTLED, SETTLED + 5.1, False),  # too long ago: it has fallen silent
    ],
)
def test_a_zero_counts_when_it_is_late_enough_and_fresh(reported: float, now: float, counts: bool) -> None:
    assert empty(facts(zero("one", reported)), now) is counts


def test_slow_reports_are_fresh_for_longer() -> None:
    slow = replace(POLICY, report_interval=10.0)
    late = SINCE + 10.5
    assert empty(facts(zero("one", late)), late + 30.0, slow)
    assert not empty(facts(zero("one", late)), late + 30.1, slow)


def test_nothing_is_surely_empty_while_a_control_plane_is_not_heard() -> None:
    known = facts(zero("one", SETTLED))
    assert empty(known, SETTLED)
    assert not empty(replace(known, unreachable_replicas=frozenset({"b"})), SETTLED)


def test_every_envoy_has_to_report_until_it_is_forgotten() -> None:
    now = SETTLED + 1
    good = zero("one", now)
    assert empty(facts(good, zero("two", now)), now)
    assert not empty(facts(good, seen={"two": now}), now)  # connected, and has not reported
    assert not empty(facts(good, seen={"two": now - 600.0}), now)
    assert empty(facts(good, seen={"two": now - 600.1}), now)


def test_an_envoy_that_does_not_follow_may_have_sessions() -> None:
    now = SETTLED + 3
    known = facts(zero("one", now))
    assert empty(replace(known, unsynced_envoys={"another"}), now)
    assert not empty(replace(known, unsynced_envoys={"one"}), now)


def test_silence_counts_from_when_the_envoy_has_heard_that_the_node_is_closed() -> None:
    """Until then it opens sessions there, and moves some to it."""
    late = SINCE + 10.0
    by_load = facts(zero("one", late + 1.0))
    by_module = counting(facts(seen={"one": late}), "one", at=late + 3.5, counting_since=late + 3.0)
    for known, now in ((by_load, late + 1.0), (by_module, late + 3.5)):
        assert empty(known, now)
        assert not empty(replace(known, closed_acks={"one": {NODE: late}}), now)
        assert not empty(replace(known, closed_acks={"one": {"tidb-1:4000": SINCE}}), now)
    told = facts(zero("one", late + 1.5))
    assert empty(replace(told, closed_acks={"one": {NODE: late}}), late + 1.5)


def test_nobody_knows_the_fleet_right_after_a_start() -> None:
    assert not empty(replace(facts(), observing_since=SINCE - 14.9), SINCE)
    assert empty(replace(facts(), observing_since=SINCE - 15.0), SINCE)


def counting(known: Facts, *envoys: str, **census: object) -> Facts:
    """The same with modules in these Envoys that have told all there is, and have no session on the node."""
    told = SessionCounts(ARRIVED + 1, ARRIVED, {"tidb-1:4000": 2}, frozenset((NODE, "tidb-1:4000")))
    counted = dict.fromkeys(envoys, replace(told, **census))  # type: ignore[arg-type]
    return replace(
        known,
        session_counts={**known.session_counts, **counted},
        module_envoys={*known.module_envoys, *envoys},
    )


def test_a_module_is_believed_without_a_load_report_and_against_it() -> None:
    now = ARRIVED + 1
    assert empty(counting(facts(seen={"one": now}), "one"), now)
    # Envoy counts a session at the node that it came to first, for ever. The store leaves it out of `live`.
    moved = replace(facts(EnvoyLoad("one", now, {ENDPOINT: 2})), sessions_by_endpoint={})
    assert empty(counting(moved, "one"), now)
    assert not empty(replace(counting(moved, "one"), sessions_by_address={NODE: 1}), now)
    assert not empty(counting(facts(zero("one", now), EnvoyLoad("two", now, {ENDPOINT: 1})), "one"), now)


@pytest.mark.parametrize(
    ("census", "counts"),
    [
        ({}, True),
        ({"counting_since": ARRIVED - 0.01}, False),  # a session that was on its way may not show yet
        ({"at": ARRIVED - 4.01}, False),  # it has fallen silent
        ({"at": ARRIVED - 4.0}, True),
        ({"complete_nodes": frozenset(("tidb-1:4000",))}, False),  # nothing was taken in of this node
    ],
)
def test_a_modules_zero_counts_when_it_is_whole_late_enough_and_fresh(
    census: dict[str, object], counts: bool
) -> None:
    now = ARRIVED + 1
    assert empty(counting(facts(seen={"one": now}), "one", **census), now) is counts
    # A load report makes up for nothing: it does not know of sessions that came from elsewhere.
    assert empty(counting(facts(zero("one", now)), "one", **census), now) is counts


def test_an_envoy_with_a_module_that_has_not_told_all_may_have_sessions_anywhere() -> None:
    now = ARRIVED + 1
    known = facts(zero("one", now))
    assert empty(known, now)
    assert not empty(replace(known, module_envoys={"one"}), now)


def test_of_an_envoy_whose_module_never_had_a_session_both_have_to_say_so() -> None:
    now = ARRIVED + 1
    assert empty(counting(facts(zero("one", now)), "one", has_served=False), now)
    assert not empty(counting(facts(seen={"one": now}), "one", has_served=False), now)
    assert not empty(counting(facts(zero("one", SETTLED - 0.01)), "one", has_served=False), now)
    assert empty(counting(facts(zero("one", now)), "one", has_served=False, counting_since=SETTLED), now)
    assert not empty(
        counting(facts(zero("one", now)), "one", has_served=False, counting_since=SETTLED - 0.01), now
    )


def test_sessions_are_unknown_until_an_envoy_reports() -> None:
    assert session_count(NODE, ENDPOINT, facts()) is None
    assert session_count(NODE, None, facts(zero("one", 0.0))) is None
    assert session_count(NODE, ENDPOINT, facts(zero("one", 0.0))) == 0
    assert session_count(NODE, OTHER, facts(zero("one", 0.0), zero("two", 0.0))) == 6
    assert session_count(NODE, OTHER, counting(facts(), "one")) == 0
    assert session_count(NODE, OTHER, replace(facts(zero("one", 0.0)), sessions_by_address={NODE: 2})) == 5


@pytest.mark.parametrize(("at", "believed"), [(6.9, False), (7.0, True), (10.0, True), (None, False)])
def test_a_nodes_own_count_is_believed_while_it_is_fresh(at: float | None, believed: bool) -> None:
    known = replace(facts(), health={NODE: Health(connections=5, connections_at=at)})
    fresh_from = session_counts.tidb_count_stale_before(POLICY, 10.0)
    assert session_counts.tidb_count(NODE, known, fresh_from) == (5 if believed else None)
    assert session_counts.tidb_count("tidb-1:4000", known, fresh_from) is None


def test_nodes_that_are_asked_rarely_are_believed_for_longer() -> None:
    assert session_counts.tidb_count_stale_before(replace(POLICY, status_interval=0.1), 10.0) == 7.0
    assert session_counts.tidb_count_stale_before(replace(POLICY, status_interval=10.0), 100.0) == 70.0


def test_each_envoy_is_asked_for_by_its_own_witness() -> None:
    both = counting(facts(zero("one", 5.0), zero("two", 5.0)), "one")
    assert [session_counts.for_envoy(envoy, both) for envoy in ("one", "two", "three")] == [2, 3, None]
    assert sorted(session_counts.silent_envoys(both, 5.0)) == []
    assert sorted(session_counts.silent_envoys(both, 5.1)) == ["two"]
    assert sorted(session_counts.silent_envoys(both, ARRIVED + 1.1)) == ["one", "two"]
    assert session_counts.for_envoys(["one", "two"], "tidb-1:4000", OTHER, both) == 5
    assert session_counts.for_envoys(["one", "two"], NODE, ENDPOINT, both) == 0


@pytest.mark.parametrize(
    ("state", "advice", "endpoint", "is_awaited"),
    [
        (State.DRAINING, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, None, ENDPOINT, False),  # empty, and kept for its drain only
        (State.DRAINED, EdsHealth.DRAINING, ENDPOINT, False),
        (State.UNHEALTHY, EdsHealth.UNHEALTHY, ENDPOINT, False),
        (State.ACTIVE, EdsHealth.HEALTHY, ENDPOINT, False),
        (State.DRAINING, EdsHealth.DRAINING, None, False),
    ],
)
def test_the_last_session_is_awaited_where_it_decides_something(
    state: State, advice: EdsHealth | None, endpoint: str | None, is_awaited: bool
) -> None:
    node = NodePlan(Node("a:1", Source.PD), state, "a reason", 0.0, advice, endpoint=endpoint)
    assert bool(nodes_awaiting_empty(Plan({"a:1": node}))) is is_awaited
