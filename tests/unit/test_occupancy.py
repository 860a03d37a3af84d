"""When a node surely has no session: an earlier zero, a late one, or a missing one must not count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide.occupancy import awaited, sessions, surely_empty
from controlplane.model import Advice, EnvoyLoad, Facts, Node, NodePlan, Plan, Policy, Source, State

ENDPOINT, OTHER = "10.0.0.1:4000", "10.0.0.2:4000"
SINCE = 1000.0
POLICY = Policy(report_interval=1.0, connect_timeout=0.5, envoy_memory=600.0)
SETTLED = SINCE + 1.5  # a connection that was chosen before shows by then


def facts(*loads: EnvoyLoad, seen: dict[str, float] | None = None) -> Facts:
    live: dict[str, int] = {}
    for load in loads:
        for endpoint, count in load.live.items():
            live[endpoint] = live.get(endpoint, 0) + count
    envoys = {load.envoy: load.at for load in loads} | (seen or {})
    return Facts(loads={load.envoy: load for load in loads}, live=live, envoys=envoys)


def zero(envoy: str, at: float) -> EnvoyLoad:
    return EnvoyLoad(envoy, at, {OTHER: 3})


def empty(known: Facts, now: float, policy: Policy = POLICY) -> bool:
    return surely_empty(ENDPOINT, SINCE, known, policy, now)


def test_without_any_envoy_nobody_can_have_a_session() -> None:
    assert empty(facts(), SINCE)


def test_a_node_without_an_endpoint_never_had_one() -> None:
    assert surely_empty(None, SINCE, facts(zero("one", 0.0)), POLICY, SINCE)


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
    assert empty(replace(known, doubted={"another"}), now)
    assert not empty(replace(known, doubted={"one"}), now)


def test_nobody_knows_the_fleet_right_after_a_start() -> None:
    assert not empty(replace(facts(), began=SINCE - 14.9), SINCE)
    assert empty(replace(facts(), began=SINCE - 15.0), SINCE)


def test_sessions_are_unknown_until_an_envoy_reports() -> None:
    assert sessions(ENDPOINT, facts()) is None
    assert sessions(None, facts(zero("one", 0.0))) is None
    assert sessions(ENDPOINT, facts(zero("one", 0.0))) == 0
    assert sessions(OTHER, facts(zero("one", 0.0), zero("two", 0.0))) == 6


@pytest.mark.parametrize(
    ("state", "advice", "endpoint", "is_awaited"),
    [
        (State.DRAINING, Advice.DRAINING, ENDPOINT, True),
        (State.GONE, Advice.DRAINING, ENDPOINT, True),
        (State.GONE, None, ENDPOINT, False),  # empty, and kept for its drain only
        (State.DRAINED, Advice.DRAINING, ENDPOINT, False),
        (State.UNHEALTHY, Advice.UNHEALTHY, ENDPOINT, False),
        (State.ACTIVE, Advice.HEALTHY, ENDPOINT, False),
        (State.DRAINING, Advice.DRAINING, None, False),
    ],
)
def test_the_last_session_is_awaited_where_it_decides_something(
    state: State, advice: Advice | None, endpoint: str | None, is_awaited: bool
) -> None:
    node = NodePlan(Node("a:1", Source.PD), state, "a reason", 0.0, advice, endpoint=endpoint)
    assert bool(awaited(Plan({"a:1": node}))) is is_awaited
