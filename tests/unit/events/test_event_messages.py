"""Event messages: one sentence per change, and none without a change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from controlplane.events.event_messages import (
    EventDraft,
    capture_events,
    check_problem_events,
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
from controlplane.model.capture import Capture
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.module_switches import SwitchOverrides
from controlplane.model.nodes import Node, Source, State, Topology, TopologyProblem
from controlplane.model.plan import EdsHealth, Factor, NodePlan, Plan, RebalanceState
from controlplane.model.rules import StatementRule
from controlplane.model.traffic import ConfigRejection
from controlplane.model.views import DrainProgress, ReloadResult

A, B = "tidb-0:4000", "tidb-1:4000"


def planned(address: str, state: State = State.ACTIVE, **fields: object) -> NodePlan:
    base = NodePlan(Node(address, Source.PD), state, "it passes its checks", 0.0, endpoint="10.0.0.1:4000")
    return replace(base, **fields)  # type: ignore[arg-type]


def messages(events: Iterable[EventDraft]) -> list[tuple[str, str, str]]:
    return [event[:3] for event in events]


def plan(*nodes: NodePlan, panic_reason: str = "") -> Plan:
    return Plan({node.node.address: node for node in nodes}, panic_reason)


def test_new_node_is_reported_with_source_and_state() -> None:
    assert messages(node_events(Plan(), plan(planned(A)))) == [
        ("node.discovered", A, f"{A} was discovered in PD"),
        ("node.state", A, f"{A} is active: it passes its checks"),
    ]


def test_only_state_changes_and_drain_reasons_are_reported() -> None:
    before = plan(planned(A))
    assert messages(node_events(before, plan(planned(A, weight=9, reason="another")))) == []
    draining = plan(planned(A, State.DRAINING, reason="drained by an operator"))
    (event,) = node_events(before, draining)
    assert event[:3] == ("node.state", A, f"{A} is draining: drained by an operator")
    assert event.data == {"from": "active", "to": "draining", "reason": "drained by an operator"}
    overdue = plan(planned(A, State.DRAINING, reason="its deadline has passed"))
    assert messages(node_events(draining, overdue)) == [
        ("node.reason", A, f"{A} is draining: its deadline has passed")
    ]


def test_changed_resolution_is_reported_but_not_the_first() -> None:
    (event,) = messages(node_events(plan(planned(A)), plan(planned(A, endpoint="10.0.0.2:4000"))))
    assert event == (
        "node.address_changed",
        A,
        f"{A} now resolves to 10.0.0.2:4000 (previously 10.0.0.1:4000)",
    )
    assert messages(node_events(plan(planned(A, endpoint=None)), plan(planned(A)))) == []


def test_forgotten_nodes_are_reported_in_address_order() -> None:
    nodes = [planned(f"tidb-{n}:4000") for n in range(9)]
    events = messages(node_events(plan(*reversed(nodes)), Plan()))
    assert [subject for _, subject, _ in events] == [node.node.address for node in nodes]
    assert {kind for kind, _, _ in events} == {"node.forgotten"}


def test_panic_threshold_is_reported_when_it_starts_and_ends() -> None:
    active, inactive = plan(panic_reason="only 0 of 2 nodes pass"), plan()
    assert messages(node_events(inactive, active)) == [
        ("balance.panic_threshold", "nodes", "only 0 of 2 nodes pass")
    ]
    assert messages(node_events(active, plan(panic_reason="only 1 of 4 nodes pass"))) == []
    assert [kind for kind, _, _ in messages(node_events(active, inactive))] == [
        "balance.panic_threshold_over"
    ]


def test_factor_is_reported_when_its_level_changes_not_its_share() -> None:
    failure = "60% of its requests to PD fail"
    steps: tuple[dict[str, Factor], ...] = (
        {},
        {"health": Factor(0.9, 0.02, 2, failure)},
        {"health": Factor(0.8, 0.02, 2, failure)},
        {"health": Factor(0.9, 1.0, 0, "not known"), "cpu": Factor(1.0, 1.0, 2, "as most")},
        {},
    )
    plans = [plan(planned(A, eds_health=EdsHealth.HEALTHY, factors=factors)) for factors in steps]
    events = [list(node_events(before, after)) for before, after in itertools.pairwise(plans)]
    assert events == [
        [
            EventDraft(
                "node.factor",
                A,
                f"{A}: {failure}; its share of the sessions changes to 2%",
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
                f"{A}: its health no longer reduces its share of the sessions: it is not known",
                {"factor": "health", "from": 2, "to": 0},
            ),
        ],
        [
            EventDraft(
                "node.factor",
                A,
                f"{A}: its CPU no longer reduces its share of the sessions",
                {"factor": "cpu", "from": 2, "to": 0},
            )
        ],
    ]
    unhealthy = plan(planned(A, State.UNHEALTHY, eds_health=EdsHealth.UNHEALTHY))
    # The factor is gone, but only because the node is out of service.
    assert [event.kind for event in node_events(plans[1], unhealthy)] == ["node.state"]


def test_rebalance_is_reported_at_start_and_end_not_per_round() -> None:
    reason = f"{B} has 2 sessions and its share is 11"
    first = RebalanceState(1.0, reason, 1, 6.0, {A: {"x": 4, "y": 5}}, {B: {"x": 4, "y": 5}})
    started = Plan(rebalance=first)
    (event,) = rebalance_events(Plan(), started)
    assert (event.kind, event.subject, event.data) == ("balance.rebalance", "nodes", {"asked": {A: 9}})
    assert event.message.endswith(f"to nodes with fewer sessions than their share: {reason}")
    second = Plan(rebalance=replace(first, round=2, outgoing={A: {"x": 1}}))
    assert list(rebalance_events(started, second)) == list(rebalance_events(started, started)) == []
    over = Plan(rebalance=RebalanceState(None, "it was switched off", 2, 6.0))
    (event,) = rebalance_events(second, over)
    assert event[:3] == (
        "balance.rebalance_over",
        "nodes",
        "rebalancing ended: it was switched off",
    )
    assert list(rebalance_events(over, over)) == []


def test_small_rebalance_is_not_reported() -> None:
    few = Plan(
        rebalance=RebalanceState(None, f"{A} has 9 sessions and its share is 6", 1, 6.0, {A: {"x": 3}})
    )
    over = Plan(rebalance=RebalanceState(None, "all nodes have about their share", 1, 6.0))
    assert list(rebalance_events(Plan(), few)) == list(rebalance_events(few, over)) == []


def test_source_outage_is_reported_at_start_and_end() -> None:
    available = Topology(Source.PD, is_complete=True)
    unavailable = replace(available, outage="PD is away")
    assert messages(topology_events(None, available)) == []
    assert messages(topology_events(None, unavailable)) == [("source.outage", "pd", "PD is away")]
    assert messages(topology_events(available, unavailable)) == [("source.outage", "pd", "PD is away")]
    assert messages(topology_events(unavailable, unavailable)) == []
    assert messages(topology_events(unavailable, available)) == [
        ("source.recovered", "pd", "PD answers again")
    ]


def test_source_problems_and_other_keyspaces_are_reported_once() -> None:
    problem = TopologyProblem(Source.PD, "/topology/tidb/x/info", "it is not JSON")
    after = Topology(Source.PD, other_keyspace={B: "7"}, problems=(problem,), is_complete=True)
    assert messages(topology_events(Topology(Source.PD), after)) == [
        ("source.problem", problem.subject, f"{problem.subject} in PD is ignored: it is not JSON"),
        ("node.other_keyspace", B, f"{B} serves keyspace 7, so it gets no sessions"),
    ]
    assert messages(topology_events(after, replace(after))) == []
    (changed,) = topology_events(after, replace(after, other_keyspace={B: "8"}))
    assert changed[0] == "node.other_keyspace"


def test_intents_are_reported_by_kind() -> None:
    intents = Intents(
        added={A: AddedNode(A)},
        removed={B: 1.0},
        drains={A: DrainIntent(1.0, 60)},
        weights={A: 5},
        labels={A: {"zone": "a"}},
    )
    events = messages(intent_events(Intents(), intents))
    assert [kind for kind, _, _ in events] == [
        "intent.drain",
        "intent.remove",
        "intent.weight",
        "intent.labels",
        "intent.add",
    ]
    assert events[0] == ("intent.drain", A, f"an operator drains {A}; sessions that remain after 60 s stay")
    assert messages(intent_events(intents, intents)) == []
    closing = replace(intents, drains={A: DrainIntent(1.0, 60, OnDeadline.CLOSE)})
    (closing_event,) = messages(intent_events(intents, closing))
    assert closing_event[2].endswith("sessions that remain after 60 s are closed")
    withdrawals = messages(
        intent_events(intents, Intents(added=intents.added, weights=intents.weights, labels=intents.labels))
    )
    assert [kind for kind, _, _ in withdrawals] == ["intent.restore", "intent.undrain"]
    removing = Intents(added={A: AddedNode(A)}, removed={A: 1.0})
    assert messages(intent_events(removing, Intents())) == []  # the removal is complete


def test_changes_of_rules_are_reported() -> None:
    one, two, other_two = (
        StatementRule(name, text) for name, text in (("one", "1"), ("two", "2"), ("two", "3"))
    )
    (event,) = intent_events(
        Intents(rules=(one, two)), Intents(rules=(other_two, StatementRule("three", "")))
    )
    assert event[:2] == ("intent.rules", "rules")
    assert event.message.endswith("statements: added three; changed two; removed one")
    assert event.data == {"added": ["three"], "changed": ["two"], "removed": ["one"]}
    (event,) = intent_events(Intents(rules=(one, two)), Intents(rules=(two, one)))
    assert event.message.endswith("statements: another order")


def test_start_and_end_of_a_capture_are_reported() -> None:
    one, two = (Plan(capture=Capture(name, 0.0, 90.0, users=("a", "b"))) for name in ("one", "two"))
    (event,) = capture_events(Plan(), one, 0.0)
    assert event[:2] == ("capture.started", "one")
    assert event.message == "the capture one has started, for 1.5 min: users a, b"
    assert event.data == {"until": 90.0, "envoys": [], "users": ["a", "b"], "groups": []}
    assert [event.message for event in capture_events(one, Plan(), 90.0)] == [
        "the capture one has ended: its time is over"
    ]
    assert [event[:2] for event in capture_events(one, two, 5.0)] == [
        ("capture.ended", "one"),
        ("capture.started", "two"),
    ]
    assert list(capture_events(one, one, 5.0)) == []


def test_switches_of_an_envoy_are_reported() -> None:
    off = Intents(switch_overrides={"one": SwitchOverrides(offload=False, migration=True)})
    (event,) = intent_events(Intents(), off)
    assert event[:3] == (
        "intent.envoy_switches",
        "one",
        "one: offload is switched off, migration is switched on",
    )
    assert event.data == {"offload": "off", "migration": "on"}
    (event,) = intent_events(off, Intents())
    assert event.message == "one: offload follows the settings, migration follows the settings"
    assert event.data == {"offload": None, "migration": None}


def test_readiness_of_an_envoy_is_reported() -> None:
    off = Intents(switch_overrides={"one": SwitchOverrides(ready=False)})
    (event,) = intent_events(Intents(), off)
    assert event[:3] == ("intent.envoy_ready", "one", "an operator sets one to not ready for new clients")
    assert event.data == {"ready": False}
    (event,) = intent_events(off, Intents())
    assert (event.message, event.data) == ("an operator sets one to ready for new clients", {"ready": True})


def test_finished_drain_is_summarized_in_one_sentence() -> None:
    assert drain_finished(A, DrainProgress(1.0, 12.4, 0, migrated=90))[:3] == (
        "node.drain_finished",
        A,
        f"{A}: 90 sessions migrated to other nodes in 12 s",
    )
    event = drain_finished(
        A, DrainProgress(1.0, 60.0, 4, migrated=90, failed={"slow": 2, "refused": 1}, lost=1)
    )
    assert event.message == (
        f"{A}: 90 sessions migrated to other nodes in 60 s, 3 migration attempts failed (slow 2, refused 1),"
        " 1 sessions were lost, 4 sessions remain"
    )
    assert event.data == {
        "seconds": 60.0,
        "migrated": 90,
        "failed": {"slow": 2, "refused": 1},
        "lost": 1,
        "left": 4,
    }


def test_misconfigured_check_is_reported_once() -> None:
    def health(status: CheckStatus, consecutive: int = 1, reason: str = "wrong password") -> Health:
        return Health(statement=CheckResult(status, reason, consecutive, 0.0))

    misconfigured = health(CheckStatus.MISCONFIGURED)
    for before in (Health(), health(CheckStatus.PASS), health(CheckStatus.MISCONFIGURED, 3, "no user")):
        (event,) = check_problem_events(A, before, misconfigured)
        assert event[:3] == ("node.check_misconfigured", A, f"{A} is not checked: wrong password")
        assert is_warning(event.kind)
    assert not list(check_problem_events(A, misconfigured, health(CheckStatus.MISCONFIGURED, 2)))
    for status in (CheckStatus.PASS, CheckStatus.FAIL, CheckStatus.FULL):
        assert not list(check_problem_events(A, misconfigured, health(status)))


def test_migration_blocker_is_reported_once() -> None:
    blocked = Health(migration_blockers=("its sessions cannot migrate",))
    (event,) = migration_blocker_events(A, Health(), blocked)
    assert event[:3] == ("node.migration_blocker", A, f"{A}: its sessions cannot migrate")
    assert is_warning(event.kind)
    assert (
        list(migration_blocker_events(A, blocked, blocked))
        == list(migration_blocker_events(A, blocked, Health()))
        == []
    )


def test_node_metrics_outage_is_reported_once_for_all_reasons() -> None:
    (event,) = node_metrics_events("", "Prometheus does not answer")
    assert event[:3] == ("node_metrics.outage", "nodes", "Prometheus does not answer")
    assert is_warning(event.kind)
    assert not list(node_metrics_events("Prometheus does not answer", "Prometheus answers HTTP 503"))
    (over,) = node_metrics_events("Prometheus answers HTTP 503", "")
    assert (over.kind, is_warning(over.kind)) == ("node_metrics.outage_over", False)
    assert not list(node_metrics_events("", ""))


def test_kinds_that_need_attention_are_warnings() -> None:
    assert is_warning("envoy.nack")
    assert not is_warning("node.state")


def test_reload_message_says_when_settings_take_effect() -> None:
    assert reload_message(ReloadResult()).endswith("; nothing changed")
    message = reload_message(
        ReloadResult(("log.level", "nodes"), ("sql.max_connections",), ("sql.listen",), ("pd.urls",))
    )
    assert message == (
        "the configuration was reloaded; applied now: log.level, nodes; applied by Envoys with the module:"
        " sql.max_connections; applies to Envoys that start from now on: sql.listen; applies after a restart"
        " of the control plane: pd.urls"
    )


def test_module_config_rejection_is_reported_with_its_text() -> None:
    event = module_config_rejected("envoy-1", ConfigRejection(1.0, "client", "unknown key `x`: remove it"))
    message = "its module rejected the configuration of `client`: unknown key `x`: remove it"
    assert event[:3] == ("envoy.config_rejected", "envoy-1", message)
    assert is_warning(event.kind)
