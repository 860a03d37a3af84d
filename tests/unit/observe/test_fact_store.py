"""Facts are kept as the latest of each kind, sums stay right, and only news asks for a decision."""

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

POLICY = Policy(status_rise=2, status_fall=3, sql_rise=2, sql_fall=3)
A, B = "10.0.0.1:4000", "10.0.0.2:4000"
NODE_A, NODE_B = "tidb-a:4000", "tidb-b:4000"
AT_A, AT_B = (NODE_A, A), (NODE_B, B)


def probe(outcome: str, streak: int) -> CheckResult:
    return CheckResult(CheckStatus(outcome), "a sentence", streak, 0.0)


def load(envoy: str, at: float, opened: dict[str, int] | None = None, **live: int) -> EnvoyLoad:
    return EnvoyLoad(envoy, at, {{"a": A, "b": B}[name]: n for name, n in live.items()}, opened or {})


def test_a_topology_replaces_that_of_its_source_only() -> None:
    store = FactStore()
    first, second = Topology(Source.PD), Topology(Source.PD, is_complete=True)
    static = Topology(Source.STATIC)
    assert store.put_topology(first) is None
    assert store.put_topology(static) is None
    assert store.put_topology(second) is first
    assert store.view().topologies == {Source.PD: second, Source.STATIC: static}


def test_only_a_changed_answer_of_dns_is_news() -> None:
    store = FactStore()
    answer = Resolution("tidb", "10.0.0.1")
    assert store.put_resolution(answer)
    assert not store.put_resolution(replace(answer))
    assert store.put_resolution(Resolution("tidb", "10.0.0.1", "it cannot be resolved"))
    store.retain_hosts(set())
    assert store.put_resolution(answer)


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        (None, Health(), True),  # the first word on a node
        (Health(), Health(sql=probe("pass", 1)), True),
        (Health(sql=probe("pass", 1)), Health(sql=probe("pass", 2)), True),  # may be the `rise`
        (Health(sql=probe("pass", 3)), Health(sql=probe("pass", 4)), False),
        (Health(sql=probe("fail", 2)), Health(sql=probe("fail", 3)), True),  # may be the `fall`
        (Health(sql=probe("fail", 3)), Health(sql=probe("fail", 4)), False),
        (Health(sql=probe("pass", 9)), Health(sql=probe("fail", 1)), True),
        (Health(status=probe("pass", 9)), Health(status=probe("stopping", 1)), True),
        (Health(sql=probe("pass", 9)), Health(), True),  # the check was switched off
        (Health(connections=1), Health(connections=2), False),  # counts wait for the next tick
    ],
)
def test_a_check_is_news_when_it_may_turn_a_verdict(before: Health | None, after: Health, news: bool) -> None:
    store = FactStore()
    if before is not None:
        store.put_health(A, before, POLICY)
    assert store.put_health(A, after, POLICY) is news
    assert store.view().health == {A: after}
    store.retain_nodes({B: None})
    assert store.view().health == {}


def test_reports_are_summed_over_the_envoys_and_the_latest_of_each_counts() -> None:
    store = FactStore()
    store.put_load(load("one", 1.0, a=2), ())
    store.put_load(load("two", 1.0, a=3, b=1), ())
    assert store.view().sessions_by_endpoint == {A: 5, B: 1}
    store.put_load(load("two", 2.0, {A: 4, B: 6}, a=1), ())
    assert store.view().sessions_by_endpoint == {A: 3}
    assert store.view().new_sessions_per_second == 10.0  # opened in the one second between its reports
    assert store.view().new_sessions == {A: 4, B: 6}
    assert store.view().envoys_last_seen == {"one": 1.0, "two": 2.0}
    assert set(store.view().loads) == {"one", "two"}
    store.put_load(load("two", 2.001, {A: 4, B: 6}, a=1), ())
    assert store.view().new_sessions_per_second == 10.0  # the two were read one right after the other
    store.put_load(load("one", 2.0, {A: 1}), ())
    store.put_load(load("two", 3.0, {B: 2}), ())
    assert store.view().new_sessions == {A: 1, B: 2}
    store.forget_envoys(2.5)
    assert store.view().new_sessions == {B: 2}


