"""Build the views of nodes and Envoys that the API returns, and lists of problems. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from controlplane.decide.balance import metric_levels
from controlplane.decide.inputs import Inputs
from controlplane.decide.session_counts import session_count, sessions_of_envoy
from controlplane.model.capture import Capture
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health
from controlplane.model.intents import Intents
from controlplane.model.limits import TOTAL
from controlplane.model.module_switches import ALL_ON, NO_OVERRIDES, ModuleSwitches
from controlplane.model.nodes import EMPTY_MAP, Source, State, TopologyProblem
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.rules import RuleSource, StatementRule
from controlplane.model.traffic import Ejection, ModuleReport, Traffic, sum_traffic
from controlplane.model.views import (
    CaptureState,
    CaptureView,
    DrainProgress,
    EnvoyCaptureView,
    EnvoyLimitView,
    EnvoyView,
    LimitView,
    NodeView,
    RuleView,
)

_NO_REBALANCE, _NO_INTENTS = RebalanceState(), Intents()
# Ejections from an older report are not shown, because they may be over.
_MAX_EJECTION_REPORT_AGE_SECONDS = 60.0


def node_view(
    planned: NodePlan,
    facts: Facts,
    intents: Intents,
    drain_progress: DrainProgress | None = None,
    rebalance: RebalanceState = _NO_REBALANCE,
    now: float = 0.0,
) -> NodeView:
    """Return the view of one node: its plan, and the facts that led to the plan."""
    address = planned.node.address
    health = facts.health.get(address, Health())
    return NodeView(
        plan=planned,
        health=health,
        weight=planned.node.weight,
        connections=health.connections,
        sessions=session_count(address, planned.endpoint, facts),
        drain=intents.drains.get(address),
        traffic=_node_traffic(address, facts),
        drain_progress=drain_progress,
        rebalancing_sessions=sum(rebalance.outgoing.get(address, EMPTY_MAP).values()),
        metrics=metric_levels.current_metrics(facts.node_metrics[address], now)
        if address in facts.node_metrics
        else None,
        ejections=ejections(address, facts, now),
    )


def ejecting_reports(facts: Facts, now: float) -> list[ModuleReport]:
    """Return the latest report of each Envoy that currently ejects nodes."""
    oldest = now - _MAX_EJECTION_REPORT_AGE_SECONDS
    return [report for report in facts.module_reports.values() if report.ejections and report.at > oldest]


def ejections(address: str, facts: Facts, now: float) -> tuple[Ejection, ...]:
    """Return the ejections of a node, sorted by Envoy id."""
    ejections_by_report = (report.ejections.get(address) for report in ejecting_reports(facts, now))
    return tuple(sorted(filter(None, ejections_by_report), key=lambda ejection: ejection.envoy))


def _node_traffic(address: str, facts: Facts) -> Traffic | None:
    if not facts.module_reports:
        return None
    return sum_traffic(
        report.nodes[address] for report in facts.module_reports.values() if address in report.nodes
    )


def envoy_views(
    statuses: Iterable[EnvoyStatus],
    facts: Facts,
    intents: Intents = _NO_INTENTS,
    switches: ModuleSwitches = ALL_ON,
    *,
    traffic: bool = True,
) -> list[EnvoyView]:
    """Return the views of all Envoys, sorted by id.

    Envoys that an operator declared ended are left out unless they were seen later. `switches` are those of
    the settings. With `traffic=False`, the views have no traffic.
    """
    ended = intents.ended_envoys
    visible = (s for s in statuses if s.connected_since is not None or s.last_seen > ended.get(s.id, -1.0))
    by_id = sorted(visible, key=lambda status: status.id)
    return [_envoy_view(status, facts, intents, switches, traffic=traffic) for status in by_id]


def _envoy_view(
    status: EnvoyStatus, facts: Facts, intents: Intents, switches: ModuleSwitches, *, traffic: bool
) -> EnvoyView:
    report = facts.module_reports.get(status.id)
    runtime_off = report.runtime_off if report is not None else frozenset[str]()
    overrides = intents.switch_overrides.get(status.id, NO_OVERRIDES)
    return EnvoyView(
        status,
        sessions=sessions_of_envoy(status.id, facts),
        traffic=sum_traffic(report.nodes.values()) if report is not None and traffic else None,
        config_rejection=facts.config_rejections.get(status.id),
        switches=overrides.apply_to(switches).without(runtime_off) if status.filter == "module" else None,
        runtime_off=runtime_off,
        overrides=overrides,
    )


def envoys_without_module(statuses: Iterable[EnvoyStatus]) -> list[str]:
    """Return the ids of connected Envoys that do not use the Tidevoy module."""
    return [s.id for s in statuses if s.connected_since is not None and s.filter != "module"]


def envoys_with_migration_off(statuses: Iterable[EnvoyStatus], inputs: Inputs) -> list[str]:
    """Return the ids of connected Envoys with the Tidevoy module in which migration is switched off."""
    connected = [s.id for s in statuses if s.connected_since is not None and s.filter == "module"]
    return [envoy for envoy in connected if not inputs.may_migrate_sessions(envoy)]


def limit_views(plan: Plan, facts: Facts) -> list[LimitView]:
    """Return all limits, that of all connections first, and what the Envoys use of them."""
    reports = sorted(facts.module_reports.items())
    return [
        LimitView(
            limit.rule,
            tuple(
                EnvoyLimitView(
                    envoy,
                    usage.connections,
                    usage.quota if limit.rule.max_connections else None,
                    usage.refused,
                )
                for envoy, report in reports
                if (usage := report.limits.get(name)) is not None
            ),
        )
        for name, limit in sorted(plan.limits.items(), key=lambda item: (item[0] != TOTAL, item[0]))
    ]


def rule_views(rules: Iterable[tuple[RuleSource, StatementRule]], facts: Facts) -> list[RuleView]:
    """Return the rules for statements in their order, and how often they applied at each Envoy."""
    reports = sorted(facts.module_reports.items())
    return [
        RuleView(
            rule,
            source,
            MappingProxyType(
                {
                    envoy: hits
                    for envoy, report in reports
                    if (hits := report.rule_hits.get(rule.name)) is not None
                }
            ),
        )
        for source, rule in rules
    ]


def capture_view(
    capture: Capture | None, statuses: Iterable[EnvoyStatus], facts: Facts, directory: str | None, now: float
) -> CaptureView:
    """Return the view of the running or last capture.

    `directory`: that of all captures; None: captures are off.
    """
    if capture is None:
        return CaptureView()
    is_running = capture.is_running(now) and directory is not None
    reported = {
        envoy: counts
        for envoy, report in facts.module_reports.items()
        if (counts := report.capture) is not None and counts.until_ms == capture.until_ms
    }
    problems = {
        status.id: "" if status.filter == "module" else "it does not use Tidevoy's module"
        for status in statuses
        if status.connected_since is not None and capture.applies_to(status.id)
    }
    expected = problems.keys() | set(capture.envoys) if is_running else set()
    return CaptureView(
        CaptureState.RUNNING if is_running else CaptureState.ENDED,
        capture,
        None if is_running else min(now, capture.until if capture.stopped_at is None else capture.stopped_at),
        f"{directory}/{capture.name}" if directory is not None else "",
        tuple(
            EnvoyCaptureView(
                envoy,
                reported.get(envoy),
                "" if envoy in reported else problems.get(envoy, "it is not connected"),
            )
            for envoy in sorted(reported.keys() | expected)
        ),
    )


def topology_problems(facts: Facts) -> list[TopologyProblem]:
    """Return the invalid entries of all node sources."""
    return [problem for topology in facts.topologies.values() for problem in topology.problems]


def other_keyspace(facts: Facts) -> Mapping[str, str]:
    """Return the nodes that belong to other keyspaces, address -> keyspace."""
    topology = facts.topologies.get(Source.PD)
    return topology.other_keyspace if topology is not None else EMPTY_MAP


def readiness_problems(plan: Plan, facts: Facts, *, is_published: bool) -> list[str]:
    """Return why traffic cannot be served, one sentence each; empty if it can.

    An outage of a node source alone is no problem, because the last known nodes stay in service.
    """
    outages = [topology.outage for topology in facts.topologies.values() if topology.outage]
    if not is_published:
        return [*outages, "no plan has been published yet"]
    if not any(planned.state is State.ACTIVE for planned in plan.nodes.values()):
        return [*outages, "no node is active"]
    return []
