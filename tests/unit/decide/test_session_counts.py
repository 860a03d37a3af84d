"""When a node is confirmed empty: early, stale, and missing reports of zero sessions are not accepted."""

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
SETTLED = SINCE + 1.5  # connections whose node was chosen before `SINCE` are in the load reports by then
ARRIVED = SINCE + 4.0  # migrations in progress at `SINCE` are in the module counts by then


def facts(*loads: EnvoyLoad, last_seen: dict[str, float] | None = None) -> Facts:
    sessions: dict[str, int] = {}
    for load in loads:
        for endpoint, count in load.sessions.items():
            sessions[endpoint] = sessions.get(endpoint, 0) + count
    envoys = {load.envoy: load.at for load in loads} | (last_seen or {})
    closed_acks = {envoy: {NODE: SINCE} for envoy in envoys}
    return Facts(
        loads={load.envoy: load for load in loads},
        sessions_by_endpoint=sessions,
        envoys_last_seen=envoys,
        closed_acks=closed_acks,
    )


def zero(envoy: str, at: float) -> EnvoyLoad:
    """Return a load report with sessions on another node only."""
    return EnvoyLoad(envoy, at, {OTHER: 3})


def is_empty(observed: Facts, now: float, policy: Policy = POLICY) -> bool:
    return is_confirmed_empty(NODE, ENDPOINT, SINCE, observed, policy, now)


def test_empty_without_any_envoy() -> None:
    assert is_empty(facts(), SINCE)


def test_empty_without_an_endpoint() -> None:
    assert is_confirmed_empty(NODE, None, SINCE, facts(zero("one", 0.0)), POLICY, SINCE)


def test_not_empty_with_a_session() -> None:
    busy = EnvoyLoad("one", SETTLED + 10, {ENDPOINT: 1})
    assert not is_empty(facts(busy, zero("two", SETTLED + 10)), SETTLED + 10)


@pytest.mark.parametrize(
    ("reported", "now", "is_accepted"),
    [
        (SINCE - 1, SINCE, False),  # before the node was closed
        (SETTLED - 0.01, SETTLED, False),  # a connection in progress may not be counted yet
        (SETTLED, SETTLED, True),
        (SETTLED, SETTLED + 5.0, True),
        (SETTLED, SETTLED + 5.1, False),  # stale
    ],
)
def test_zero_is_accepted_if_settled_and_fresh(reported: float, now: float, is_accepted: bool) -> None:
    assert is_empty(facts(zero("one", reported)), now) is is_accepted


def test_slow_reports_stay_fresh_longer() -> None:
    slow = replace(POLICY, report_interval=10.0)
    late = SINCE + 10.5
    assert is_empty(facts(zero("one", late)), late + 30.0, slow)
    assert not is_empty(facts(zero("one", late)), late + 30.1, slow)


def test_not_empty_while_a_replica_is_unreachable() -> None:
    observed = facts(zero("one", SETTLED))
    assert is_empty(observed, SETTLED)
    assert not is_empty(replace(observed, unreachable_replicas=frozenset({"b"})), SETTLED)


def test_every_envoy_must_report_until_it_is_forgotten() -> None:
    now = SETTLED + 1
    good = zero("one", now)
    assert is_empty(facts(good, zero("two", now)), now)
    assert not is_empty(facts(good, last_seen={"two": now}), now)  # connected, but has not reported
    assert not is_empty(facts(good, last_seen={"two": now - 600.0}), now)
    assert is_empty(facts(good, last_seen={"two": now - 600.1}), now)


def test_unsynced_envoy_may_have_sessions() -> None:
    now = SETTLED + 3
    observed = facts(zero("one", now))
    assert is_empty(replace(observed, unsynced_envoys={"another"}), now)
    assert not is_empty(replace(observed, unsynced_envoys={"one"}), now)


def test_zero_is_accepted_only_after_acknowledged_closing() -> None:
    """Until then the Envoy opens sessions on the node and migrates sessions to it."""
    late = SINCE + 10.0
    by_load = facts(zero("one", late + 1.0))
    by_module = with_modules(facts(last_seen={"one": late}), "one", at=late + 3.5, counting_since=late + 3.0)
    for observed, now in ((by_load, late + 1.0), (by_module, late + 3.5)):
        assert is_empty(observed, now)
        assert not is_empty(replace(observed, closed_acks={"one": {NODE: late}}), now)
        assert not is_empty(replace(observed, closed_acks={"one": {"tidb-1:4000": SINCE}}), now)
    settled = facts(zero("one", late + 1.5))
    assert is_empty(replace(settled, closed_acks={"one": {NODE: late}}), late + 1.5)


def test_not_empty_during_reconnect_grace() -> None:
    assert not is_empty(replace(facts(), observing_since=SINCE - 14.9), SINCE)
    assert is_empty(replace(facts(), observing_since=SINCE - 15.0), SINCE)


def with_modules(observed: Facts, *envoys: str, **fields: object) -> Facts:
    """Add modules to these Envoys that reported everything and have no session on the node."""
    counts = SessionCounts(ARRIVED + 1, ARRIVED, {"tidb-1:4000": 2}, frozenset((NODE, "tidb-1:4000")))
    counted = dict.fromkeys(envoys, replace(counts, **fields))  # type: ignore[arg-type]
    return replace(
        observed,
        session_counts={**observed.session_counts, **counted},
        module_envoys={*observed.module_envoys, *envoys},
    )