def test_a_report_is_news_when_nobody_is_left_where_that_is_awaited() -> None:
    store = FactStore()
    assert not store.put_load(load("one", 1.0), ())
    assert store.put_load(load("one", 2.0, b=1), (AT_A,))
    assert not store.put_load(load("one", 3.0, a=1), (AT_A,))
    assert not store.put_load(load("two", 3.0), (AT_A,))  # the other Envoy still has one
    assert store.put_load(load("one", 4.0), (AT_A, AT_B))


def test_an_envoy_that_is_forgotten_takes_its_sessions_and_its_rate_along() -> None:
    store = FactStore()
    store.put_load(load("old", 1.0, a=2), ())
    store.put_load(load("old", 2.0, {A: 3}, a=2), ())
    store.mark_envoy_seen("new", 50.0)
    store.mark_envoy_seen("new", 40.0)  # no step back
    store.forget_envoys(seen_before=50.0)
    facts = store.view()
    assert (
        facts.envoys_last_seen,
        facts.loads,
        facts.sessions_by_endpoint,
        facts.new_sessions_per_second,
    ) == ({"new": 50.0}, {}, {}, 0.0)


REPORTS = st.lists(
    st.tuples(
        st.sampled_from(["one", "two", "three"]),
        st.dictionaries(st.sampled_from([A, B, "[fd00::1]:4000"]), st.integers(0, 5)),
        st.sampled_from(["load", "census", "census of none", "forget before it", "no module"]),
    ),
    max_size=30,
)


@given(REPORTS)
def test_the_sums_are_those_of_the_latest_reports(reports: list[tuple[str, dict[str, int], str]]) -> None:
    store = FactStore()
    loads: dict[str, dict[str, int]] = {}
    counted: dict[str, dict[str, int]] = {}
    for at, (envoy, sessions, what) in enumerate(reports):
        if what.startswith("census"):
            has_served = what == "census"
            told = ModuleReport(
                envoy,
                float(at),
                session_counts=SessionCounts(float(at), float(at), sessions, has_served=has_served),
            )
            store.put_module_report(told)
            store.put_session_counts(told, ())
            counted.pop(envoy, None)
            if has_served:
                counted[envoy] = sessions
            continue
        store.put_load(EnvoyLoad(envoy, float(at), sessions), ())
        loads[envoy] = sessions
        if what == "forget before it":
            store.forget_envoys(float(at))
            loads, counted = {envoy: sessions}, {}
        if what == "no module":
            store.put_fleet([with_module(envoy, version="")], float(at), 1000.0)
            store.put_fleet([], float(at), 1000.0)
            counted.pop(envoy, None)
    facts = store.view()
    for place in (A, B, "[fd00::1]:4000"):
        by_loads = (each.get(place, 0) for envoy, each in loads.items() if envoy not in counted)
        assert facts.sessions_by_endpoint.get(place, 0) == sum(by_loads)
        assert facts.sessions_by_address.get(place, 0) == sum(each.get(place, 0) for each in counted.values())
    assert facts.loads.keys() == loads.keys() == facts.envoys_last_seen.keys()


def test_only_envoys_whose_stream_shows_that_they_follow_are_trusted() -> None:
    """One that reports loads but has no stream, one that is behind, one that shares its id: none is."""
    store = FactStore()
    store.put_load(load("reports only", 10.0), ())

    def status(name: str, **fields: Any) -> EnvoyStatus:
        return replace(EnvoyStatus(name, "10.9.9.9:1", "1.40.0", "none", 1.0, 10.0), **fields)

    fleet = [
        status("good"),
        status("behind", eds_acked=False),
        status("twins", streams=2),
        status("left", connected_since=None),
    ]
    store.put_fleet(fleet, 10.0, 600.0)
    assert store.view().unsynced_envoys == {"reports only", "behind", "twins", "left"}


