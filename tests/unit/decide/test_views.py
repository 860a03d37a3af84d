"""Views built from example facts."""

from __future__ import annotations

from dataclasses import replace

from controlplane.decide import views
from controlplane.model.capture import Capture, CaptureCounts
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.module_switches import ModuleSwitches, SwitchOverrides
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Node, Source, State, Topology, TopologyProblem
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.traffic import ConfigRejection, Ejection, ModuleReport, SessionCounts, Traffic
from controlplane.model.views import CaptureState, CaptureView, DrainProgress

A = "10.0.0.1:4000"
ACTIVE = NodePlan(Node(A, Source.PD, weight=40), State.ACTIVE, "it passes its checks", 0.0, endpoint=A)
LOADED = Facts(
    topologies={
        Source.PD: Topology(
            Source.PD,
            other_keyspace={"b:1": "7"},
            problems=(TopologyProblem(Source.PD, "key", "why"),),
            outage="PD is away",
        )
    },
    health={A: Health(connections=3)},
    loads={"one": EnvoyLoad("one", 1.0, {A: 2, "c:1": 4})},
    sessions_by_endpoint={A: 2, "c:1": 4},
)


def test_node_view_has_the_facts_behind_the_plan() -> None:
    drain = DrainIntent(1.0, 600.0)
    view = views.node_view(ACTIVE, LOADED, Intents(drains={A: drain}))
    assert (view.plan, view.weight, view.connections, view.sessions, view.drain) == (ACTIVE, 40, 3, 2, drain)
    unknown = views.node_view(ACTIVE, Facts(), Intents())
    assert (unknown.health, unknown.connections, unknown.sessions, unknown.drain) == (
        Health(),
        None,
        None,
        None,
    )


def test_node_view_has_recent_ejections() -> None:
    def report(envoy: str, at: float) -> ModuleReport:
        return ModuleReport(envoy, at, ejections={A: Ejection(envoy, "connect", 900.0)})

    reports = {envoy: report(envoy, at) for envoy, at in (("two", 990.0), ("one", 1000.0), ("old", 900.0))}
    facts = replace(LOADED, module_reports={**reports, "well": ModuleReport("well", 1000.0)})
    view = views.node_view(ACTIVE, facts, Intents(), now=1000.0)
    assert [(ejection.envoy, ejection.reason, ejection.since) for ejection in view.ejections] == [
        ("one", "connect", 900.0),
        ("two", "connect", 900.0),
    ]
    assert views.node_view(ACTIVE, LOADED, Intents(), now=1000.0).ejections == ()


def test_envoy_views_are_sorted_by_id() -> None:
    statuses = [EnvoyStatus(name, "", "", "none", None, 0.0) for name in ("two", "one")]
    assert [(view.status.id, view.sessions) for view in views.envoy_views(statuses, LOADED)] == [
        ("one", 6),
        ("two", None),
    ]


def test_sessions_come_from_the_module_if_present() -> None:
    facts = replace(
        LOADED,
        sessions_by_endpoint={},
        session_counts={"one": SessionCounts(1.0, 0.0, {A: 5, "b:1": 2})},
        sessions_by_address={A: 5, "b:1": 2},
    )
    progress = DrainProgress(0.0, 1.0, 5)
    view = views.node_view(ACTIVE, facts, Intents(), progress)
    assert (view.sessions, view.drain_progress) == (5, progress)
    (envoy,) = views.envoy_views([EnvoyStatus("one", "", "", "module", None, 0.0)], facts)
    assert envoy.sessions == 7


def test_node_view_has_rebalancing_sessions() -> None:
    rebalance = RebalanceState(1.0, "", 1, 6.0, {A: {"00000000000000aa": 3, "00000000000000bb": 4}})
    assert views.node_view(ACTIVE, LOADED, Intents(), None, rebalance).rebalancing_sessions == 7
    assert views.node_view(ACTIVE, LOADED, Intents(), None, RebalanceState()).rebalancing_sessions == 0


def test_only_connected_envoys_can_lack_the_module() -> None:
    statuses = [
        EnvoyStatus("one", "", "", "module", 1.0, 0.0),
        EnvoyStatus("two", "", "", "contrib", 1.0, 0.0),
        EnvoyStatus("gone", "", "", "none", None, 0.0),
    ]
    assert views.envoys_without_module(statuses) == ["two"]


