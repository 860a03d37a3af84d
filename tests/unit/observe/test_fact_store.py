"""The fact store: latest facts, correct sums, and which facts require a new plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Resolution, Source, Topology
from controlplane.model.plan import Policy
from controlplane.model.traffic import ConfigRejection, ModuleReport, SessionCounts, Traffic
from controlplane.observe.fact_store import FactStore
from tests.support.controlplane.running_xds import RecordedEvents

POLICY = Policy(status_rise=2, status_fall=3, sql_rise=2, sql_fall=3)
A, B = "10.0.0.1:4000", "10.0.0.2:4000"
NODE_A, NODE_B = "tidb-a:4000", "tidb-b:4000"
KEY_A, KEY_B = (NODE_A, A), (NODE_B, B)


class RecordingStore(FactStore):
    """A fact store with a list `events` of the kind, subject and message of each event that it emitted."""

    def __init__(self) -> None:
        event_log = RecordedEvents()
        super().__init__(event_log, POLICY)
        self.events = event_log.recorded

    def take_changed(self) -> bool:
        """Return whether a plan was requested since the last call."""
        is_due = self.changed.is_set()
        self.changed.clear()
        return is_due

    def rejections(self, report: ModuleReport) -> list[str]:
        """Store a report; return the texts of the rejections for which the store emitted events."""
        self.events.clear()
        self.put_module_report(report)
        return [message.rpartition(": ")[2] for kind, _, message in self.events]


def check_result(status: str, consecutive: int) -> CheckResult:
    return CheckResult(CheckStatus(status), "a sentence", consecutive, 0.0)


def load(envoy: str, at: float, new_sessions: dict[str, int] | None = None, **sessions: int) -> EnvoyLoad:
    by_endpoint = {{"a": A, "b": B}[name]: count for name, count in sessions.items()}
    return EnvoyLoad(envoy, at, by_endpoint, new_sessions or {})


def test_topology_replaces_only_that_of_its_source() -> None:
    store = RecordingStore()
    first, second = Topology(Source.PD), Topology(Source.PD, is_complete=True)
    static = Topology(Source.STATIC)
    for topology in (first, static, second):
        store.put_topology(topology)
        assert store.take_changed()
    assert store.view().topologies == {Source.PD: second, Source.STATIC: static}


def test_only_a_changed_resolution_requires_a_plan() -> None:
    store = RecordingStore()
    answer = Resolution("tidb", "10.0.0.1")
    for resolution, requires_plan in (
        (answer, True),
        (replace(answer), False),
        (Resolution("tidb", "10.0.0.1", "it cannot be resolved"), True),
    ):
        store.put_resolution(resolution)
        assert store.take_changed() is requires_plan
    store.retain_hosts(set())
    store.put_resolution(answer)
    assert store.take_changed()


@pytest.mark.parametrize(
    ("before", "after", "requires_plan"),
    [
        (None, Health(), True),  # the first result for a node
        (Health(), Health(sql=check_result("pass", 1)), True),
        (Health(sql=check_result("pass", 1)), Health(sql=check_result("pass", 2)), True),  # reaches `rise`
        (Health(sql=check_result("pass", 3)), Health(sql=check_result("pass", 4)), False),
        (Health(sql=check_result("fail", 2)), Health(sql=check_result("fail", 3)), True),  # reaches `fall`
        (Health(sql=check_result("fail", 3)), Health(sql=check_result("fail", 4)), False),
        (Health(sql=check_result("pass", 9)), Health(sql=check_result("fail", 1)), True),
        (Health(status=check_result("pass", 9)), Health(status=check_result("stopping", 1)), True),
        (Health(sql=check_result("pass", 9)), Health(), True),  # the check was switched off
        (Health(connections=1), Health(connections=2), False),  # connection counts request no plan
    ],
)
def test_health_requires_a_plan_if_the_verdict_may_change(
    before: Health | None, after: Health, requires_plan: bool
) -> None:
    store = RecordingStore()
    if before is not None:
        store.put_health(A, before)
        store.take_changed()
    store.put_health(A, after)
    assert store.take_changed() is requires_plan
    assert store.view().health == {A: after}
    store.retain_nodes({B: None})
    assert store.view().health == {}


def test_latest_load_reports_are_summed_over_envoys() -> None:
    store = RecordingStore()
    store.put_load(load("one", 1.0, a=2))
    store.put_load(load("two", 1.0, a=3, b=1))
    assert store.view().sessions_by_endpoint == {A: 5, B: 1}
    store.put_load(load("two", 2.0, {A: 4, B: 6}, a=1))
    assert store.view().sessions_by_endpoint == {A: 3}
    assert store.view().new_sessions_per_second == 10.0  # 10 sessions within the 1 s between the reports
    assert store.view().new_sessions == {A: 4, B: 6}
    assert store.view().envoys_last_seen == {"one": 1.0, "two": 2.0}
    assert set(store.view().loads) == {"one", "two"}
    store.put_load(load("two", 2.001, {A: 4, B: 6}, a=1))
    assert store.view().new_sessions_per_second == 10.0  # the interval is too short for a new rate
    store.put_load(load("one", 2.0, {A: 1}))
    store.put_load(load("two", 3.0, {B: 2}))
    assert store.view().new_sessions == {A: 1, B: 2}
    store.forget_envoys(2.5)
    assert store.view().new_sessions == {B: 2}


def test_load_report_requires_a_plan_when_a_draining_node_is_empty() -> None:
    store = RecordingStore()
    store.put_load(load("one", 1.0))
    assert not store.take_changed()
    store.awaiting_empty = frozenset([KEY_A])
    store.put_load(load("one", 2.0, b=1))
    assert store.take_changed()
    store.awaiting_empty = frozenset([KEY_A])
    store.put_load(load("one", 3.0, a=1))
    assert not store.take_changed()
    store.awaiting_empty = frozenset([KEY_A])
    store.put_load(load("two", 3.0))
    assert not store.take_changed()  # Envoy `one` still has a session
    store.awaiting_empty = frozenset([KEY_A, KEY_B])
    store.put_load(load("one", 4.0))
    assert store.take_changed()


def test_forgetting_an_envoy_removes_its_sessions_and_rate() -> None:
    store = RecordingStore()
    store.put_load(load("old", 1.0, a=2))
    store.put_load(load("old", 2.0, {A: 3}, a=2))
    store.mark_envoy_seen("new", 50.0)
    store.mark_envoy_seen("new", 40.0)  # the time never decreases
    store.forget_envoys(seen_before=50.0)
    facts = store.view()
    assert (
        facts.envoys_last_seen,
        facts.loads,
        facts.sessions_by_endpoint,
        facts.new_sessions_per_second,
    ) == ({"new": 50.0}, {}, {}, 0.0)


REPORT_SEQUENCES = st.lists(
    st.tuples(
        st.sampled_from(["one", "two", "three"]),
        st.dictionaries(st.sampled_from([A, B, "[fd00::1]:4000"]), st.integers(0, 5)),
        st.sampled_from(["load", "counts", "counts without sessions", "forget earlier envoys", "no module"]),
    ),
    max_size=30,
)


@given(REPORT_SEQUENCES)
def test_sums_match_the_latest_reports(reports: list[tuple[str, dict[str, int], str]]) -> None:
    store = RecordingStore()
    loads: dict[str, dict[str, int]] = {}
    counted: dict[str, dict[str, int]] = {}
    for at, (envoy, sessions, action) in enumerate(reports):
        if action.startswith("counts"):
            has_counted_sessions = action == "counts"
            module_report = ModuleReport(
                envoy,
                float(at),
                session_counts=SessionCounts(
                    float(at), float(at), sessions, has_counted_sessions=has_counted_sessions
                ),
            )
            store.put_module_report(module_report)
            counted.pop(envoy, None)
            if has_counted_sessions:
                counted[envoy] = sessions
            continue
        store.put_load(EnvoyLoad(envoy, float(at), sessions))
        loads[envoy] = sessions
        if action == "forget earlier envoys":
            store.forget_envoys(float(at))
            loads, counted = {envoy: sessions}, {}
        if action == "no module":
            store.put_fleet([with_module(envoy, version="")], float(at), 1000.0)
            store.put_fleet([], float(at), 1000.0)
            counted.pop(envoy, None)
    facts = store.view()
    for address in (A, B, "[fd00::1]:4000"):
        by_load_report = sum(
            sessions.get(address, 0) for envoy, sessions in loads.items() if envoy not in counted
        )
        by_module = sum(sessions.get(address, 0) for sessions in counted.values())
        assert facts.sessions_by_endpoint.get(address, 0) == by_load_report
        assert facts.sessions_by_address.get(address, 0) == by_module
    assert facts.loads.keys() == loads.keys() == facts.envoys_last_seen.keys()


def test_only_envoys_with_one_acknowledged_stream_are_synced() -> None:
    """Envoys without a stream, with missing acknowledgements, or with a duplicate id are unsynced."""
    store = RecordingStore()
    store.put_load(load("reports only", 10.0))

    def status(name: str, **fields: Any) -> EnvoyStatus:
        return replace(EnvoyStatus(name, "10.9.9.9:1", "1.40.0", "none", 1.0, 10.0), **fields)

    fleet = [
        status("synced"),
        status("behind", has_acknowledged_endpoints=False),
        status("duplicate", streams=2),
        status("disconnected", connected_since=None),
    ]
    store.put_fleet(fleet, 10.0, 600.0)
    assert store.view().unsynced_envoys == {"reports only", "behind", "duplicate", "disconnected"}


def closed_acks_at(
    store: FactStore, at: float, *closed: str, is_published: bool = True, **fields: Any
) -> Any:
    """Store the status of Envoy `one`; return the nodes that it acknowledged as closed, with the times."""
    envoy = replace(EnvoyStatus("one", "10.9.9.9:1", "1.40.0", "none", 1.0, at), **fields)
    store.put_fleet([envoy], at, 600.0, closed, is_published=is_published)
    return store.view().closed_acks.get("one")


def test_envoy_acknowledges_closed_nodes_once_synced_and_published() -> None:
    store = RecordingStore()
    assert closed_acks_at(store, 1.0, A, is_published=False) == {}
    assert closed_acks_at(store, 2.0, A, has_acknowledged_endpoints=False) == {}
    assert closed_acks_at(store, 3.0, A) == {A: 3.0}
    # Earlier acknowledgements stay.
    assert closed_acks_at(store, 4.0, A, B, has_acknowledged_endpoints=False) == {A: 3.0}
    assert closed_acks_at(store, 5.0, A, B) == {A: 3.0, B: 5.0}
    assert closed_acks_at(store, 6.0, B, is_published=False) == {B: 5.0}
    assert closed_acks_at(store, 7.0, A, B) == {A: 7.0, B: 5.0}


@pytest.mark.parametrize("fields", [{"connected_since": None}, {"streams": 2}])
def test_reconnected_envoy_has_to_acknowledge_closed_nodes_again(fields: dict[str, Any]) -> None:
    store = RecordingStore()
    assert closed_acks_at(store, 1.0, A) == {A: 1.0}
    assert closed_acks_at(store, 2.0, A, **fields) is None
    assert closed_acks_at(store, 3.0, A) == {A: 3.0}
    assert closed_acks_at(store, 4.0, A, connected_since=3.5) == {A: 4.0}


def report(at: float, counts: dict[str, int] | None = None, **fields: Any) -> ModuleReport:
    rejections = {("session", text): count for text, count in (counts or {}).items()}
    return ModuleReport("one", at, rejections=rejections, **fields)


def test_config_rejection_is_reported_once_per_occurrence() -> None:
    store = RecordingStore()
    assert store.rejections(report(1.0)) == []
    assert store.rejections(report(2.0, {"bad key": 1})) == ["bad key"]
    assert store.rejections(report(3.0, {"bad key": 1})) == []
    assert store.rejections(report(4.0)) == []  # a new stream without all series yet
    assert store.rejections(report(5.0, {"bad key": 1})) == []
    assert store.rejections(report(6.0, {"bad key": 2})) == ["bad key"]
    assert store.rejections(report(7.0, {"bad key": 1})) == ["bad key"]  # the Envoy has restarted
    assert store.view().config_rejections == {"one": ConfigRejection(7.0, "session", "bad key")}


def test_remembered_config_rejections_are_bounded() -> None:
    store = RecordingStore()
    for at in range(1000):
        store.put_module_report(report(float(at), {f"text {at}": 1}))
    assert store.rejections(report(1000.0, {"text 999": 1})) == []
    assert store.rejections(report(1000.0, {"text 1": 1}))  # forgotten, so it counts as new


def test_module_report_is_forgotten_after_long_silence() -> None:
    store = RecordingStore()
    counts = complete_report(10.0, a=2).session_counts
    store.put_module_report(report(10.0, {"bad key": 1}, session_counts=counts))
    store.put_load(load("one", 100.0, b=1))
    store.forget_envoys(seen_before=10.0)
    assert set(store.view().module_reports) == {"one"}
    store.forget_envoys(seen_before=50.0)  # the Envoy is present, its module is silent
    facts = store.view()
    assert (facts.session_counts, facts.sessions_by_address, facts.sessions_by_endpoint) == ({}, {}, {B: 1})
    assert (dict(facts.module_reports), dict(facts.config_rejections), set(facts.envoys_last_seen)) == (
        {},
        {},
        {"one"},
    )
    assert store.rejections(report(60.0, {"bad key": 1}))


def ended_report(at: float, *, has_ended: bool = True, a: int = 0) -> ModuleReport:
    return replace(complete_report(at, a=a), has_ended=has_ended)


def disconnected(at: float) -> EnvoyStatus:
    return replace(with_module("one"), connected_since=None, last_seen=at)


def is_known(store: FactStore, status: EnvoyStatus, at: float) -> bool:
    """Return whether drains wait for the Envoy after this status."""
    store.put_fleet([status], at, 600.0)
    return "one" in store.view().envoys_last_seen


def test_envoy_that_has_ended_is_forgotten_once_it_is_disconnected() -> None:
    store = RecordingStore()
    connected = replace(with_module("one"), connected_since=1.0)
    store.put_module_report(ended_report(9.0, has_ended=False, a=1))
    assert is_known(store, connected, 9.0)
    store.put_module_report(ended_report(10.0))
    assert is_known(store, connected, 10.0)
    assert not is_known(store, disconnected(11.0), 11.0)
    store.put_load(load("one", 11.5, a=0))  # delayed by another replica
    assert not is_known(store, disconnected(11.0), 12.0)  # the status is repeated
    store.retain_nodes({NODE_A: None, "new:4000": None})
    assert not is_known(store, disconnected(11.0), 13.0)


def test_envoy_that_has_not_ended_is_remembered() -> None:
    store = RecordingStore()
    store.put_module_report(ended_report(10.0, has_ended=False))
    assert is_known(store, disconnected(11.0), 11.0)


def test_end_counts_only_for_the_process_that_has_reported_it() -> None:
    store = RecordingStore()
    store.put_module_report(ended_report(10.0))
    assert is_known(store, replace(with_module("one"), connected_since=11.0), 12.0)
    assert is_known(store, disconnected(13.0), 13.0)  # without a report of the new process
    store.put_module_report(ended_report(20.0))
    assert is_known(store, disconnected(40.0), 40.0)  # it was seen long after its end
    store.put_module_report(ended_report(50.0, has_ended=False))
    assert is_known(store, disconnected(51.0), 51.0)


def test_end_does_not_count_if_the_module_does_not_count_the_sessions() -> None:
    store = RecordingStore()
    store.put_load(load("one", 9.0, a=3))
    uncounted = replace(complete_report(10.0, has_counted_sessions=False), has_ended=True)
    store.put_module_report(uncounted)
    assert is_known(store, disconnected(11.0), 11.0)


def test_partial_module_report_adds_no_envoy_and_no_sessions() -> None:
    store = RecordingStore()
    partial = report(1.0, nodes={A: Traffic(sessions={"idle": 9})})
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(partial)
    assert not store.take_changed()
    facts = store.view()
    assert (
        facts.envoys_last_seen,
        facts.sessions_by_endpoint,
        facts.sessions_by_address,
        facts.session_counts,
    ) == ({}, {}, {}, {})


def complete_report(
    at: float, *, envoy: str = "one", has_counted_sessions: bool = True, **sessions: int
) -> ModuleReport:
    """Return a module report with complete session counts."""
    by_address = {{"a": NODE_A, "b": NODE_B}[name]: count for name, count in sessions.items()}
    counts = SessionCounts(at, at - 1.0, by_address, frozenset((NODE_A, NODE_B)), has_counted_sessions)
    return ModuleReport(envoy, at, session_counts=counts)


def test_module_counts_replace_load_report_counts() -> None:
    store = RecordingStore()
    store.put_load(load("one", 1.0, a=3))
    store.put_load(load("stock", 1.0, a=1))
    # Load reports do not show that two sessions have migrated.
    store.put_module_report(complete_report(1.5, a=1, b=2))
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_A: 1, NODE_B: 2})
    store.put_load(load("one", 2.0, {A: 4}, a=3))
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_A: 1, NODE_B: 2})
    assert store.view().new_sessions_per_second == 4.0
    store.put_module_report(complete_report(2.5, b=3))
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_B: 3})


def test_load_reports_count_while_module_has_never_served() -> None:
    """The Envoy may have loaded the module without using it."""
    store = RecordingStore()
    store.put_load(load("one", 1.0, a=3))
    store.put_module_report(complete_report(1.5, has_counted_sessions=False))
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 3}, {})
    store.put_module_report(complete_report(2.5, a=3))
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({}, {NODE_A: 3})


def test_module_counts_require_a_plan_when_a_draining_node_is_empty() -> None:
    store = RecordingStore()
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(complete_report(1.0, a=1))
    assert not store.take_changed()
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(complete_report(2.0, b=1))
    assert store.take_changed()
    store.awaiting_empty = frozenset([KEY_B])
    store.put_module_report(complete_report(2.0, b=1))
    assert not store.take_changed()
    store.put_load(load("stock", 2.0, a=1))
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(complete_report(3.0, b=1))
    assert not store.take_changed()


def test_counts_stay_until_a_new_stream_is_complete() -> None:
    store = RecordingStore()
    store.put_module_report(complete_report(1.0, a=2))
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(report(2.0, nodes={NODE_B: Traffic(sessions={"idle": 1})}))
    assert not store.take_changed()
    facts = store.view()
    assert (facts.session_counts["one"].at, facts.sessions_by_address) == (1.0, {NODE_A: 2})
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(complete_report(3.0, b=1))
    assert store.take_changed()
    assert facts.sessions_by_address == {NODE_B: 1}


def test_older_reports_through_another_replica_are_ignored() -> None:
    store = RecordingStore()
    store.put_load(load("one", 1.0, a=1))
    store.put_load(load("one", 2.0, {A: 4}, a=2))
    store.awaiting_empty = frozenset([KEY_A])
    store.put_load(load("one", 1.5, {A: 9}))
    assert not store.take_changed()
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.new_sessions, facts.new_sessions_per_second) == (
        {A: 2},
        {A: 4},
        4.0,
    )

    for at, moved, sessions in ((3.0, 0, 1), (5.0, 7, 1), (4.0, 5, 0), (6.0, 8, 1)):
        migrations = {NODE_A: {("moved", "ok"): moved}}
        module_report = replace(complete_report(at, a=sessions), migrations=migrations, is_first=at == 3.0)
        store.put_module_report(module_report)
        assert store.view().sessions_by_address == {NODE_A: 1}
    assert store.view().migrations[NODE_A] == {("moved", "ok"): 8}


def with_module(name: str, version: str = "1.5.0") -> EnvoyStatus:
    return EnvoyStatus(name, "10.9.9.9:1", "1.40.0", "module", 1.0, 10.0, module_version=version)


def test_load_reports_count_after_envoy_returns_without_module() -> None:
    store = RecordingStore()
    store.put_load(load("one", 1.0, a=2))
    store.put_module_report(complete_report(2.0, b=2))
    store.put_fleet([with_module("one")], 3.0, 600.0)
    facts = store.view()
    assert (facts.module_envoys, facts.sessions_by_address) == ({"one"}, {NODE_B: 2})
    # The Envoy disconnects for a moment.
    store.put_fleet([replace(with_module("one"), connected_since=None)], 3.0, 600.0)
    assert (store.view().module_envoys, facts.sessions_by_address) == ({"one"}, {NODE_B: 2})
    store.put_fleet([with_module("one", version="")], 3.0, 600.0)
    assert (store.view().module_envoys, facts.sessions_by_address, facts.sessions_by_endpoint) == (
        set(),
        {},
        {A: 2},
    )
    # A late report of the previous stream is ignored.
    store.awaiting_empty = frozenset([KEY_A])
    store.put_module_report(complete_report(4.0, b=2))
    assert not store.take_changed()
    assert (facts.sessions_by_address, facts.session_counts) == ({}, {})


def test_envoy_zones_follow_the_fleet() -> None:
    store = RecordingStore()
    status = replace(with_module("one"), zone="a")
    store.put_fleet([status, with_module("two")], 3.0, 600.0)
    assert store.view().envoy_zones == {"one": "a"}
    store.put_fleet([replace(status, zone="b"), replace(status, id="two", connected_since=None)], 3.0, 600.0)
    assert store.view().envoy_zones == {"one": "b", "two": "a"}
    store.put_fleet([with_module("two")], 3.0, 600.0)
    assert store.view().envoy_zones == {}


def test_sessions_and_traffic_of_forgotten_nodes_are_removed() -> None:
    store = RecordingStore()
    traffic = {NODE_A: Traffic(logins=1), NODE_B: Traffic(logins=2), "": Traffic()}
    store.put_module_report(replace(complete_report(1.0, a=2, b=3), nodes=traffic))
    store.retain_nodes({NODE_B: None})
    facts = store.view()
    assert set(facts.module_reports["one"].nodes) == {NODE_B, ""}
    assert facts.sessions_by_address == {NODE_B: 3}
    # If NODE_A returns, its counts are unknown until the next report.
    assert facts.session_counts["one"].complete_nodes == {NODE_B}


def test_latest_node_metrics_and_outage_are_kept() -> None:
    store = RecordingStore()
    assert (dict(store.view().node_metrics), store.view().node_metrics_outage) == ({}, "")
    metrics = {NODE_A: NodeMetrics(cpu=MetricValue(0.5, 1.0))}
    store.put_node_metrics(metrics, "")
    store.put_node_metrics(metrics, "Prometheus does not answer")
    assert store.view().node_metrics == metrics
    assert store.view().node_metrics_outage == "Prometheus does not answer"
    store.put_node_metrics({}, "")
    assert [kind for kind, _, _ in store.events] == ["node_metrics.outage", "node_metrics.outage_over"]
    assert dict(store.view().node_metrics) == {}


def test_acknowledgement_requires_a_plan_only_while_nodes_drain() -> None:
    store = RecordingStore()
    store.notify_acks_changed()
    assert not store.take_changed()
    store.awaiting_empty = frozenset([KEY_A])
    store.notify_acks_changed()
    assert store.take_changed()
