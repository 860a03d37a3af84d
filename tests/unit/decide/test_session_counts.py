"""When a node is confirmed empty: early, stale, and missing reports of zero sessions are not accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.decide import session_counts
from controlplane.decide.inputs import Inputs
from controlplane.decide.session_counts import is_confirmed_empty, nodes_awaiting_empty, session_count
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.model.traffic import SessionCounts

ENDPOINT, OTHER = "10.0.0.1:4000", "10.0.0.2:4000"
NODE = "tidb-0:4000"
CLOSED_AT = 1000.0
POLICY = Policy(report_interval=1.0, connect_timeout=0.5, envoy_retention=600.0, migration_timeout=3.0)
# From this time on, load reports include all connections whose node was chosen before `CLOSED_AT`.
LOADS_COMPLETE_AT = CLOSED_AT + 1.5
# From this time on, module counts include all migrations that were in progress at `CLOSED_AT`.
MIGRATIONS_COUNTED_AT = CLOSED_AT + 4.0


def facts(*loads: EnvoyLoad, last_seen: dict[str, float] | None = None) -> Facts:
    sessions: dict[str, int] = {}
    for load in loads:
        for endpoint, count in load.sessions.items():
            sessions[endpoint] = sessions.get(endpoint, 0) + count
    envoys = {load.envoy: load.at for load in loads} | (last_seen or {})
    closed_acks = {envoy: {NODE: CLOSED_AT} for envoy in envoys}
    return Facts(
        loads={load.envoy: load for load in loads},
        sessions_by_endpoint=sessions,
        envoys_last_seen=envoys,
        closed_acks=closed_acks,
    )


def report_without_sessions(envoy: str, at: float) -> EnvoyLoad:
    """Return a load report with sessions on another node only."""
    return EnvoyLoad(envoy, at, {OTHER: 3})


def is_empty(observed: Facts, now: float, policy: Policy = POLICY) -> bool:
    return is_confirmed_empty(NODE, ENDPOINT, CLOSED_AT, Inputs(Plan(), observed, policy, now))


def test_envoys_that_are_disconnected_for_a_while_are_missing() -> None:
    last_seen = {"long": 300.0, "gone": 995.0, "connected": 1000.0, "just now": 996.0}
    observed = replace(facts(last_seen=last_seen), unsynced_envoys=frozenset(last_seen))
    assert session_counts.missing_envoys(Inputs(Plan(), observed, POLICY, CLOSED_AT)) == ("gone",)
    synced = replace(observed, unsynced_envoys=frozenset())
    assert session_counts.missing_envoys(Inputs(Plan(), synced, POLICY, CLOSED_AT)) == ()


def test_empty_without_any_envoy() -> None:
    assert is_empty(facts(), CLOSED_AT)


def test_empty_without_an_endpoint() -> None:
    assert is_confirmed_empty(
        NODE, None, CLOSED_AT, Inputs(Plan(), facts(report_without_sessions("one", 0.0)), POLICY, CLOSED_AT)
    )


def test_not_empty_with_a_session() -> None:
    busy = EnvoyLoad("one", LOADS_COMPLETE_AT + 10, {ENDPOINT: 1})
    assert not is_empty(
        facts(busy, report_without_sessions("two", LOADS_COMPLETE_AT + 10)), LOADS_COMPLETE_AT + 10
    )


@pytest.mark.parametrize(
    ("reported", "now", "is_accepted"),
    [
        (CLOSED_AT - 1, CLOSED_AT, False),  # before the node was closed
        # The report may lack a connection that Envoy was opening at that time.
        (LOADS_COMPLETE_AT - 0.01, LOADS_COMPLETE_AT, False),
        (LOADS_COMPLETE_AT, LOADS_COMPLETE_AT, True),
        (LOADS_COMPLETE_AT, LOADS_COMPLETE_AT + 5.0, True),
        (LOADS_COMPLETE_AT, LOADS_COMPLETE_AT + 5.1, False),  # stale
    ],
)
def test_zero_is_accepted_if_settled_and_fresh(reported: float, now: float, is_accepted: bool) -> None:
    assert is_empty(facts(report_without_sessions("one", reported)), now) is is_accepted


def test_slow_reports_stay_fresh_longer() -> None:
    slow = replace(POLICY, report_interval=10.0)
    late = CLOSED_AT + 10.5
    assert is_empty(facts(report_without_sessions("one", late)), late + 30.0, slow)
    assert not is_empty(facts(report_without_sessions("one", late)), late + 30.1, slow)


def test_not_empty_while_a_replica_is_unreachable() -> None:
    observed = facts(report_without_sessions("one", LOADS_COMPLETE_AT))
    assert is_empty(observed, LOADS_COMPLETE_AT)
    assert not is_empty(replace(observed, unreachable_replicas=frozenset({"b"})), LOADS_COMPLETE_AT)


def test_every_envoy_must_report_until_it_is_forgotten() -> None:
    now = LOADS_COMPLETE_AT + 1
    good = report_without_sessions("one", now)
    assert is_empty(facts(good, report_without_sessions("two", now)), now)
    assert not is_empty(facts(good, last_seen={"two": now}), now)  # `two` is connected, but has not reported
    assert not is_empty(facts(good, last_seen={"two": now - 600.0}), now)
    assert is_empty(facts(good, last_seen={"two": now - 600.1}), now)


def test_unsynced_envoy_may_have_sessions() -> None:
    now = LOADS_COMPLETE_AT + 3
    observed = facts(report_without_sessions("one", now))
    assert is_empty(replace(observed, unsynced_envoys={"another"}), now)
    assert not is_empty(replace(observed, unsynced_envoys={"one"}), now)


def test_zero_is_accepted_only_after_acknowledged_closing() -> None:
    """Until an Envoy acknowledges that the node is closed, sessions may open on it or migrate to it."""
    late = CLOSED_AT + 10.0
    by_load = facts(report_without_sessions("one", late + 1.0))
    by_module = with_modules(facts(last_seen={"one": late}), "one", at=late + 3.5, oldest_count_at=late + 3.0)
    for observed, now in ((by_load, late + 1.0), (by_module, late + 3.5)):
        assert is_empty(observed, now)
        assert not is_empty(replace(observed, closed_acks={"one": {NODE: late}}), now)
        assert not is_empty(replace(observed, closed_acks={"one": {"tidb-1:4000": CLOSED_AT}}), now)
    settled = facts(report_without_sessions("one", late + 1.5))
    assert is_empty(replace(settled, closed_acks={"one": {NODE: late}}), late + 1.5)


def test_not_empty_during_reconnect_grace() -> None:
    assert not is_empty(replace(facts(), observing_since=CLOSED_AT - 14.9), CLOSED_AT)
    assert is_empty(replace(facts(), observing_since=CLOSED_AT - 15.0), CLOSED_AT)


def with_modules(observed: Facts, *envoys: str, **fields: object) -> Facts:
    """Add modules to these Envoys. The modules report all nodes, and no session on `NODE`."""
    counts = SessionCounts(
        MIGRATIONS_COUNTED_AT + 1, MIGRATIONS_COUNTED_AT, {"tidb-1:4000": 2}, frozenset((NODE, "tidb-1:4000"))
    )
    counted = dict.fromkeys(envoys, replace(counts, **fields))  # type: ignore[arg-type]
    return replace(
        observed,
        session_counts={**observed.session_counts, **counted},
        module_envoys={*observed.module_envoys, *envoys},
    )


def test_module_count_takes_precedence_over_load_report() -> None:
    now = MIGRATIONS_COUNTED_AT + 1
    assert is_empty(with_modules(facts(last_seen={"one": now}), "one"), now)
    # Envoy's load report counts a migrated session at its first node. So if the module reports, the fact
    # store leaves the load report out of `sessions_by_endpoint`.
    migrated = replace(facts(EnvoyLoad("one", now, {ENDPOINT: 2})), sessions_by_endpoint={})
    assert is_empty(with_modules(migrated, "one"), now)
    assert not is_empty(replace(with_modules(migrated, "one"), sessions_by_address={NODE: 1}), now)
    assert not is_empty(
        with_modules(facts(report_without_sessions("one", now), EnvoyLoad("two", now, {ENDPOINT: 1})), "one"),
        now,
    )


@pytest.mark.parametrize(
    ("fields", "is_accepted"),
    [
        ({}, True),
        # The report may lack a migration that was in progress.
        ({"oldest_count_at": MIGRATIONS_COUNTED_AT - 0.01}, False),
        ({"at": MIGRATIONS_COUNTED_AT - 4.01}, False),  # stale
        ({"at": MIGRATIONS_COUNTED_AT - 4.0}, True),
        # A report that does not contain all series of `NODE` does not prove that `NODE` has no session.
        ({"complete_nodes": frozenset(("tidb-1:4000",))}, False),
    ],
)
def test_module_zero_is_accepted_if_complete_settled_and_fresh(
    fields: dict[str, object], is_accepted: bool
) -> None:
    now = MIGRATIONS_COUNTED_AT + 1
    assert is_empty(with_modules(facts(last_seen={"one": now}), "one", **fields), now) is is_accepted
    # A load report cannot replace the module's report: it lacks sessions that migrated to the node.
    assert (
        is_empty(with_modules(facts(report_without_sessions("one", now)), "one", **fields), now)
        is is_accepted
    )


def test_not_empty_until_the_module_reports_everything() -> None:
    now = MIGRATIONS_COUNTED_AT + 1
    observed = facts(report_without_sessions("one", now))
    assert is_empty(observed, now)
    assert not is_empty(replace(observed, module_envoys={"one"}), now)


def test_unused_module_needs_a_load_report_too() -> None:
    now = MIGRATIONS_COUNTED_AT + 1
    assert is_empty(
        with_modules(facts(report_without_sessions("one", now)), "one", has_counted_sessions=False), now
    )
    assert not is_empty(with_modules(facts(last_seen={"one": now}), "one", has_counted_sessions=False), now)
    assert not is_empty(
        with_modules(
            facts(report_without_sessions("one", LOADS_COMPLETE_AT - 0.01)), "one", has_counted_sessions=False
        ),
        now,
    )
    assert is_empty(
        with_modules(
            facts(report_without_sessions("one", now)),
            "one",
            has_counted_sessions=False,
            oldest_count_at=LOADS_COMPLETE_AT,
        ),
        now,
    )
    assert not is_empty(
        with_modules(
            facts(report_without_sessions("one", now)),
            "one",
            has_counted_sessions=False,
            oldest_count_at=LOADS_COMPLETE_AT - 0.01,
        ),
        now,
    )


def test_session_count_is_unknown_until_an_envoy_reports() -> None:
    assert session_count(NODE, ENDPOINT, facts()) is None
    assert session_count(NODE, None, facts(report_without_sessions("one", 0.0))) is None
    assert session_count(NODE, ENDPOINT, facts(report_without_sessions("one", 0.0))) == 0
    assert (
        session_count(
            NODE, OTHER, facts(report_without_sessions("one", 0.0), report_without_sessions("two", 0.0))
        )
        == 6
    )
    assert session_count(NODE, OTHER, with_modules(facts(), "one")) == 0
    assert (
        session_count(
            NODE, OTHER, replace(facts(report_without_sessions("one", 0.0)), sessions_by_address={NODE: 2})
        )
        == 5
    )


@pytest.mark.parametrize(("at", "is_fresh"), [(6.9, False), (7.0, True), (10.0, True), (None, False)])
def test_tidb_count_is_used_while_fresh(at: float | None, is_fresh: bool) -> None:
    observed = replace(facts(), health={NODE: Health(connections=5, connections_at=at)})
    stale_before = Inputs(Plan(), Facts(), POLICY, 10.0).tidb_counts_stale_before
    assert session_counts.tidb_count(NODE, observed, stale_before) == (5 if is_fresh else None)
    assert session_counts.tidb_count("tidb-1:4000", observed, stale_before) is None


def test_tidb_count_stays_fresh_longer_for_slow_checks() -> None:
    assert Inputs(Plan(), Facts(), replace(POLICY, status_interval=0.1), 10.0).tidb_counts_stale_before == 7.0
    assert (
        Inputs(Plan(), Facts(), replace(POLICY, status_interval=10.0), 100.0).tidb_counts_stale_before == 70.0
    )


def test_each_envoy_is_counted_by_its_own_source() -> None:
    both = with_modules(
        facts(report_without_sessions("one", 5.0), report_without_sessions("two", 5.0)), "one"
    )
    by_envoy = [session_counts.sessions_of_envoy(envoy, both) for envoy in ("one", "two", "three")]
    assert by_envoy == [2, 3, None]
    assert sorted(session_counts.silent_envoys(both, 5.0)) == []
    assert sorted(session_counts.silent_envoys(both, 5.1)) == ["two"]
    assert sorted(session_counts.silent_envoys(both, MIGRATIONS_COUNTED_AT + 1.1)) == ["one", "two"]
    assert session_counts.sessions_of_envoys_on_node(["one", "two"], "tidb-1:4000", OTHER, both) == 5
    assert session_counts.sessions_of_envoys_on_node(["one", "two"], NODE, ENDPOINT, both) == 0


@pytest.mark.parametrize(
    ("state", "eds_health", "endpoint", "is_awaited"),
    [
        (State.DRAINING, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, EdsHealth.DRAINING, ENDPOINT, True),
        (State.GONE, None, ENDPOINT, False),  # an empty node, which is in the plan only to show its drain
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
