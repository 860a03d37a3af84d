"""The plan as a whole: several nodes, several sources, outages, the panic threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.plan import compute_plan
from controlplane.model.capture import Capture
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents, OnDeadline
from controlplane.model.nodes import Node, NodeGroup, Resolution, Source, State, Topology
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.model.traffic import SessionCounts

NOW = 2_000_000.0
POLICY = Policy(slow_start=0, report_interval=1.0, connect_timeout=0.5)
EMPTY = Topology(Source.PD, is_complete=True)


def address(index: int) -> str:
    return f"10.0.0.{index}:4000"


def node(index: int, **fields: object) -> Node:
    return replace(Node(address(index), Source.PD, f"10.0.0.{index}:10080"), **fields)  # type: ignore[arg-type]


def pd(*nodes: Node, complete: bool = True, outage: str = "") -> Topology:
    return Topology(Source.PD, {n.address: n for n in nodes}, is_complete=complete, outage=outage)


def probes(status: str, consecutive: int = 9) -> Health:
    probe = CheckResult(CheckStatus(status), f"it {status}s", consecutive, NOW)
    return Health(status=probe, sql=probe)


UP, DOWN = probes("pass"), probes("fail")
STOPPING = Health(
    CheckResult(CheckStatus.STOPPING, "status 500", 1, NOW),
    CheckResult(CheckStatus.PASS, "accepts logins", 9, NOW),
)


def make_facts(*topologies: Topology, health: dict[str, Health] | None = None, **more: object) -> Facts:
    """Return facts in which all Envoys have acknowledged every closed node."""
    closed_acks = {envoy: {address(i): 0.0 for i in range(9)} for envoy in ("envoy", "one", "two", "e")}
    observed = Facts(
        topologies={t.source: t for t in topologies}, health=health or {}, closed_acks=closed_acks
    )
    return replace(observed, **more)  # type: ignore[arg-type]


def all_up(count: int) -> tuple[Facts, Plan]:
    facts = make_facts(pd(*(node(i) for i in range(count))), health={address(i): UP for i in range(count)})
    return facts, compute_plan(Plan(), facts, Intents(), POLICY, NOW)


def eds_health_by_node(current: Plan) -> dict[str, EdsHealth | None]:
    return {a: p.eds_health for a, p in current.nodes.items()}


def states(current: Plan) -> list[State]:
    return [p.state for p in current.nodes.values()]


def test_passing_nodes_are_active_with_equal_weights() -> None:
    _, current = all_up(3)
    assert states(current) == [State.ACTIVE] * 3
    assert len({p.weight for p in current.nodes.values()}) == 1
    assert current.nodes[address(0)].weight >= 1


def test_equal_facts_give_an_equal_plan() -> None:
    facts, current = all_up(5)
    assert compute_plan(current, facts, Intents(), POLICY, NOW + 5) == current


def test_source_outage_keeps_all_nodes() -> None:
    _, current = all_up(3)
    for facts in (make_facts(pd(complete=False, outage="PD is unreachable"), health={}), make_facts()):
        after = compute_plan(current, facts, Intents(), POLICY, NOW + 99)
        assert eds_health_by_node(after) == eds_health_by_node(current)


def test_deleted_node_leaves_once_empty() -> None:
    _, current = all_up(3)
    remaining = pd(node(0), node(1))
    health = {address(i): UP for i in range(3)}
    loads = {"envoy": EnvoyLoad("envoy", NOW, {"10.0.0.2:4000": 1})}
    busy = make_facts(
        remaining,
        health=health,
        loads=loads,
        sessions_by_endpoint={"10.0.0.2:4000": 1},
        envoys_last_seen={"envoy": NOW},
    )
    gone = compute_plan(current, busy, Intents(), POLICY, NOW)
    assert gone.nodes[address(2)].state is State.GONE
    assert gone.nodes[address(2)].eds_health is EdsHealth.DRAINING
    idle = replace(
        busy,
        loads={"envoy": EnvoyLoad("envoy", NOW + 2)},
        sessions_by_endpoint={},
        envoys_last_seen={"envoy": NOW + 2},
    )
    assert address(2) not in compute_plan(gone, idle, Intents(), POLICY, NOW + 2).nodes


def test_drained_requires_a_fresh_zero_from_every_envoy() -> None:
    _, current = all_up(2)
    intents = Intents(drains={address(0): DrainIntent(NOW, 600)})

    def state(now: float, **reports: float) -> State:
        loads = {name: EnvoyLoad(name, at) for name, at in reports.items()}
        facts = make_facts(
            pd(node(0), node(1)),
            health={address(0): UP, address(1): UP},
            loads=loads,
            envoys_last_seen={"one": NOW + 1, "two": NOW + 1},
        )
        draining = compute_plan(current, replace(facts, loads={}), intents, POLICY, NOW)
        assert draining.nodes[address(0)].state is State.DRAINING
        return compute_plan(draining, facts, intents, POLICY, now).nodes[address(0)].state

    assert state(NOW + 3, one=NOW + 2) is State.DRAINING  # "two" has not reported
    assert state(NOW + 3, one=NOW + 2, two=NOW + 0.5) is State.DRAINING  # the report of "two" is too early
    assert state(NOW + 30, one=NOW + 29, two=NOW + 2) is State.DRAINING  # "two" stopped reporting
    assert state(NOW + 3, one=NOW + 2, two=NOW + 2) is State.DRAINED
    assert state(NOW + 700, one=NOW + 699) is State.DRAINED  # both were last seen over 10 minutes ago


def test_drained_node_stays_drained() -> None:
    facts, current = all_up(2)
    intents = Intents(drains={address(0): DrainIntent(NOW, 600)})
    for second in range(20):
        now = NOW + second
        reported = replace(facts, loads={"e": EnvoyLoad("e", now)}, envoys_last_seen={"e": now})
        current = compute_plan(current, reported, intents, POLICY, now)
        if second >= 2:
            assert current.nodes[address(0)].state is State.DRAINED


def test_panic_threshold_keeps_failing_nodes_in_service() -> None:
    facts, current = all_up(8)
    for down in range(9):
        health = {address(i): DOWN if i < down else UP for i in range(8)}
        after = compute_plan(current, replace(facts, health=health), Intents(), POLICY, NOW)
        healthy = [a for a in eds_health_by_node(after).values() if a is EdsHealth.HEALTHY]
        if down <= 6:  # 2 of 8 nodes still pass, which equals the threshold of 25 %
            assert (len(healthy), after.panic_threshold_reason) == (8 - down, "")
        else:
            assert len(healthy) == 8
            assert "panic threshold" in after.panic_threshold_reason
            assert states(after).count(State.UNHEALTHY) == down


def test_panic_threshold_of_zero_disables_it() -> None:
    facts, current = all_up(3)
    after = compute_plan(
        current,
        replace(facts, health={address(i): DOWN for i in range(3)}),
        Intents(),
        replace(POLICY, panic_threshold=0),
        NOW,
    )
    assert set(eds_health_by_node(after).values()) == {EdsHealth.UNHEALTHY}


def test_unregistered_nodes_do_not_count_for_panic_threshold() -> None:
    dead = [node(i, registered=False) for i in range(10, 30)]
    past = {n.address: NodePlan(n, State.UNHEALTHY, "dead", NOW - 999, EdsHealth.UNHEALTHY) for n in dead}
    _, current = all_up(2)
    health = {address(0): UP, address(1): UP} | {n.address: DOWN for n in dead}
    facts = make_facts(pd(node(0), node(1), *dead), health=health)
    after = compute_plan(Plan(nodes={**current.nodes, **past}), facts, Intents(), POLICY, NOW)
    assert after.panic_threshold_reason == ""
    assert list(eds_health_by_node(after).values()).count(EdsHealth.HEALTHY) == 2


def test_stopping_nodes_serve_if_no_other_node_is_left() -> None:
    facts, current = all_up(2)
    stopping = replace(facts, health={address(0): STOPPING, address(1): STOPPING})
    after = compute_plan(current, stopping, Intents(), POLICY, NOW)
    assert states(after) == [State.DRAINING, State.DRAINING]
    assert set(eds_health_by_node(after).values()) == {EdsHealth.HEALTHY}
    assert "no other node is left" in after.panic_threshold_reason


def test_deleted_nodes_without_a_check_result_serve_only_if_they_did_before() -> None:
    facts, current = all_up(2)
    facts = replace(facts, sessions_by_endpoint={"10.0.0.0:4000": 1}, envoys_last_seen={"e": NOW})
    one_left = replace(facts, topologies={Source.PD: pd(node(1))})
    current = compute_plan(current, one_left, Intents(), POLICY, NOW)
    none_left = replace(facts, topologies={Source.PD: EMPTY}, health={})
    after = compute_plan(current, none_left, Intents(), POLICY, NOW)
    assert eds_health_by_node(after) == {address(0): EdsHealth.DRAINING, address(1): EdsHealth.HEALTHY}


@pytest.mark.parametrize("checks", [replace(UP, status=DOWN.status), replace(UP, sql=DOWN.sql)])
def test_one_failing_check_ends_the_service_of_a_node(checks: Health) -> None:
    facts, current = all_up(3)
    changed = replace(facts, health={**facts.health, address(0): checks})
    after = compute_plan(current, changed, Intents(), POLICY, NOW)
    assert states(after) == [State.UNHEALTHY, State.ACTIVE, State.ACTIVE]


def test_operator_may_drain_all_nodes() -> None:
    facts, current = all_up(2)
    intents = Intents(drains={address(i): DrainIntent(NOW, 600) for i in range(2)})
    assert set(eds_health_by_node(compute_plan(current, facts, intents, POLICY, NOW)).values()) == {
        EdsHealth.DRAINING
    }


def test_removed_pd_node_stays_excluded_until_restored() -> None:
    facts, current = all_up(2)
    without = compute_plan(current, facts, Intents(removed={address(0): NOW}), POLICY, NOW)
    assert address(0) not in without.nodes
    assert (
        address(0)
        not in compute_plan(without, facts, Intents(removed={address(0): NOW}), POLICY, NOW + 9).nodes
    )
    assert compute_plan(without, facts, Intents(), POLICY, NOW + 10).nodes[address(0)].state is State.ACTIVE


def test_endpoint_of_a_name_follows_its_last_resolution() -> None:
    named = Node("tidb-0.tidb:4000", Source.PD)
    health = {named.address: Health(sql=UP.sql)}
    waiting = compute_plan(Plan(), make_facts(pd(named), health=health), Intents(), POLICY, NOW)
    assert (waiting.nodes[named.address].state, waiting.nodes[named.address].endpoint) == (
        State.JOINING,
        None,
    )
    facts = make_facts(
        pd(named), health=health, resolutions={"tidb-0.tidb": Resolution("tidb-0.tidb", "10.1.0.1")}
    )
    current = compute_plan(waiting, facts, Intents(), POLICY, NOW)
    assert current.nodes[named.address].endpoint == "10.1.0.1:4000"
    lost = replace(facts, resolutions={"tidb-0.tidb": Resolution("tidb-0.tidb", None, "no such name")})
    assert (
        compute_plan(current, lost, Intents(), POLICY, NOW).nodes[named.address].endpoint == "10.1.0.1:4000"
    )
    moved = replace(facts, resolutions={"tidb-0.tidb": Resolution("tidb-0.tidb", "10.1.0.2")})
    assert (
        compute_plan(current, moved, Intents(), POLICY, NOW).nodes[named.address].endpoint == "10.1.0.2:4000"
    )
    ipv6 = Node("[fd00::1]:4000", Source.PD)
    assert (
        compute_plan(Plan(), make_facts(pd(ipv6)), Intents(), POLICY, NOW).nodes[ipv6.address].endpoint
        == "[fd00::1]:4000"
    )


def test_operator_overrides_apply_to_nodes_of_a_source() -> None:
    facts, current = all_up(1)
    overridden = compute_plan(current, facts, Intents(weights={address(0): 7}), POLICY, NOW)
    assert overridden.nodes[address(0)].node.weight == 7


def test_last_nodes_serve_without_entries_for_any_time() -> None:
    facts, current = all_up(2)
    busy = {"10.0.0.0:4000": 5, "10.0.0.1:4000": 5}
    for second in range(0, 3000, 100):
        now = NOW + second
        empty = replace(
            facts, topologies={Source.PD: EMPTY}, sessions_by_endpoint=busy, envoys_last_seen={"e": now}
        )
        current = compute_plan(current, empty, Intents(), POLICY, now)
        assert set(eds_health_by_node(current).values()) == {EdsHealth.HEALTHY}, second


def test_deleted_entries_keep_nodes_while_no_envoy_is_known() -> None:
    facts, current = all_up(2)
    after = compute_plan(current, replace(facts, topologies={Source.PD: EMPTY}), Intents(), POLICY, NOW)
    assert set(eds_health_by_node(after).values()) == {EdsHealth.HEALTHY}


def test_entry_without_ttl_keeps_published_endpoint() -> None:
    facts, current = all_up(2)
    busy = replace(
        facts,
        loads={"e": EnvoyLoad("e", NOW)},
        sessions_by_endpoint={"10.0.0.0:4000": 3},
        envoys_last_seen={"e": NOW},
    )
    without = replace(busy, topologies={Source.PD: pd(node(1))})
    gone = compute_plan(current, without, Intents(), POLICY, NOW)
    assert gone.nodes[address(0)].state is State.GONE
    unregistered = replace(busy, topologies={Source.PD: pd(node(0, registered=False), node(1))})
    returned = compute_plan(gone, unregistered, Intents(), POLICY, NOW)
    assert (returned.nodes[address(0)].state, returned.nodes[address(0)].eds_health) == (
        State.GONE,
        EdsHealth.DRAINING,
    )
    assert compute_plan(returned, busy, Intents(), POLICY, NOW).nodes[address(0)].state is State.ACTIVE


def test_last_report_of_a_dead_envoy_does_not_affect_weights() -> None:
    facts, current = all_up(2)
    fresh = {address(i): replace(UP, connections=700, connections_at=NOW + 60) for i in range(2)}
    dead = EnvoyLoad("dead", NOW, {"10.0.0.0:4000": 5000})
    stale = replace(
        facts,
        health=fresh,
        loads={"dead": dead},
        sessions_by_endpoint=dict(dead.sessions),
        envoys_last_seen={"dead": NOW},
    )
    after = compute_plan(current, stale, Intents(), POLICY, NOW + 60)
    assert after.nodes[address(0)].weight == after.nodes[address(1)].weight


def test_renamed_nodes_keep_the_old_ones_until_checked() -> None:
    _, current = all_up(1)
    renamed = pd(Node("db:4000", Source.PD))
    after = compute_plan(current, make_facts(renamed), Intents(), POLICY, NOW)
    assert after.nodes[address(0)].eds_health is EdsHealth.HEALTHY
    assert "no other node is left" in after.panic_threshold_reason


def test_node_kept_in_service_is_not_drained_at_once() -> None:
    facts, current = all_up(1)
    stopping = replace(
        facts,
        health={address(0): STOPPING},
        loads={"e": EnvoyLoad("e", NOW + 9)},
        envoys_last_seen={"e": NOW + 9},
    )
    for second in (5, 9):
        current = compute_plan(current, stopping, Intents(), POLICY, NOW + second)
    assert current.nodes[address(0)].eds_health is EdsHealth.HEALTHY
    drained = compute_plan(
        current, stopping, Intents(drains={address(0): DrainIntent(NOW + 9.5, 60)}), POLICY, NOW + 9.5
    )
    assert drained.nodes[address(0)].state is State.DRAINING


def test_operator_weight_applies_during_pd_outage() -> None:
    _, current = all_up(2)
    facts = make_facts(pd(complete=False, outage="PD is unreachable"))
    after = compute_plan(current, facts, Intents(weights={address(0): 10}), POLICY, NOW)
    assert after.nodes[address(0)].node.weight == 10
    assert after.nodes[address(0)].weight < after.nodes[address(1)].weight


@given(st.data())
def test_some_node_always_serves(data: st.DataObject) -> None:
    """Whatever the facts, some node serves as long as a node that has joined accepts logins."""
    count = data.draw(st.integers(1, 6))
    facts, current = all_up(count)
    for step in range(data.draw(st.integers(1, 5))):
        health = {
            address(i): data.draw(st.sampled_from([UP, DOWN, STOPPING, Health()])) for i in range(count)
        }
        listed = [
            node(i, registered=data.draw(st.booleans())) for i in range(count) if data.draw(st.booleans())
        ]
        topology = data.draw(st.sampled_from([pd(*listed), pd(complete=False, outage="unreachable")]))
        now = NOW + 70 * step
        # One Envoy never reports, so no node counts as empty, and none is deleted early.
        facts = make_facts(topology, health=health, envoys_last_seen={"silent": now})
        current = compute_plan(current, facts, Intents(), POLICY, now)
        accepting = [
            a for a in current.nodes if (sql := health[a].sql) is not None and sql.status is CheckStatus.PASS
        ]
        served = [p for p in current.nodes.values() if p.eds_health is EdsHealth.HEALTHY]
        past_joining = [a for a in accepting if current.nodes[a].state is not State.JOINING]
        assert served or not past_joining
        assert all((p.weight >= 1) == (p.eds_health is EdsHealth.HEALTHY) for p in current.nodes.values())
        assert all(p.endpoint for p in current.nodes.values() if p.eds_health is not None)


def test_release_comes_from_pd_or_status_and_is_updated() -> None:
    facts, current = all_up(2)
    assert {p.version for p in current.nodes.values()} == {""}
    with_version = replace(UP, version="8.0.11-TiDB-v8.5.3")
    facts = replace(facts, health={address(0): with_version, address(1): with_version})
    current = compute_plan(current, facts, Intents(), POLICY, NOW)
    assert [p.version for p in current.nodes.values()] == ["v8.5.3", "v8.5.3"]
    upgraded = replace(facts, topologies={Source.PD: pd(node(0, version="v8.5.4"), node(1))})
    assert [p.version for p in compute_plan(current, upgraded, Intents(), POLICY, NOW).nodes.values()] == [
        "v8.5.4",
        "v8.5.3",
    ]


def test_drain_deadline_counts_from_request_time() -> None:
    facts, current = all_up(2)
    drains = {address(0): DrainIntent(NOW, 30, OnDeadline.CLOSE)}
    busy = replace(facts, sessions_by_endpoint={address(0): 1})
    early = compute_plan(current, busy, Intents(drains=drains), POLICY, NOW + 29.9)
    late = compute_plan(early, busy, Intents(drains=drains), POLICY, NOW + 30)
    assert [p.nodes[address(0)].terminate_sessions for p in (early, late)] == [False, True]
    assert early.nodes[address(0)].state is late.nodes[address(0)].state is State.DRAINING


def test_module_counts_affect_weights() -> None:
    facts, current = all_up(2)
    uneven = replace(
        facts,
        session_counts={"one": SessionCounts(NOW, NOW, {address(0): 50})},
        sessions_by_address={address(0): 50},
    )
    weights = [p.weight for p in compute_plan(current, uneven, Intents(), POLICY, NOW + 1).nodes.values()]
    assert weights[0] < weights[1]
    # TiDB's own count takes precedence over the stale report of an Envoy.
    with_connections = replace(UP, connections=1, connections_at=NOW + 60)
    silent = replace(uneven, health={address(0): with_connections, address(1): with_connections})
    again = [p.weight for p in compute_plan(current, silent, Intents(), POLICY, NOW + 60).nodes.values()]
    assert again[0] == again[1]


def test_labels_set_group_backup_and_zone_at_once() -> None:
    policy = replace(POLICY, groups=(NodeGroup("olap", {"use": "olap"}),), backup_labels={"role": "spare"})
    spare = pd(node(0, labels={"use": "olap", "zone": "a"}), node(1, labels={"role": "spare"}))
    facts = make_facts(spare, health={address(i): UP for i in range(2)})
    current = compute_plan(Plan(), facts, Intents(), policy, NOW)
    roles = [(p.group, p.backup, p.zone) for p in current.nodes.values()]
    assert roles == [("olap", False, "a"), ("", True, "")]
    relabelled = Intents(labels={address(1): {"role": "", "zone": "b"}})
    after = compute_plan(current, facts, relabelled, policy, NOW + 0.1)
    assert [(p.group, p.backup, p.zone) for p in after.nodes.values()] == [roles[0], ("", False, "b")]
    assert after.weights_computed_at == NOW + 0.1


@given(st.permutations(range(5)))
def test_plan_is_independent_of_node_order(order: list[int]) -> None:
    sessions = {address(0): 41, address(1): 40, address(3): 9}
    complete_nodes = frozenset(address(i) for i in range(5))

    def plan_in_order(order: list[int]) -> Plan:
        counted = {address(i): sessions[address(i)] for i in order if address(i) in sessions}
        counts = SessionCounts(NOW, NOW, counted, complete_nodes, instance="aa")
        facts = make_facts(
            pd(*(node(i) for i in order)),
            health={address(i): UP for i in order},
            session_counts={"one": counts},
            sessions_by_address=counted,
        )
        return compute_plan(Plan(), facts, Intents(), POLICY, NOW)

    current = plan_in_order(order)
    assert current == plan_in_order(list(range(5)))
    assert sum(sum(counts.values()) for counts in current.rebalance.outgoing.values()) == 45
    assert list(current.nodes) == sorted(current.nodes)


def test_capture_runs_until_its_time_is_over() -> None:
    facts, policy = Facts(), Policy(capture_directory="/captures")
    capture = Capture("one", 10.0, 20.0)

    def planned(policy: Policy, now: float, stopped_at: float | None = None) -> Capture | None:
        intents = Intents(capture=replace(capture, stopped_at=stopped_at))
        return compute_plan(Plan(), facts, intents, policy, now).capture

    assert planned(policy, 19.9) == capture
    assert planned(policy, 20.0) is None
    assert planned(policy, 15.0, stopped_at=14.0) is None
    assert planned(Policy(), 15.0) is None