def test_traffic_is_summed_over_envoys_and_nodes() -> None:
    rejection = ConfigRejection(1.0, "session", "bad key")
    facts = Facts(
        module_reports={
            "one": ModuleReport(
                "one", 1.0, nodes={A: Traffic(logins=1), "": Traffic(login_failures={"x": 1})}
            ),
            "two": ModuleReport("two", 1.0, nodes={A: Traffic(logins=2), "b:1": Traffic(logins=4)}),
            "new": ModuleReport("new", 1.0),
        },
        config_rejections={"two": rejection},
    )
    assert views.node_view(ACTIVE, facts, Intents()).traffic == Traffic(logins=3)
    statuses = [EnvoyStatus(name, "", "", "none", None, 0.0) for name in ("new", "one", "stock", "two")]
    envoys = views.envoy_views(statuses, facts)
    assert [view.traffic for view in envoys] == [
        Traffic(),
        Traffic(logins=1, login_failures={"x": 1}),
        None,
        Traffic(logins=6),
    ]
    assert [view.config_rejection for view in envoys] == [None, None, None, rejection]


def test_node_without_module_reports_has_no_traffic() -> None:
    assert views.node_view(ACTIVE, LOADED, Intents()).traffic is None
    silent = Facts(module_reports={"one": ModuleReport("one", 1.0)})
    assert views.node_view(ACTIVE, silent, Intents()).traffic == Traffic()


def test_problems_and_other_keyspaces_come_from_sources() -> None:
    assert [problem.subject for problem in views.topology_problems(LOADED)] == ["key"]
    assert dict(views.other_keyspace(LOADED)) == {"b:1": "7"}
    assert dict(views.other_keyspace(Facts())) == {}


def test_ready_with_published_plan_and_active_node() -> None:
    active, none = Plan({A: ACTIVE}), Plan()
    # An outage of PD is no problem while a node is active.
    assert views.readiness_problems(active, LOADED, is_published=True) == []
    assert views.readiness_problems(none, LOADED, is_published=True) == ["PD is away", "no node is active"]
    assert views.readiness_problems(none, Facts(), is_published=False) == ["no plan has been published yet"]


def test_node_view_drops_stale_metrics() -> None:
    metrics = NodeMetrics(cpu=MetricValue(0.5, 1000.0), memory=MetricValue(0.3, 1000.0))
    facts = Facts(node_metrics={A: metrics})
    shown = [views.node_view(ACTIVE, facts, Intents(), now=now).metrics for now in (1060, 1100, 1200)]
    assert shown == [metrics, NodeMetrics(cpu=metrics.cpu), None]
    assert views.node_view(ACTIVE, Facts(), Intents()).metrics is None


def test_envoy_view_has_the_switches_of_its_module() -> None:
    statuses = [EnvoyStatus(name, "", "", kind, 1.0, 1.0) for name, kind in (("a", "module"), ("b", "none"))]
    intents = Intents(switch_overrides={"a": SwitchOverrides(offload=True)})
    overridden, without_module = views.envoy_views(
        statuses, Facts(), intents, ModuleSwitches(offload=False, migration=False)
    )
    assert overridden.switches == ModuleSwitches(offload=True, migration=False)
    assert (overridden.overrides, overridden.switched_off) == (SwitchOverrides(offload=True), ("migration",))
    assert (without_module.switches, without_module.switched_off) == (None, ())
    facts = Facts(module_reports={"a": ModuleReport("a", 1.0, runtime_off=frozenset({"offload"}))})
    by_runtime, _ = views.envoy_views(statuses, facts, intents)
    assert by_runtime.switches == ModuleSwitches(offload=False)
    assert (by_runtime.runtime_off, by_runtime.switched_off) == (frozenset({"offload"}), ("offload",))


def test_capture_view_has_the_counts_of_this_capture_only() -> None:
    capture = Capture("one", 10.0, 20.0)
    counts = {"a": CaptureCounts(20_000, True, 7), "b": CaptureCounts(19_000, True, 9)}
    reports = {envoy: ModuleReport(envoy, 12.0, capture=count) for envoy, count in counts.items()}
    statuses = [
        EnvoyStatus(envoy, "10.0.0.1", "1.40.0", filter_, connected_since, 12.0)
        for envoy, filter_, connected_since in (
            ("a", "module", 1.0),
            ("b", "module", 1.0),
            ("plain", "none", 1.0),
            ("gone", "module", None),
        )
    ]

    def rows(capture: Capture, now: float) -> list[tuple[str, int | None, str]]:
        view = views.capture_view(capture, statuses, Facts(module_reports=reports), "/captures", now)
        return [
            (row.envoy, row.counts.records if row.counts is not None else None, row.problem)
            for row in view.envoys
        ]

    no_module = "it does not use Tidevoy's module"
    assert rows(capture, 12.0) == [("a", 7, ""), ("b", None, ""), ("plain", None, no_module)]
    assert rows(replace(capture, envoys=("a", "gone")), 12.0) == [
        ("a", 7, ""),
        ("gone", None, "it is not connected"),
    ]
    assert rows(capture, 20.0) == [("a", 7, "")]
    view = views.capture_view(capture, statuses, Facts(), "/captures", 25.0)
    assert (view.state, view.ended_at, view.directory) == (CaptureState.ENDED, 20.0, "/captures/one")
    assert views.capture_view(None, statuses, Facts(), None, 25.0) == CaptureView()