def heeds(store: FactStore, at: float, *closed: str, is_published: bool = True, **fields: Any) -> Any:
    """Since when the one Envoy has known that these nodes are closed, as it was looked at then."""
    envoy = replace(EnvoyStatus("one", "10.9.9.9:1", "1.40.0", "none", 1.0, at), **fields)
    store.put_fleet([envoy], at, 600.0, closed, is_published=is_published)
    return store.view().closed_acks.get("one")


def test_an_envoy_knows_that_a_node_is_closed_when_it_follows_what_says_so() -> None:
    store = FactStore()
    assert heeds(store, 1.0, A, is_published=False) == {}
    assert heeds(store, 2.0, A, eds_acked=False) == {}
    assert heeds(store, 3.0, A) == {A: 3.0}
    assert heeds(store, 4.0, A, B, eds_acked=False) == {A: 3.0}  # what is new changes nothing of that
    assert heeds(store, 5.0, A, B) == {A: 3.0, B: 5.0}
    assert heeds(store, 6.0, B, is_published=False) == {B: 5.0}
    assert heeds(store, 7.0, A, B) == {A: 7.0, B: 5.0}


@pytest.mark.parametrize("fields", [{"connected_since": None}, {"streams": 2}])
def test_what_an_envoy_knows_that_was_away_is_known_anew(fields: dict[str, Any]) -> None:
    store = FactStore()
    assert heeds(store, 1.0, A) == {A: 1.0}
    assert heeds(store, 2.0, A, **fields) is None
    assert heeds(store, 3.0, A) == {A: 3.0}
    assert heeds(store, 4.0, A, connected_since=3.5) == {A: 4.0}


def report(at: float, counts: dict[str, int] | None = None, **more: Any) -> ModuleReport:
    refusals = {("session", text): count for text, count in (counts or {}).items()}
    return ModuleReport("one", at, rejections=refusals, **more)


def test_a_refusal_is_told_once_and_again_when_it_happens_again() -> None:
    store = FactStore()
    assert store.put_module_report(report(1.0)) == []
    assert store.put_module_report(report(2.0, {"bad key": 1})) == [
        ConfigRejection(2.0, "session", "bad key")
    ]
    assert store.put_module_report(report(3.0, {"bad key": 1})) == []
    assert (
        store.put_module_report(report(4.0)) == []
    )  # a stream that began anew, of which a part is still to come
    assert store.put_module_report(report(5.0, {"bad key": 1})) == []
    assert store.put_module_report(report(6.0, {"bad key": 2})) == [
        ConfigRejection(6.0, "session", "bad key")
    ]
    assert store.put_module_report(report(7.0, {"bad key": 1})) == [
        ConfigRejection(7.0, "session", "bad key")
    ]  # restarted
    assert store.view().config_rejections == {"one": ConfigRejection(7.0, "session", "bad key")}


def test_refusals_that_are_remembered_are_bounded() -> None:
    store = FactStore()
    for at in range(1000):
        store.put_module_report(report(float(at), {f"text {at}": 1}))
    assert store.put_module_report(report(1000.0, {"text 999": 1})) == []
    assert store.put_module_report(report(1000.0, {"text 1": 1})) != []  # long forgotten


def test_what_a_module_told_goes_when_it_has_been_silent_for_long() -> None:
    store = FactStore()
    store.put_module_report(report(10.0, {"bad key": 1}))
    store.mark_envoy_seen("one", 100.0)
    store.forget_envoys(seen_before=10.0)
    assert set(store.view().module_reports) == {"one"}
    store.forget_envoys(seen_before=50.0)  # the Envoy is there, its module is not
    facts = store.view()
    assert (dict(facts.module_reports), dict(facts.config_rejections), set(facts.envoys_last_seen)) == (
        {},
        {},
        {"one"},
    )
    assert store.put_module_report(report(60.0, {"bad key": 1})) != []


