"""What people are shown of facts, plan and intents: nodes, Envoys, problems, readiness. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.decide.balance import metric_levels
from controlplane.decide.session_counts import of_envoy, sessions
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health
from controlplane.model.intents import Intents
from controlplane.model.nodes import NOTHING, Problem, Source, State
from controlplane.model.plan import NodePlan, Plan, Rebalance
from controlplane.model.traffic import Ejection, ModuleReport, Traffic, total
from controlplane.model.views import Departure, EnvoyView, NodeView

_NO_REBALANCE = Rebalance()
# After so long without a report from an Envoy its ejections may be over, and are not shown.
_STALE_SECONDS = 60.0


def node_view(
    planned: NodePlan,
    facts: Facts,
    intents: Intents,
    departure: Departure | None = None,
    rebalance: Rebalance = _NO_REBALANCE,
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
        sessions=sessions(address, planned.endpoint, facts),
        drain=intents.drains.get(address),
        traffic=_traffic(address, facts),
        departure=departure,
        rebalance=sum(rebalance.moves.get(address, NOTHING).values()),
        vitals=metric_levels.current(facts.vitals[address], now) if address in facts.vitals else None,
        ejections=ejections(address, facts, now),
    )


def ejecting_reports(facts: Facts, now: float) -> list[ModuleReport]:
    """The latest reports of Envoys that eject nodes now."""
    reports = facts.reports.values()
    return [report for report in reports if report.ejections and now - report.at < _STALE_SECONDS]


def ejections(address: str, facts: Facts, now: float) -> tuple[Ejection, ...]:
    """The ejections of a node, by the id of the Envoy."""
    each = (report.ejections.get(address) for report in ejecting_reports(facts, now))
    return tuple(sorted(filter(None, each), key=lambda ejection: ejection.envoy))


def _traffic(address: str, facts: Facts) -> Traffic | None:
    if not facts.reports:
        return None
    return total(report.nodes[address] for report in facts.reports.values() if address in report.nodes)


def envoy_views(
    statuses: Iterable[EnvoyStatus],
    facts: Facts,
    ended: Mapping[str, float] = NOTHING,
    *,
    traffic: bool = True,
) -> list[EnvoyView]:
    """The fleet, by id, without Envoys that were not seen since they have `ended`, as an operator says.

    Without `traffic` nothing is added up for each of them.
    """
    there = (s for s in statuses if s.connected_since is not None or s.last_seen > ended.get(s.id, -1.0))
    by_id = sorted(there, key=lambda status: status.id)
    return [_envoy_view(status, facts, traffic=traffic) for status in by_id]


def _envoy_view(status: EnvoyStatus, facts: Facts, *, traffic: bool) -> EnvoyView:
    report = facts.reports.get(status.id)
    return EnvoyView(
        status,
        sessions=of_envoy(status.id, facts),
        traffic=total(report.nodes.values()) if report is not None and traffic else None,
        refusal=facts.refusals.get(status.id),
    )


def without_module(statuses: Iterable[EnvoyStatus]) -> list[str]:
    """Ids of the Envoys that are connected, and serve or are to serve without Tidevoy's module."""
    return [s.id for s in statuses if s.connected_since is not None and s.filter != "module"]


def problems(facts: Facts) -> list[Problem]:
    """Entries of sources that could not be used."""
    return [problem for topology in facts.topologies.values() for problem in topology.problems]


def foreign(facts: Facts) -> Mapping[str, str]:
    """Nodes of other keyspaces: address -> keyspace."""
    topology = facts.topologies.get(Source.PD)
    return topology.foreign if topology is not None else NOTHING


def unready(plan: Plan, facts: Facts, *, published: bool) -> list[str]:
    """Why traffic cannot be served well, one sentence each; empty when it can.

    An outage of a source alone is no reason: what was last known goes on being served.
    """
    outages = [topology.outage for topology in facts.topologies.values() if topology.outage]
    if not published:
        return [*outages, "no plan has been published yet"]
    if not any(planned.state is State.ACTIVE for planned in plan.nodes.values()):
        return [*outages, "no node is active"]
    return []
