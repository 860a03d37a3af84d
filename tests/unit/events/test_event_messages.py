"""What is told of changes: one sentence each, and nothing of what has not changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from controlplane.events.event_messages import (
    EventDraft,
    drain_finished,
    intent_events,
    is_warning,
    migration_blocker_events,
    module_config_rejected,
    node_events,
    node_metrics_events,
    rebalance_events,
    reload_message,
    topology_events,
)
from controlplane.model.health import Health
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.nodes import Node, Source, State, Topology, TopologyProblem
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan, RebalanceState
from controlplane.model.traffic import ConfigRejection
from controlplane.model.views import DrainProgress, ReloadResult

A, B = "tidb-0:4000", "tidb-1:4000"


def planned(address: str, state: State = State.ACTIVE, **fields: object) -> NodePlan:
    base = NodePlan(Node(address, Source.PD), state, "it passes its checks", 0.0, endpoint="10.0.0.1:4000")
    return replace(base, **fields)  # type: ignore[arg-type]


def words(events: Iterable[EventDraft]) -> list[tuple[str, str, str]]:
    return [event[:3] for event in events]


def plan(*nodes: NodePlan, floor: str = "") -> Plan:
    return Plan({each.node.address: each for each in nodes}, floor)


def test_a_new_node_is_told_with_its_source_and_its_state() -> None:
    assert words(node_events(Plan(), plan(planned(A)))) == [
        ("node.discovered", A, f"{A} is known from PD"),
        ("node.state", A, f"{A} is active: it passes its checks"),
    ]


def test_a_change_of_state_is_told_once_and_a_change_of_weight_or_reason_is_not() -> None:
    before = plan(planned(A))
    assert words(node_events(before, plan(planned(A, weight=9, reason="another")))) == []
    draining = plan(planned(A, State.DRAINING, reason="drained by an operator"))
    (event,) = node_events(before, draining)
    assert event[:3] == ("node.state", A, f"{A} is draining: drained by an operator")
    assert event.data == {"from": "active", "to": "draining", "reason": "drained by an operator"}
    overdue = plan(planned(A, State.DRAINING, reason="its deadline has passed"))
    assert words(node_events(draining, overdue)) == [
        ("node.reason", A, f"{A} is draining: its deadline has passed")
    ]


def test_a_node_that_resolves_elsewhere_is_told_and_a_first_answer_is_not() -> None:
    (event,) = words(node_events(plan(planned(A)), plan(planned(A, endpoint="10.0.0.2:4000"))))
    assert event == ("node.moved", A, f"{A} resolves to 10.0.0.2:4000 now, before to 10.0.0.1:4000")
    assert words(node_events(plan(planned(A, endpoint=None)), plan(planned(A)))) == []


def test_forgotten_nodes_are_told_in_the_order_of_addresses() -> None:
    many = [planned(f"tidb-{n}:4000") for n in range(9)]
    events = words(node_events(plan(*reversed(many)), Plan()))
    assert [subject for _, subject, _ in events] == [each.node.address for each in many]
    assert {kind for kind, _, _ in events} == {"node.forgotten"}


def test_the_floor_is_told_when_it_comes_and_when_it_goes() -> None:
    held, free = plan(floor="only 0 of 2 nodes pass"), plan()
    assert words(node_events(free, held)) == [("balance.floor", "nodes", "only 0 of 2 nodes pass")]
    assert words(node_events(held, plan(floor="only 1 of 4 nodes pass"))) == []
    assert [kind for kind, _, _ in words(node_events(held, free))] == ["balance.floor_over"]


def test_a_factor_is_told_when_its_level_changes_and_not_while_shares_go_their_way() -> None:
    fails = "60% of its requests to PD fail"
    steps: tuple[dict[str, Factor], ...] = (
        {},
        {"health": Factor(0.9, 0.02, 2, fails)},
        {"health": Factor(0.8, 0.02, 2, fails)},
        {"health": Factor(0.9, 1.0, 0, "not known"), "cpu": Factor(1.0, 1.0, 2, "as most")},
        {},
    )
    plans = [plan(planned(A, eds_health=EdsHealth.HEALTHY, factors=each)) for each in steps]
    told = [list(node_events(before, after)) for before, after in itertools.pairwise(plans)]
    assert told == [
        [
            EventDraft(
                "node.factor",
                A,
                f"{A}: {fails}; its share of the sessions goes to 2%",
                {"factor": "health", "from": 0, "to": 2, "target": 0.02},
            )
        ],
        [],
        [
            EventDraft(
                "node.factor",
                A,
                f"{A}: as most",
                {"factor": "cpu", "from": 0, "to": 2, "target": 1.0},
            ),
            EventDraft(
                "node.factor",
                A,
                f"{A}: its health is no reason any more to give it fewer sessions: it is not known",
                {"factor": "health", "from": 2, "to": 0},
            ),
        ],
        [
            EventDraft(
                "node.factor",
                A,
                f"{A}: its CPU is no reason any more to give it fewer sessions",
                {"factor": "cpu", "from": 2, "to": 0},
            )
        ],
    ]
    left = plan(planned(A, State.UNHEALTHY, eds_health=EdsHealth.UNHEALTHY))  # nothing got better
    assert [told.kind for told in node_events(plans[1], left)] == ["node.state"]


def test_a_rebalance_is_told_when_it_begins_and_when_it_is_over_whatever_its_rounds() -> None:
    why = f"{B} has 2 sessions and its share is 11"
    first = RebalanceState(1.0, why, 1, 6.0, {A: {"x": 4, "y": 5}}, {B: {"x": 4, "y": 5}})
    begun = Plan(rebalance=first)
    (event,) = rebalance_events(Plan(), begun)
    assert (event.kind, event.subject, event.data) == ("balance.rebalance", "nodes", {"asked": {A: 9}})
    assert event.message.endswith(f"each node has its share: {why}")
    second = Plan(rebalance=replace(first, round=2, outgoing={A: {"x": 1}}))
    assert list(rebalance_events(begun, second)) == list(rebalance_events(begun, begun)) == []
    over = Plan(rebalance=RebalanceState(None, "it was switched off", 2, 6.0))
    (event,) = rebalance_events(second, over)
    assert event[:3] == (
        "balance.rebalance_over",
        "nodes",
        "no more sessions are asked to move: it was switched off",
    )
    assert list(rebalance_events(over, over)) == []


def test_a_few_sessions_that_move_are_not_told() -> None:
    few = Plan(
        rebalance=RebalanceState(None, f"{A} has 9 sessions and its share is 6", 1, 6.0, {A: {"x": 3}})
    )
    over = Plan(rebalance=RebalanceState(None, "all nodes have about their share", 1, 6.0))
    assert list(rebalance_events(Plan(), few)) == list(rebalance_events(few, over)) == []


def test_outages_are_told_when_they_begin_or_change_and_when_they_end() -> None:
    good = Topology(Source.PD, is_complete=True)
    bad = replace(good, outage="PD is away")
    assert words(topology_events(None, good)) == []
    assert words(topology_events(None, bad)) == [("source.outage", "pd", "PD is away")]
    assert words(topology_events(good, bad)) == [("source.outage", "pd", "PD is away")]
    assert words(topology_events(bad, bad)) == []
    assert words(topology_events(bad, good)) == [("source.recovered", "pd", "PD answers again")]


def test_problems_and_strangers_are_told_once() -> None:
    problem = TopologyProblem(Source.PD, "/topology/tidb/x/info", "it is not JSON")
    after = Topology(Source.PD, other_keyspace={B: "7"}, problems=(problem,), is_complete=True)
    assert words(topology_events(Topology(Source.PD), after)) == [
        ("source.problem", problem.subject, f"{problem.subject} in PD is left out: it is not JSON"),
        ("node.foreign", B, f"{B} serves keyspace 7, so nothing is sent to it"),
    ]
    assert words(topology_events(after, replace(after))) == []
    (moved,) = topology_events(after, replace(after, other_keyspace={B: "8"}))
    assert moved[0] == "node.foreign"


def test_what_operators_ask_for_is_told_by_its_kind() -> None:
    asked = Intents(
        added={A: AddedNode(A)},
        removed={B: 1.0},
        drains={A: DrainIntent(1.0, 60)},
        weights={A: 5},
        labels={A: {"zone": "a"}},
    )
    told = words(intent_events(Intents(), asked))
    assert [kind for kind, _, _ in told] == [
        "intent.drain",
        "intent.remove",
        "intent.weight",
        "intent.labels",
        "intent.add",
    ]
    assert told[0] == ("intent.drain", A, f"an operator drains {A}; sessions that are left after 60 s stay")
    assert words(intent_events(asked, asked)) == []
    closing = replace(asked, drains={A: DrainIntent(1.0, 60, OnDeadline.CLOSE)})
    (told_closing,) = words(intent_events(asked, closing))
    assert told_closing[2].endswith("sessions that are left after 60 s are ended")
    back = words(intent_events(asked, Intents(added=asked.added, weights=asked.weights, labels=asked.labels)))
    assert [kind for kind, _, _ in back] == ["intent.readmit", "intent.undrain"]
    leaving = Intents(added={A: AddedNode(A)}, removed={A: 1.0})
    assert words(intent_events(leaving, Intents())) == []  # it has left


def test_what_came_of_the_sessions_of_a_node_is_one_sentence() -> None:
    assert drain_finished(A, DrainProgress(1.0, 12.4, 0, moved=90))[:3] == (
        "node.departure",
        A,
        f"{A}: 90 sessions moved to other nodes in 12 s",
    )
    told = drain_finished(A, DrainProgress(1.0, 60.0, 4, moved=90, failed={"slow": 2, "refused": 1}, lost=1))
    assert told.message == (
        f"{A}: 90 sessions moved to other nodes in 60 s, 3 tries to move one failed (slow 2, refused 1),"
        " 1 sessions were lost, 4 sessions are left"
    )
    assert told.data == {
        "seconds": 60.0,
        "moved": 90,
        "failed": {"slow": 2, "refused": 1},
        "lost": 1,
        "left": 4,
    }


def test_what_a_node_lacks_is_told_once() -> None:
    lacking = Health(migration_blockers=("its sessions cannot move",))
    (told,) = migration_blocker_events(A, Health(), lacking)
    assert told[:3] == ("node.hindrance", A, f"{A}: its sessions cannot move")
    assert is_warning(told.kind)
    assert (
        list(migration_blocker_events(A, lacking, lacking))
        == list(migration_blocker_events(A, lacking, Health()))
        == []
    )


def test_that_vital_signs_cannot_be_read_is_told_once_whatever_the_reasons() -> None:
    (told,) = node_metrics_events("", "Prometheus does not answer")
    assert told[:3] == ("vitals.outage", "nodes", "Prometheus does not answer")
    assert is_warning(told.kind)
    assert not list(node_metrics_events("Prometheus does not answer", "Prometheus answers HTTP 503"))
    (over,) = node_metrics_events("Prometheus answers HTTP 503", "")
    assert (over.kind, is_warning(over.kind)) == ("vitals.outage_over", False)
    assert not list(node_metrics_events("", ""))


def test_what_needs_a_person_is_a_warning() -> None:
    assert is_warning("envoy.nack")
    assert not is_warning("node.state")


def test_a_reload_is_told_by_when_it_takes_effect() -> None:
    assert reload_message(ReloadResult()).endswith("; nothing changed")
    message = reload_message(ReloadResult(("log.level", "nodes"), ("sql.listen",), ("pd.urls",)))
    assert message == (
        "the configuration was read again; in force now: log.level, nodes; for Envoys that start from now on:"
        " sql.listen; only after a restart of the control plane: pd.urls"
    )


def test_a_module_says_what_it_refused() -> None:
    told = module_config_rejected("envoy-1", ConfigRejection(1.0, "client", "unknown key `x`: remove it"))
    message = "its module refused the configuration of `client`: unknown key `x`: remove it"
    assert told[:3] == ("envoy.module_refusal", "envoy-1", message)
    assert is_warning(told.kind)