def test_a_report_alone_makes_no_envoy_and_no_sessions() -> None:
    store = FactStore()
    partial = report(1.0, nodes={A: Traffic(sessions={"idle": 9})})
    store.put_module_report(partial)
    assert not store.put_session_counts(partial, (AT_A,))
    facts = store.view()
    assert (
        facts.envoys_last_seen,
        facts.sessions_by_endpoint,
        facts.sessions_by_address,
        facts.session_counts,
    ) == ({}, {}, {}, {})


def census(at: float, *, envoy: str = "one", has_served: bool = True, **sessions: int) -> ModuleReport:
    """A report of a module that has told all there is."""
    there = {{"a": NODE_A, "b": NODE_B}[name]: count for name, count in sessions.items()}
    counted = SessionCounts(at, at - 1.0, there, frozenset((NODE_A, NODE_B)), has_served)
    return ModuleReport(envoy, at, session_counts=counted)


def test_where_a_module_counts_load_reports_do_not() -> None:
    store = FactStore()
    store.put_load(load("one", 1.0, a=3), ())
    store.put_load(load("stock", 1.0, a=1), ())
    store.put_session_counts(census(1.5, a=1, b=2), ())  # two have moved, which the load report cannot know
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_A: 1, NODE_B: 2})
    store.put_load(load("one", 2.0, {A: 4}, a=3), ())
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_A: 1, NODE_B: 2})
    assert store.view().new_sessions_per_second == 4.0
    store.put_session_counts(census(2.5, b=3), ())
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 1}, {NODE_B: 3})


def test_a_module_that_never_had_a_session_leaves_counting_to_load_reports() -> None:
    """Its Envoy may not use it, whatever it has loaded."""
    store = FactStore()
    store.put_load(load("one", 1.0, a=3), ())
    store.put_session_counts(census(1.5, has_served=False), ())
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({A: 3}, {})
    store.put_session_counts(census(2.5, a=3), ())
    assert (facts.sessions_by_endpoint, facts.sessions_by_address) == ({}, {NODE_A: 3})


def test_a_census_is_news_when_nobody_is_left_where_that_is_awaited() -> None:
    store = FactStore()
    assert not store.put_session_counts(census(1.0, a=1), (AT_A,))
    assert store.put_session_counts(census(2.0, b=1), (AT_A,))
    assert not store.put_session_counts(census(2.0, b=1), (AT_B,))
    store.put_load(load("stock", 2.0, a=1), ())
    assert not store.put_session_counts(census(3.0, b=1), (AT_A,))


def test_what_was_counted_before_a_stream_began_anew_stays_until_all_is_told_again() -> None:
    store = FactStore()
    store.put_session_counts(census(1.0, a=2), ())
    assert not store.put_session_counts(report(2.0, nodes={NODE_B: Traffic(sessions={"idle": 1})}), (AT_A,))
    facts = store.view()
    assert (facts.session_counts["one"].at, facts.sessions_by_address) == (1.0, {NODE_A: 2})
    assert store.put_session_counts(census(3.0, b=1), (AT_A,))
    assert facts.sessions_by_address == {NODE_B: 1}


def test_what_comes_late_by_way_of_another_control_plane_is_no_news() -> None:
    store = FactStore()
    store.put_load(load("one", 1.0, a=1), ())
    store.put_load(load("one", 2.0, {A: 4}, a=2), ())
    assert not store.put_load(load("one", 1.5, {A: 9}), (AT_A,))
    facts = store.view()
    assert (facts.sessions_by_endpoint, facts.new_sessions, facts.new_sessions_per_second) == (
        {A: 2},
        {A: 4},
        4.0,
    )

    for at, moved, there in ((3.0, 0, 1), (5.0, 7, 1), (4.0, 5, 0), (6.0, 8, 1)):
        nodes = {NODE_A: Traffic(migrations={("moved", "ok"): moved})}
        told = replace(census(at, a=there), nodes=nodes, is_first=at == 3.0)
        store.put_module_report(told)
        store.put_session_counts(told, ())
        assert store.view().sessions_by_address == {NODE_A: 1}
    assert store.view().migrations[NODE_A] == {("moved", "ok"): 8}