def test_module_count_takes_precedence_over_load_report() -> None:
    now = ARRIVED + 1
    assert is_empty(with_modules(facts(last_seen={"one": now}), "one"), now)
    # Envoy keeps counting a session at its first node; the fact store drops it from `sessions_by_endpoint`.
    migrated = replace(facts(EnvoyLoad("one", now, {ENDPOINT: 2})), sessions_by_endpoint={})
    assert is_empty(with_modules(migrated, "one"), now)
    assert not is_empty(replace(with_modules(migrated, "one"), sessions_by_address={NODE: 1}), now)
    assert not is_empty(
        with_modules(facts(zero("one", now), EnvoyLoad("two", now, {ENDPOINT: 1})), "one"), now
    )


@pytest.mark.parametrize(
    ("fields", "is_accepted"),
    [
        ({}, True),
        ({"counting_since": ARRIVED - 0.01}, False),  # a migration in progress may not be counted yet
        ({"at": ARRIVED - 4.01}, False),  # stale
        ({"at": ARRIVED - 4.0}, True),
        ({"complete_nodes": frozenset(("tidb-1:4000",))}, False),  # the series of this node are missing
    ],
)
def test_module_zero_is_accepted_if_complete_settled_and_fresh(
    fields: dict[str, object], is_accepted: bool
) -> None:
    now = ARRIVED + 1
    assert is_empty(with_modules(facts(last_seen={"one": now}), "one", **fields), now) is is_accepted
    # A load report does not help: it does not count sessions that migrated to the node.
    assert is_empty(with_modules(facts(zero("one", now)), "one", **fields), now) is is_accepted


def test_not_empty_until_the_module_reports_everything() -> None:
    now = ARRIVED + 1
    observed = facts(zero("one", now))
    assert is_empty(observed, now)
    assert not is_empty(replace(observed, module_envoys={"one"}), now)


def test_unused_module_needs_a_load_report_too() -> None:
    now = ARRIVED + 1
    assert is_empty(with_modules(facts(zero("one", now)), "one", has_served=False), now)
    assert not is_empty(with_modules(facts(last_seen={"one": now}), "one", has_served=False), now)
    assert not is_empty(with_modules(facts(zero("one", SETTLED - 0.01)), "one", has_served=False), now)
    assert is_empty(
        with_modules(facts(zero("one", now)), "one", has_served=False, counting_since=SETTLED), now
    )
    assert not is_empty(
        with_modules(facts(zero("one", now)), "one", has_served=False, counting_since=SETTLED - 0.01), now
    )


def test_session_count_is_unknown_until_an_envoy_reports() -> None:
    assert session_count(NODE, ENDPOINT, facts()) is None
    assert session_count(NODE, None, facts(zero("one", 0.0))) is None
    assert session_count(NODE, ENDPOINT, facts(zero("one", 0.0))) == 0
    assert session_count(NODE, OTHER, facts(zero("one", 0.0), zero("two", 0.0))) == 6
    assert session_count(NODE, OTHER, with_modules(facts(), "one")) == 0
    assert session_count(NODE, OTHER, replace(facts(zero("one", 0.0)), sessions_by_address={NODE: 2})) == 5


@pytest.mark.parametrize(("at", "is_fresh"), [(6.9, False), (7.0, True), (10.0, True), (None, False)])
def test_tidb_count_is_used_while_fresh(at: float | None, is_fresh: bool) -> None:
    observed = replace(facts(), health={NODE: Health(connections=5, connections_at=at)})
    stale_before = session_counts.tidb_count_stale_before(POLICY, 10.0)
    assert session_counts.tidb_count(NODE, observed, stale_before) == (5 if is_fresh else None)
    assert session_counts.tidb_count("tidb-1:4000", observed, stale_before) is None


def test_tidb_count_stays_fresh_longer_for_slow_checks() -> None:
    assert session_counts.tidb_count_stale_before(replace(POLICY, status_interval=0.1), 10.0) == 7.0
    assert session_counts.tidb_count_stale_before(replace(POLICY, status_interval=10.0), 100.0) == 70.0


def test_each_envoy_is_counted_by_its_own_source() -> None:
    both = with_modules(facts(zero("one", 5.0), zero("two", 5.0)), "one")
    assert [session_counts.for_envoy(envoy, both) for envoy in ("one", "two", "three")] == [2, 3, None]
    assert sorted(session_counts.silent_envoys(both, 5.0)) == []
    assert sorted(session_counts.silent_envoys(both, 5.1)) == ["two"]
    assert sorted(session_counts.silent_envoys(both, ARRIVED + 1.1)) == ["one", "two"]
    assert session_counts.for_envoys(["one", "two"], "tidb-1:4000", OTHER, both) == 5
    assert session_counts.for_envoys(["one", "two"], NODE, ENDPOINT, both) == 0


@pytest.mark.parametrize(
    ("state", "eds_health", "endpoint", "is_awaited"),
    [
        (State.DRAINING, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, None, ENDPOINT, False),  # empty; kept in the plan only to show its drain
        (State.DRAINED, EdsHealth.DRAINING, ENDPOINT, False),
        (State.UNHEALTHY, EdsHealth.UNHEALTHY, ENDPOINT, False),
        (State.ACTIVE, EdsHealth.HEALTHY, ENDPOINT, False),
        (State.DRAINING, EdsHealth.DRAINING, None, False),
    ],
)
def test_waits_until_leaving_nodes_are_empty(
    state: State, eds_health: EdsHealth | None, endpoint: str | None, is_awaited: bool
) -> None:
    node = NodePlan(Node("a:1", Source.PD), state, "a reason", 0.0, eds_health, endpoint=endpoint)
    assert bool(nodes_awaiting_empty(Plan({"a:1": node}))) is is_awaited
