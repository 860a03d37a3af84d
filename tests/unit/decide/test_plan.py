"""The whole decision: several nodes, several sources, outages, the floor."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.plan import plan
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.nodes import Node, NodeGroup, Resolution, Source, State, Topology
from controlplane.model.plan import EdsHealth, NodePlan, Plan, Policy
from controlplane.model.traffic import SessionCounts
from controlplane.observe.discovery import static_nodes

NOW = 2_000_000.0
POLICY = Policy(slow_start=0, report_interval=1.0, connect_timeout=0.5)
EMPTY = Topology(Source.PD, is_complete=True)


def address(index: int) -> str:
    return f"10.0.0.{index}:4000"


def node(index: int, **fields: object) -> Node:
    return replace(Node(address(index), Source.PD, f"10.0.0.{index}:10080"), **fields)  # type: ignore[arg-type]


def pd(*nodes: Node, complete: bool = True, outage: str = "") -> Topology:
    return Topology(Source.PD, {n.address: n for n in nodes}, is_complete=complete, outage=outage)


def probes(outcome: str, streak: int = 9) -> Health:
    probe = CheckResult(CheckStatus(outcome), f"it {outcome}s", streak, NOW)
    return Health(status=probe, sql=probe)


UP, DOWN = probes("pass"), probes("fail")
STOPPING = Health(
    CheckResult(CheckStatus.STOPPING, "says 500", 1, NOW), CheckResult(CheckStatus.PASS, "greets", 9, NOW)
)


def facts(*topologies: Topology, health: dict[str, Health] | None = None, **more: object) -> Facts:
    """Envoys have heard of every node that it is closed, as soon as it is."""
    heeded = {envoy: {address(i): 0.0 for i in range(9)} for envoy in ("envoy", "one", "two", "e")}
    found = Facts(topologies={t.source: t for t in topologies}, health=health or {}, closed_acks=heeded)
    return replace(found, **more)  # type: ignore[arg-type]


def all_up(count: int) -> tuple[Facts, Plan]:
    known = facts(pd(*(node(i) for i in range(count))), health={address(i): UP for i in range(count)})
    return known, plan(Plan(), known, Intents(), POLICY, NOW)


def advice(found: Plan) -> dict[str, EdsHealth | None]:
    return {a: p.eds_health for a, p in found.nodes.items()}


def states(found: Plan) -> list[State]:
    return [p.state for p in found.nodes.values()]


def test_nodes_that_pass_are_active_with_equal_weights() -> None:
    _, found = all_up(3)
    assert states(found) == [State.ACTIVE] * 3
    assert len({p.weight for p in found.nodes.values()}) == 1
    assert found.nodes[address(0)].weight >= 1


def test_the_same_facts_give_the_same_plan() -> None:
    known, found = all_up(5)
    assert plan(found, known, Intents(), POLICY, NOW + 5) == found


def test_a_source_that_is_away_takes_nothing_away() -> None:
    _, found = all_up(3)
    away = facts(pd(complete=False, outage="PD is away"), health={})
    assert advice(plan(found, away, Intents(), POLICY, NOW + 99)) == advice(found)
    assert advice(plan(found, facts(), Intents(), POLICY, NOW + 99)) == advice(found)


def test_a_node_that_its_source_deleted_leaves_when_it_is_empty() -> None:
    _, found = all_up(3)
    left = pd(node(0), node(1))
    health = {address(i): UP for i in range(3)}
    live = {"envoy": EnvoyLoad("envoy", NOW, {"10.0.0.2:4000": 1})}
    busy = facts(
        left,
        health=health,
        loads=live,
        sessions_by_endpoint={"10.0.0.2:4000": 1},
        envoys_last_seen={"envoy": NOW},
    )
    gone = plan(found, busy, Intents(), POLICY, NOW)
    assert gone.nodes[address(2)].state is State.GONE
    assert gone.nodes[address(2)].eds_health is EdsHealth.DRAINING
    idle = replace(
        busy,
        loads={"envoy": EnvoyLoad("envoy", NOW + 2)},
        sessions_by_endpoint={},
        envoys_last_seen={"envoy": NOW + 2},
    )
    assert address(2) not in plan(gone, idle, Intents(), POLICY, NOW + 2).nodes


def test_drained_needs_a_fresh_zero_from_every_envoy() -> None:
    _, found = all_up(2)
    intents = Intents(drains={address(0): DrainIntent(NOW, 600)})

    def state(now: float, **reports: float) -> State:
        loads = {name: EnvoyLoad(name, at) for name, at in reports.items()}
        known = facts(
            pd(node(0), node(1)),
            health={address(0): UP, address(1): UP},
            loads=loads,
            envoys_last_seen={"one": NOW + 1, "two": NOW + 1},
        )
        draining = plan(found, replace(known, loads={}), intents, POLICY, NOW)
        assert draining.nodes[address(0)].state is State.DRAINING
        return plan(draining, known, intents, POLICY, now).nodes[address(0)].state

    assert state(NOW + 3, one=NOW + 2) is State.DRAINING  # two has not reported
    assert state(NOW + 3, one=NOW + 2, two=NOW + 0.5) is State.DRAINING  # two's report is from before
    assert state(NOW + 30, one=NOW + 29, two=NOW + 2) is State.DRAINING  # two fell silent
    assert state(NOW + 3, one=NOW + 2, two=NOW + 2) is State.DRAINED
    assert state(NOW + 700, one=NOW + 699) is State.DRAINED  # both were seen last over 10 minutes ago


def test_a_drained_node_stays_drained_on_every_pass() -> None:
    known, found = all_up(2)
    intents = Intents(drains={address(0): DrainIntent(NOW, 600)})
    for second in range(20):
        now = NOW + second
        reported = replace(known, loads={"e": EnvoyLoad("e", now)}, envoys_last_seen={"e": now})
        found = plan(found, reported, intents, POLICY, now)
        if second >= 2:
            assert found.nodes[address(0)].state is State.DRAINED


def test_too_many_failures_at_once_are_not_believed() -> None:
    known, found = all_up(8)
    for down in range(9):
        health = {address(i): DOWN if i < down else UP for i in range(8)}
        after = plan(found, replace(known, health=health), Intents(), POLICY, NOW)
        kept = [a for a in advice(after).values() if a is EdsHealth.HEALTHY]
        if down <= 6:  # 2 of 8 still pass: the floor of 25 %
            assert (len(kept), after.panic_threshold_reason) == (8 - down, "")
        else:
            assert len(kept) == 8
            assert "floor" in after.panic_threshold_reason
            assert states(after).count(State.UNHEALTHY) == down


def test_a_floor_of_zero_believes_the_checks() -> None:
    known, found = all_up(3)
    after = plan(
        found,
        replace(known, health={address(i): DOWN for i in range(3)}),
        Intents(),
        replace(POLICY, panic_threshold=0),
        NOW,
    )
    assert set(advice(after).values()) == {EdsHealth.UNHEALTHY}


def test_long_dead_nodes_do_not_pull_the_floor_up() -> None:
    dead = [node(i, registered=False) for i in range(10, 30)]
    past = {n.address: NodePlan(n, State.UNHEALTHY, "dead", NOW - 999, EdsHealth.UNHEALTHY) for n in dead}
    _, found = all_up(2)
    health = {address(0): UP, address(1): UP} | {n.address: DOWN for n in dead}
    known = facts(pd(node(0), node(1), *dead), health=health)
    after = plan(Plan(nodes={**found.nodes, **past}), known, Intents(), POLICY, NOW)
    assert after.panic_threshold_reason == ""
    assert list(advice(after).values()).count(EdsHealth.HEALTHY) == 2


def test_nodes_that_stop_serve_on_when_nothing_else_is_left() -> None:
    known, found = all_up(2)
    stopping = replace(known, health={address(0): STOPPING, address(1): STOPPING})
    after = plan(found, stopping, Intents(), POLICY, NOW)
    assert states(after) == [State.DRAINING, State.DRAINING]
    assert set(advice(after).values()) == {EdsHealth.HEALTHY}
    assert "no other node is left" in after.panic_threshold_reason


def test_an_operator_may_drain_everything() -> None:
    known, found = all_up(2)
    intents = Intents(drains={address(i): DrainIntent(NOW, 600) for i in range(2)})
    assert set(advice(plan(found, known, intents, POLICY, NOW)).values()) == {EdsHealth.DRAINING}


def test_a_removed_node_of_pd_stays_away_until_it_is_added_again() -> None:
    known, found = all_up(2)
    without = plan(found, known, Intents(removed={address(0): NOW}), POLICY, NOW)
    assert address(0) not in without.nodes
    assert address(0) not in plan(without, known, Intents(removed={address(0): NOW}), POLICY, NOW + 9).nodes
    assert plan(without, known, Intents(), POLICY, NOW + 10).nodes[address(0)].state is State.ACTIVE


def test_names_are_resolved_and_the_last_endpoint_is_kept() -> None:
    named = Node("tidb-0.tidb:4000", Source.PD)
    health = {named.address: Health(sql=UP.sql)}
    waiting = plan(Plan(), facts(pd(named), health=health), Intents(), POLICY, NOW)
    assert (waiting.nodes[named.address].state, waiting.nodes[named.address].endpoint) == (
        State.JOINING,
        None,
    )
    known = facts(
        pd(named), health=health, resolutions={"tidb-0.tidb": Resolution("tidb-0.tidb", "10.1.0.1")}
    )
    found = plan(waiting, known, Intents(), POLICY, NOW)
    assert found.nodes[named.address].endpoint == "10.1.0.1:4000"
    lost = replace(known, resolutions={"tidb-0.tidb": Resolution("tidb-0.tidb", None, "no such name")})
    assert plan(found, lost, Intents(), POLICY, NOW).nodes[named.address].endpoint == "10.1.0.1:4000"
    six = Node("[fd00::1]:4000", Source.PD)
    assert (
        plan(Plan(), facts(pd(six)), Intents(), POLICY, NOW).nodes[six.address].endpoint == "[fd00::1]:4000"
    )


def test_sources_are_merged_and_operators_have_the_last_word() -> None:
    added = static_nodes.from_api(
        {address(0): AddedNode(address(0), weight=50, labels={"rack": "r1", "zone": "x"})}, 100
    )
    known = facts(pd(node(0, version="v8.5.3", labels={"zone": "a"})), added, health={address(0): UP})
    merged = plan(Plan(), known, Intents(), POLICY, NOW).nodes[address(0)].node
    assert (merged.source, merged.version, merged.weight) == (Source.PD, "v8.5.3", 50)
    assert dict(merged.labels) == {"rack": "r1", "zone": "a"}
    intents = Intents(weights={address(0): 7}, labels={address(0): {"zone": "b"}})
    amended = plan(Plan(), known, intents, POLICY, NOW).nodes[address(0)].node
    assert (amended.weight, amended.labels["zone"]) == (7, "b")


def test_the_last_nodes_serve_on_however_long_their_entries_are_gone() -> None:
    known, found = all_up(2)
    busy = {"10.0.0.0:4000": 5, "10.0.0.1:4000": 5}
    for second in range(0, 3000, 100):
        now = NOW + second
        nobody = replace(
            known, topologies={Source.PD: EMPTY}, sessions_by_endpoint=busy, envoys_last_seen={"e": now}
        )
        found = plan(found, nobody, Intents(), POLICY, now)
        assert set(advice(found).values()) == {EdsHealth.HEALTHY}, second


def test_entries_that_vanish_while_no_envoy_is_there_take_nothing_away_at_once() -> None:
    known, found = all_up(2)
    after = plan(found, replace(known, topologies={Source.PD: EMPTY}), Intents(), POLICY, NOW)
    assert set(advice(after).values()) == {EdsHealth.HEALTHY}


def test_an_entry_that_is_back_before_its_ttl_takes_no_endpoint_away() -> None:
    known, found = all_up(2)
    busy = replace(
        known,
        loads={"e": EnvoyLoad("e", NOW)},
        sessions_by_endpoint={"10.0.0.0:4000": 3},
        envoys_last_seen={"e": NOW},
    )
    without = replace(busy, topologies={Source.PD: pd(node(1))})
    gone = plan(found, without, Intents(), POLICY, NOW)
    assert gone.nodes[address(0)].state is State.GONE
    half = replace(busy, topologies={Source.PD: pd(node(0, registered=False), node(1))})
    back = plan(gone, half, Intents(), POLICY, NOW)
    assert (back.nodes[address(0)].state, back.nodes[address(0)].eds_health) == (
        State.GONE,
        EdsHealth.DRAINING,
    )
    assert plan(back, busy, Intents(), POLICY, NOW).nodes[address(0)].state is State.ACTIVE


def test_the_last_report_of_a_dead_envoy_does_not_bend_the_weights() -> None:
    known, found = all_up(2)
    fresh = {address(i): replace(UP, connections=700, connections_at=NOW + 60) for i in range(2)}
    dead = EnvoyLoad("dead", NOW, {"10.0.0.0:4000": 5000})
    late = replace(
        known,
        health=fresh,
        loads={"dead": dead},
        sessions_by_endpoint=dict(dead.sessions),
        envoys_last_seen={"dead": NOW},
    )
    after = plan(found, late, Intents(), POLICY, NOW + 60)
    assert after.nodes[address(0)].weight == after.nodes[address(1)].weight


def test_a_restart_into_other_names_keeps_what_served_until_somebody_is_checked() -> None:
    _, found = all_up(1)
    renamed = pd(Node("db:4000", Source.PD))
    after = plan(found, facts(renamed), Intents(), POLICY, NOW)
    assert after.nodes[address(0)].eds_health is EdsHealth.HEALTHY
    assert "no other node is left" in after.panic_threshold_reason


def test_a_node_that_the_floor_kept_is_not_drained_the_moment_it_is_drained() -> None:
    known, found = all_up(1)
    quiet = replace(
        known,
        health={address(0): STOPPING},
        loads={"e": EnvoyLoad("e", NOW + 9)},
        envoys_last_seen={"e": NOW + 9},
    )
    for second in (5, 9):
        found = plan(found, quiet, Intents(), POLICY, NOW + second)
    assert found.nodes[address(0)].eds_health is EdsHealth.HEALTHY
    drained = plan(found, quiet, Intents(drains={address(0): DrainIntent(NOW + 9.5, 60)}), POLICY, NOW + 9.5)
    assert drained.nodes[address(0)].state is State.DRAINING


def test_an_operators_weight_counts_also_while_pd_is_away() -> None:
    _, found = all_up(2)
    away = facts(pd(complete=False, outage="PD is away"))
    after = plan(found, away, Intents(weights={address(0): 10}), POLICY, NOW)
    assert after.nodes[address(0)].node.weight == 10
    assert after.nodes[address(0)].weight < after.nodes[address(1)].weight


@given(st.data())
def test_there_is_always_somebody_to_serve(data: st.DataObject) -> None:
    """Whatever observers say, new sessions go somewhere as long as a node that may serve greets."""
    count = data.draw(st.integers(1, 6))
    known, found = all_up(count)
    for step in range(data.draw(st.integers(1, 5))):
        health = {
            address(i): data.draw(st.sampled_from([UP, DOWN, STOPPING, Health()])) for i in range(count)
        }
        listed = [
            node(i, registered=data.draw(st.booleans())) for i in range(count) if data.draw(st.booleans())
        ]
        topology = data.draw(st.sampled_from([pd(*listed), pd(complete=False, outage="away")]))
        now = NOW + 70 * step
        # An Envoy that never reports: nothing may count as empty, so nothing is forgotten before its time.
        known = facts(topology, health=health, envoys_last_seen={"silent": now})
        found = plan(found, known, Intents(), POLICY, now)
        greeting = [
            a for a in found.nodes if (sql := health[a].sql) is not None and sql.status is CheckStatus.PASS
        ]
        served = [p for p in found.nodes.values() if p.eds_health is EdsHealth.HEALTHY]
        past_joining = [a for a in greeting if found.nodes[a].state is not State.JOINING]
        assert served or not past_joining
        assert all((p.weight >= 1) == (p.eds_health is EdsHealth.HEALTHY) for p in found.nodes.values())
        assert all(p.endpoint for p in found.nodes.values() if p.eds_health is not None)


def test_the_release_comes_from_pd_or_from_the_node_itself_and_a_new_one_is_told() -> None:
    known, found = all_up(2)
    assert {p.version for p in found.nodes.values()} == {""}
    told = replace(UP, version="8.0.11-TiDB-v8.5.3")
    known = replace(known, health={address(0): told, address(1): told})
    found = plan(found, known, Intents(), POLICY, NOW)
    assert [p.version for p in found.nodes.values()] == ["v8.5.3", "v8.5.3"]
    upgraded = replace(known, topologies={Source.PD: pd(node(0, version="v8.5.4"), node(1))})
    assert [p.version for p in plan(found, upgraded, Intents(), POLICY, NOW).nodes.values()] == [
        "v8.5.4",
        "v8.5.3",
    ]


def test_the_deadline_of_a_drain_is_that_of_its_time() -> None:
    known, found = all_up(2)
    drains = {address(0): DrainIntent(NOW, 30, OnDeadline.CLOSE)}
    busy = replace(known, sessions_by_endpoint={address(0): 1})
    early = plan(found, busy, Intents(drains=drains), POLICY, NOW + 29.9)
    late = plan(early, busy, Intents(drains=drains), POLICY, NOW + 30)
    assert [each.nodes[address(0)].terminate_sessions for each in (early, late)] == [False, True]
    assert early.nodes[address(0)].state is late.nodes[address(0)].state is State.DRAINING


def test_sessions_that_a_module_counts_weigh_as_those_of_load_reports() -> None:
    known, found = all_up(2)
    full = replace(
        known,
        session_counts={"one": SessionCounts(NOW, NOW, {address(0): 50})},
        sessions_by_address={address(0): 50},
    )
    weights = [p.weight for p in plan(found, full, Intents(), POLICY, NOW + 1).nodes.values()]
    assert weights[0] < weights[1]
    # What TiDB says itself wins over an Envoy that has fallen silent.
    own = replace(UP, connections=1, connections_at=NOW + 60)
    silent = replace(full, health={address(0): own, address(1): own})
    again = [p.weight for p in plan(found, silent, Intents(), POLICY, NOW + 60).nodes.values()]
    assert again[0] == again[1]


def test_labels_tell_which_nodes_serve_together_and_changed_ones_count_at_once() -> None:
    places = replace(POLICY, groups=(NodeGroup("olap", {"use": "olap"}),), backup_labels={"role": "spare"})
    spare = pd(node(0, labels={"use": "olap", "zone": "a"}), node(1, labels={"role": "spare"}))
    known = facts(spare, health={address(i): UP for i in range(2)})
    found = plan(Plan(), known, Intents(), places, NOW)
    placed = [(p.group, p.backup, p.zone) for p in found.nodes.values()]
    assert placed == [("olap", False, "a"), ("", True, "")]
    relabelled = Intents(labels={address(1): {"role": "", "zone": "b"}})
    after = plan(found, known, relabelled, places, NOW + 0.1)
    assert [(p.group, p.backup, p.zone) for p in after.nodes.values()] == [placed[0], ("", False, "b")]
    assert after.weights_computed_at == NOW + 0.1


@given(st.permutations(range(5)))
def test_the_order_in_which_nodes_are_told_does_not_matter(order: list[int]) -> None:
    there = {address(0): 41, address(1): 40, address(3): 9}
    covered = frozenset(address(i) for i in range(5))

    def decided(order: list[int]) -> Plan:
        counted = {address(i): there[address(i)] for i in order if address(i) in there}
        census = SessionCounts(NOW, NOW, counted, covered, instance="aa")
        known = facts(
            pd(*(node(i) for i in order)),
            health={address(i): UP for i in order},
            session_counts={"one": census},
            sessions_by_address=counted,
        )
        return plan(Plan(), known, Intents(), POLICY, NOW)

    found = decided(order)
    assert found == decided(list(range(5)))
    assert sum(sum(moves.values()) for moves in found.rebalance.outgoing.values()) == 45
    assert list(found.nodes) == sorted(found.nodes)