def with_module(name: str, version: str = "1.5.0") -> EnvoyStatus:
    return EnvoyStatus(name, "10.9.9.9:1", "1.40.0", "module", 1.0, 10.0, module_version=version)


def test_an_envoy_that_comes_back_without_the_module_is_counted_by_its_load_reports() -> None:
    store = FactStore()
    store.put_load(load("one", 1.0, a=2), ())
    store.put_session_counts(census(2.0, b=2), ())
    store.put_fleet([with_module("one")], 3.0, 600.0)
    facts = store.view()
    assert (facts.module_envoys, facts.sessions_by_address) == ({"one"}, {NODE_B: 2})
    store.put_fleet([replace(with_module("one"), connected_since=None)], 3.0, 600.0)  # away for a moment
    assert (store.view().module_envoys, facts.sessions_by_address) == ({"one"}, {NODE_B: 2})
    store.put_fleet([with_module("one", version="")], 3.0, 600.0)
    assert (store.view().module_envoys, facts.sessions_by_address, facts.sessions_by_endpoint) == (
        set(),
        {},
        {A: 2},
    )
    assert not store.put_session_counts(census(4.0, b=2), (AT_A,))  # what its former stream had still to say
    assert (facts.sessions_by_address, facts.session_counts) == ({}, {})


def test_where_envoys_are_is_known_as_long_as_they_are() -> None:
    store = FactStore()
    here = replace(with_module("one"), zone="a")
    store.put_fleet([here, with_module("two")], 3.0, 600.0)
    assert store.view().envoy_zones == {"one": "a"}
    store.put_fleet([replace(here, zone="b"), replace(here, id="two", connected_since=None)], 3.0, 600.0)
    assert store.view().envoy_zones == {"one": "b", "two": "a"}
    store.put_fleet([with_module("two")], 3.0, 600.0)
    assert store.view().envoy_zones == {}


def test_a_module_that_has_been_silent_for_long_takes_its_sessions_along() -> None:
    store = FactStore()
    told = census(10.0, a=2)
    store.put_module_report(told)
    store.put_session_counts(told, ())
    store.put_load(load("one", 100.0, b=1), ())
    store.forget_envoys(seen_before=50.0)
    facts = store.view()
    assert (facts.session_counts, facts.sessions_by_address, facts.sessions_by_endpoint) == ({}, {}, {B: 1})


def test_the_sessions_of_nodes_that_are_forgotten_go() -> None:
    store = FactStore()
    store.put_session_counts(census(1.0, a=2, b=3), ())
    store.retain_nodes({NODE_B: None})
    facts = store.view()
    assert facts.sessions_by_address == {NODE_B: 3}
    # Were it known again, nothing would have been told of it since.
    assert facts.session_counts["one"].complete_nodes == {NODE_B}


def test_the_traffic_of_nodes_that_are_forgotten_goes() -> None:
    store = FactStore()
    store.put_module_report(report(1.0, nodes={A: Traffic(logins=1), B: Traffic(logins=2), "": Traffic()}))
    store.retain_nodes({B: None})
    assert set(store.view().module_reports["one"].nodes) == {B, ""}


def test_vital_signs_are_kept_as_they_were_told_last_and_so_is_why_there_are_none() -> None:
    store = FactStore()
    assert (dict(store.view().node_metrics), store.view().node_metrics_outage) == ({}, "")
    known = {NODE_A: NodeMetrics(cpu=MetricValue(0.5, 1.0))}
    assert store.put_node_metrics(known, "") == ""
    assert store.put_node_metrics(known, "Prometheus does not answer") == ""
    assert store.view().node_metrics == known
    assert store.view().node_metrics_outage == "Prometheus does not answer"
    assert store.put_node_metrics({}, "") == "Prometheus does not answer"
    assert dict(store.view().node_metrics) == {}
