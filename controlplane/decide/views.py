"""What people are shown of facts, plan and intents: nodes, Envoys, problems, readiness. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.decide.balance import metric_levels
from controlplane.decide.session_counts import for_envoy, session_count
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health
from controlplane.model.intents import Intents
from controlplane.model.nodes import EMPTY_MAP, Source, State, TopologyProblem
from controlplane.model.plan import NodePlan, Plan, RebalanceState
from controlplane.model.traffic import Ejection, ModuleReport, Traffic, sum_traffic
from controlplane.model.views import DrainProgress, EnvoyView, NodeView

_NO_REBALANCE = RebalanceState()
# After so long without a report from an Envoy its ejections may be over, and are not shown.
_MAX_EJECTION_REPORT_AGE_SECONDS = 60.0


def node_view(
    planned: NodePlan,
    facts: Facts,
    intents: Intents,
    drain_progress: DrainProgress | None = None,
    rebalance: RebalanceState = _NO_REBALANCE,
    now: float = 0.0,
) -> NodeView:
    """One node: the plan for it, and the facts behind it."""
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
    """The latest reports of Envoys that eject nodes now."""
    reports = facts.module_reports.values()
    return [
        report
        for report in reports
        if report.ejections and now - report.at < _MAX_EJECTION_REPORT_AGE_SECONDS
    ]


def ejections(address: str, facts: Facts, now: float) -> tuple[Ejection, ...]:
    """The ejections of a node, by the id of the Envoy."""
    each = (report.ejections.get(address) for report in ejecting_reports(facts, now))
    return tuple(sorted(filter(None, each), key=lambda ejection: ejection.envoy))


def _node_traffic(address: str, facts: Facts) -> Traffic | None:
    if not facts.module_reports:
        return None
    return sum_traffic(
        report.nodes[address] for report in facts.module_reports.values() if address in report.nodes
    )


def envoy_views(
    statuses: Iterable[EnvoyStatus],
    facts: Facts,
    ended_envoys: Mapping[str, float] = EMPTY_MAP,
    *,
    traffic: bool = True,
) -> list[EnvoyView]:
    """The fleet, by id, without Envoys that were not seen since they have `ended`, as an operator says.

    Without `traffic` nothing is added up for each of them.
    """
    visible = (
        s for s in statuses if s.connected_since is not None or s.last_seen > ended_envoys.get(s.id, -1.0)
    )
    by_id = sorted(visible, key=lambda status: status.id)
    return [_envoy_view(status, facts, traffic=traffic) for status in by_id]


def _envoy_view(status: EnvoyStatus, facts: Facts, *, traffic: bool) -> EnvoyView:
    report = facts.module_reports.get(status.id)
    return EnvoyView(
        status,
        sessions=for_envoy(status.id, facts),
        traffic=sum_traffic(report.nodes.values()) if report is not None and traffic else None,
        config_rejection=facts.config_rejections.get(status.id),
    )


def envoys_without_module(statuses: Iterable[EnvoyStatus]) -> list[str]:
    """Ids of the Envoys that are connected, and serve or are to serve without Tidevoy's module."""
    return [s.id for s in statuses if s.connected_since is not None and s.filter != "module"]


def topology_problems(facts: Facts) -> list[TopologyProblem]:
    """Entries of sources that could not be used."""
    return [problem for topology in facts.topologies.values() for problem in topology.problems]


def other_keyspace(facts: Facts) -> Mapping[str, str]:
    """Nodes of other keyspaces: address -> keyspace."""
    topology = facts.topologies.get(Source.PD)
    return topology.other_keyspace if topology is not None else EMPTY_MAP


def readiness_problems(plan: Plan, facts: Facts, *, is_published: bool) -> list[str]:
    """Why traffic cannot be served well, one sentence each; empty when it can.

    An outage of a source alone is no reason: what was last known goes on being served.
    """
    outages = [topology.outage for topology in facts.topologies.values() if topology.outage]
    if not is_published:
        return [*outages, "no plan has been published yet"]
    if not any(planned.state is State.ACTIVE for planned in plan.nodes.values()):
        return [*outages, "no node is active"]
    return []
