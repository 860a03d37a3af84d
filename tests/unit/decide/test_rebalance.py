"""Rebalancing to nodes below their share: how many sessions, from where, to where, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from controlplane.decide.balance.rebalance import rebalance
from controlplane.decide.inputs import Inputs
from controlplane.model.module_switches import ModuleSwitches, SwitchOverrides
from controlplane.model.nodes import EMPTY_MAP, State
from controlplane.model.plan import Factor, Plan, RebalanceState
from controlplane.model.traffic import ModuleReport
from tests.support.controlplane.balance_inputs import (
    DEFAULT_SESSIONS,
    INSTANCE_X,
    INSTANCE_Y,
    LONG_AGO,
    NODES_WITH_NEW_NODE,
    NOW,
    POLICY,
    A,
    B,
    C,
    ReportedSessions,
    decide_rebalance,
    incoming_by_node,
    node_plan,
    node_plans,
    outgoing_by_node,
)

EQUAL_NODES = node_plans(node_plan(A), node_plan(B), node_plan(C))
BALANCED = "all nodes have about their share, or the surplus cannot be migrated"


def reports_of_one_envoy(a: int, b: int, c: int) -> ReportedSessions:
    """Return the reports of a single Envoy with these sessions on the three nodes."""
    return ReportedSessions({"x": {A: a, B: b, C: c}})


def test_sessions_migrate_from_nodes_above_to_below_their_share() -> None:
    state = decide_rebalance(DEFAULT_SESSIONS.facts())
    assert state.outgoing == {A: {INSTANCE_X: 10, INSTANCE_Y: 5}, B: {INSTANCE_X: 10, INSTANCE_Y: 5}}
    assert state.incoming == {C: {INSTANCE_X: 20, INSTANCE_Y: 10}}
    assert (state.since, state.round, state.round_ends_at) == (NOW, int(NOW), NOW + 1.0)
    assert state.reason == f"{B} has 45 sessions and its share is 30, and 1 more node is off its share"


def test_old_nodes_give_and_receive_too() -> None:
    state = decide_rebalance(reports_of_one_envoy(60, 45, 0).facts(), EQUAL_NODES)
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 25, B: 10}, {C: 35})
    state = decide_rebalance(reports_of_one_envoy(90, 6, 9).facts(), EQUAL_NODES)
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 55}, {B: 29, C: 26})


def test_only_the_surplus_migrates() -> None:
    assert decide_rebalance(reports_of_one_envoy(100, 20, 0).facts()).outgoing == {A: {INSTANCE_X: 60}}


def test_shares_follow_weight_slow_start_and_factors() -> None:
    heavy = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW, weight=300))
    assert incoming_by_node(decide_rebalance(DEFAULT_SESSIONS.facts(), heavy)) == {C: 54}
    slow = replace(POLICY, slow_start=30.0)
    for active_for, share in ((0.0, 4), (15.0, 20), (29.9, 28), (30.0, 30)):
        joined = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW - active_for))
        assert incoming_by_node(decide_rebalance(DEFAULT_SESSIONS.facts(), joined, policy=slow)) == {C: share}
    reduced = node_plans(node_plan(A, factors={"cpu": Factor(0.5, 0.5, 1, "")}), node_plan(B), node_plan(C))
    state = decide_rebalance(reports_of_one_envoy(40, 40, 40).facts(), reduced)
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 16}, {B: 8, C: 8})


@pytest.mark.parametrize(
    ("counts", "outgoing"),
    [
        ((105, 103, 92), {}),  # A has 5 of 100 too many, C has 8 too few
        ((105, 105, 90), {}),  # a deficit of 10 of 100 is tolerated
        ((106, 97, 97), {A: 6}),
        ((106, 105, 89), {A: 6, B: 5}),  # nodes with a smaller surplus give as well
    ],
)
def test_small_deviations_are_tolerated(counts: tuple[int, int, int], outgoing: dict[str, int]) -> None:
    assert outgoing_by_node(decide_rebalance(reports_of_one_envoy(*counts).facts(), EQUAL_NODES)) == outgoing


def test_threshold_is_configurable() -> None:
    exact = replace(POLICY, rebalance_threshold=0.0)
    assert outgoing_by_node(
        decide_rebalance(reports_of_one_envoy(101, 100, 99).facts(), EQUAL_NODES, policy=exact)
    ) == {A: 1}
    lax = replace(POLICY, rebalance_threshold=1.0)
    assert (
        outgoing_by_node(decide_rebalance(reports_of_one_envoy(200, 60, 40).facts(), EQUAL_NODES, policy=lax))
        == {}
    )
    assert outgoing_by_node(
        decide_rebalance(reports_of_one_envoy(201, 60, 39).facts(), EQUAL_NODES, policy=lax)
    ) == {A: 101}


def test_noise_is_tolerated() -> None:
    """At 50 arrivals per second, 50 sessions open and 50 end per node in 3 s: a standard deviation of 10."""
    exact = replace(POLICY, rebalance_threshold=0.0)

    def smallest_surplus_that_migrates(arrivals: float) -> int:
        states = (
            decide_rebalance(
                reports_of_one_envoy(1000 + n, 1000, 1000 - n).facts(new_sessions_per_second=arrivals),
                EQUAL_NODES,
                policy=exact,
            )
            for n in range(200)
        )
        return next(n for n, state in enumerate(states) if state.outgoing)

    assert smallest_surplus_that_migrates(0.0) == 1
    assert 10 < smallest_surplus_that_migrates(50.0) <= 30
    # With four times the arrivals, session counts vary twice as much.
    assert smallest_surplus_that_migrates(200.0) == pytest.approx(
        2 * smallest_surplus_that_migrates(50.0), abs=1
    )


def test_round_size_is_limited_and_sets_its_duration() -> None:
    many = ReportedSessions({"x": {A: 3000, B: 3000}, "y": {A: 1500, B: 1500}})
    state = decide_rebalance(many.facts(), policy=replace(POLICY, rebalance_per_second=20.0))
    assert (sum(outgoing_by_node(state).values()), incoming_by_node(state), state.round_ends_at) == (
        100,
        {C: 100},
        NOW + 5.0,
    )
    for rate, seconds in ((1.0, 5.0), (10.0, 3.0), (9e9, 1.0)):
        limited = replace(POLICY, rebalance_per_second=rate)
        assert decide_rebalance(DEFAULT_SESSIONS.facts(), policy=limited).round_ends_at == NOW + seconds
    assert outgoing_by_node(
        decide_rebalance(DEFAULT_SESSIONS.facts(), policy=replace(POLICY, rebalance_per_second=0.01))
    ) in (
        {A: 1},
        {B: 1},
    )


def test_round_limit_applies_to_all_groups_together() -> None:
    separate_groups = node_plans(
        node_plan(A, group="one"),
        node_plan(B, group="one"),
        node_plan(C, group="two"),
        node_plan("d:1", group="two"),
    )
    facts = ReportedSessions({"x": {A: 100, C: 100}}, complete_nodes=frozenset(separate_groups)).facts()
    state = decide_rebalance(facts, separate_groups, policy=replace(POLICY, rebalance_per_second=2.0))
    assert 0 < sum(outgoing_by_node(state).values()) <= 10


def test_sessions_stay_within_their_group() -> None:
    separate_groups = node_plans(
        node_plan(A, group="one"), node_plan(B, group="two"), node_plan(C, group="two")
    )
    state = decide_rebalance(
        reports_of_one_envoy(90, 20, 10).facts(),
        separate_groups,
        policy=replace(POLICY, rebalance_threshold=0.0),
    )
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({B: 5}, {C: 5})
    assert outgoing_by_node(decide_rebalance(reports_of_one_envoy(90, 0, 0).facts(), separate_groups)) == {}


def test_groups_migrate_together_and_zones_alternate() -> None:
    """If zones shared a round, an Envoy could migrate a session from one zone to a node of the other."""
    nodes = node_plans(*(node_plan(f"{i}:1") for i in range(4)))
    facts = ReportedSessions({"x": {"0:1": 40, "2:1": 60}}, complete_nodes=frozenset(nodes)).facts(
        envoy_zones={"x": "a", "y": "b"}
    )
    groups = {a: replace(p, group="ab"[i // 2]) for i, (a, p) in enumerate(nodes.items())}
    assert outgoing_by_node(decide_rebalance(facts, groups)) == {"0:1": 20, "2:1": 30}
    zones = {a: replace(p, zone="ab"[i // 2]) for i, (a, p) in enumerate(nodes.items())}
    first = decide_rebalance(facts, zones)
    assert (outgoing_by_node(first), incoming_by_node(first)) == ({"2:1": 30}, {"3:1": 30})
    later = ReportedSessions(
        {"x": {"0:1": 40, "2:1": 30, "3:1": 30}},
        reported_at=NOW + 9,
        oldest_count_at=NOW + 7,
        complete_nodes=frozenset(nodes),
    )
    ended = replace(first, outgoing=EMPTY_MAP, incoming=EMPTY_MAP)
    second = decide_rebalance(later.facts(envoy_zones={"x": "a", "y": "b"}), zones, ended, now=NOW + 9)
    assert (outgoing_by_node(second), incoming_by_node(second)) == ({"0:1": 20}, {"1:1": 20})


@pytest.mark.parametrize("separated_by", ["zone", "group"])
def test_immovable_sessions_do_not_block_other_batches(separated_by: str) -> None:
    """Immovable sessions in one zone or group do not stop migrations in another, even at a low rate."""
    nodes = node_plans(*(node_plan(f"{i}:1", **{separated_by: "ab"[i // 2]}) for i in range(4)))  # type: ignore[arg-type]
    stuck = ReportedSessions({"x": {"0:1": 40, "2:1": 60}}, complete_nodes=frozenset(nodes))
    slow = replace(POLICY, rebalance_per_second=2.0)
    state, requested = RebalanceState(), set[str]()
    for second in range(200):
        now = NOW + second
        facts = replace(stuck, reported_at=now, oldest_count_at=now).facts(envoy_zones={"x": "a", "y": "b"})
        state = decide_rebalance(facts, nodes, state, slow, now)
        requested |= state.outgoing.keys()
    assert requested == {"0:1", "2:1"}


def test_backups_return_all_sessions_when_others_serve() -> None:
    with_backup = node_plans(node_plan(A), node_plan(B), node_plan(C, backup=True))
    state = decide_rebalance(reports_of_one_envoy(10, 10, 10).facts(), with_backup)
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({C: 10}, {A: 5, B: 5})
    # No new session opens on the backup node, so noise cannot explain its sessions.
    assert outgoing_by_node(
        decide_rebalance(reports_of_one_envoy(10, 10, 10).facts(new_sessions_per_second=100.0), with_backup)
    ) == {C: 10}
    alone = node_plans(node_plan(A, state=State.DRAINING), node_plan(C, backup=True))
    assert outgoing_by_node(decide_rebalance(reports_of_one_envoy(10, 0, 10).facts(), alone)) == {}


def test_direct_connections_count_but_do_not_migrate() -> None:
    # 30 connections belong to direct clients.
    with_direct = replace(DEFAULT_SESSIONS, node_connections={A: 75, B: 45, C: 0})
    state = decide_rebalance(with_direct.facts())
    assert (outgoing_by_node(state), incoming_by_node(state)) == ({A: 35, B: 5}, {C: 40})
    overfull = replace(DEFAULT_SESSIONS, node_connections={A: 145, B: 45, C: 0})
    assert (
        outgoing_by_node(decide_rebalance(overfull.facts())),
        incoming_by_node(decide_rebalance(overfull.facts())),
    ) == ({A: 45}, {C: 45})
    old = replace(with_direct, counted_at=NOW - 3.1)
    assert decide_rebalance(old.facts()) == decide_rebalance(DEFAULT_SESSIONS.facts())


def test_waits_for_envoys_with_incomplete_reports() -> None:
    assert (
        decide_rebalance(replace(DEFAULT_SESSIONS, complete_nodes=frozenset((A, B))).facts())
        == RebalanceState()
    )


def test_silent_envoy_neither_gives_nor_raises_demand() -> None:
    # 60 sessions are certain and 30 more are possible, so no node may drop below a third of 90.
    assert (
        decide_rebalance(replace(DEFAULT_SESSIONS, stale_envoys=frozenset("y")).facts()) == RebalanceState()
    )
    mostly_certain = ReportedSessions({"x": {A: 60, B: 60}, "y": {A: 3, B: 3}}, stale_envoys=frozenset("y"))
    assert decide_rebalance(mostly_certain.facts()).outgoing == {A: {INSTANCE_X: 18}, B: {INSTANCE_X: 18}}
    all_silent = replace(DEFAULT_SESSIONS, stale_envoys=frozenset("xy"))
    assert decide_rebalance(all_silent.facts()) == RebalanceState()
    # TiDB's own counts are exact.
    counted = replace(DEFAULT_SESSIONS, stale_envoys=frozenset("y"), node_connections={A: 45, B: 45, C: 0})
    assert decide_rebalance(counted.facts()).outgoing == {A: {INSTANCE_X: 15}, B: {INSTANCE_X: 15}}


def test_envoys_without_instance_or_module_do_not_migrate() -> None:
    older = replace(DEFAULT_SESSIONS, instances={"x": INSTANCE_X}).facts()
    assert decide_rebalance(older).outgoing == {A: {INSTANCE_X: 15}, B: {INSTANCE_X: 15}}
    few = ReportedSessions({"x": {A: 4, B: 2}, "y": {A: 41, B: 43}}, instances={"x": INSTANCE_X}).facts()
    assert decide_rebalance(few).outgoing == {A: {INSTANCE_X: 4}, B: {INSTANCE_X: 2}}
    mixed = ReportedSessions({"x": {A: 4, B: 2}}, stock_envoy_sessions={"z": {A: 41, B: 43}}).facts()
    assert decide_rebalance(mixed).outgoing == {A: {INSTANCE_X: 4}, B: {INSTANCE_X: 2}}
    facts = DEFAULT_SESSIONS.facts()
    unused = replace(facts.session_counts["x"], has_counted_sessions=False)
    assert decide_rebalance(replace(facts, session_counts={"x": unused})) == RebalanceState()


def test_envoys_with_migration_off_do_not_migrate() -> None:
    facts = DEFAULT_SESSIONS.facts()
    past = Plan(NODES_WITH_NEW_NODE)

    def outgoing(switches: ModuleSwitches, **overrides: bool) -> Mapping[str, Mapping[str, int]]:
        by_envoy = {envoy: SwitchOverrides(migration=on) for envoy, on in overrides.items()}
        inputs = Inputs(past, facts, replace(POLICY, module_switches=switches), NOW, by_envoy)
        return rebalance(NODES_WITH_NEW_NODE, frozenset(), "", inputs).outgoing

    only_x = {A: {INSTANCE_X: 15}, B: {INSTANCE_X: 15}}
    assert outgoing(ModuleSwitches(), y=False) == only_x
    assert outgoing(ModuleSwitches(migration=False), x=True) == only_x
    assert outgoing(ModuleSwitches(migration=False)) == {}
    report = ModuleReport("y", NOW, runtime_off=frozenset({"migration"}))
    facts = replace(facts, module_reports={"y": report})
    assert outgoing(ModuleSwitches(), y=True) == only_x
    running = replace(past, rebalance=RebalanceState(since=NOW - 9, reason="a reason"))
    off = replace(POLICY, module_switches=ModuleSwitches(migration=False))
    ended = rebalance(NODES_WITH_NEW_NODE, frozenset(), "", Inputs(running, facts, off, NOW))
    assert (ended.since, ended.reason) == (None, "session migration is switched off")


def test_no_round_during_reconnect_grace() -> None:
    assert decide_rebalance(DEFAULT_SESSIONS.facts(observing_since=NOW - 14.9)) == RebalanceState()
    assert decide_rebalance(DEFAULT_SESSIONS.facts(observing_since=NOW - 15.0)).outgoing


def test_round_is_cancelled_when_its_premises_change() -> None:
    first = decide_rebalance(DEFAULT_SESSIONS.facts())
    soon = NOW + 0.5
    off = decide_rebalance(
        DEFAULT_SESSIONS.facts(), before=first, policy=replace(POLICY, rebalance_enabled=False), now=soon
    )
    assert (off.since, off.outgoing, off.incoming, off.round_ends_at) == (None, {}, {}, soon)
    assert off.reason == "rebalancing is disabled"
    untrusted = decide_rebalance(
        DEFAULT_SESSIONS.facts(), before=first, panic_threshold_reason="only 1 of 9 passes", now=soon
    )
    assert (untrusted.since, untrusted.outgoing, untrusted.reason) == (
        None,
        {},
        "failing nodes are kept in service, so their checks are not trusted",
    )
    cancelled = replace(first, outgoing={}, incoming={}, round_ends_at=soon)
    past = Plan(NODES_WITH_NEW_NODE, "", first)
    inputs = Inputs(past, DEFAULT_SESSIONS.facts(), POLICY, soon)
    for changed in (
        node_plans(node_plan(A), node_plan(B, state=State.DRAINING), node_plan(C, NOW)),
        node_plans(node_plan(A), node_plan(B, weight=200), node_plan(C, NOW)),
        node_plans(node_plan(A), node_plan(B)),
        {**NODES_WITH_NEW_NODE, **node_plans(node_plan("d:1", NOW))},
    ):
        assert rebalance(changed, frozenset(), "", inputs) == cancelled
    unchanged = node_plans(node_plan(A), node_plan(B), node_plan(C, NOW))
    assert rebalance(unchanged, frozenset(), "", inputs) is first


def test_no_round_with_a_single_serving_node() -> None:
    alone = node_plans(
        node_plan(A), node_plan(B, state=State.UNHEALTHY), node_plan(C, LONG_AGO, state=State.DRAINED)
    )
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), alone) == RebalanceState()
    assert decide_rebalance(DEFAULT_SESSIONS.facts(), {}) == RebalanceState()
