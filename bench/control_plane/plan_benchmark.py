"""Benchmark of one decision, `compute_plan()`, for 5,000 nodes with reports of Envoys and node metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from bench.reporting.report import BenchmarkFigure, Spread
from controlplane.decide.plan import compute_plan
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.node_metrics import MetricValue, NodeMetrics
from controlplane.model.nodes import Node, Source, State, Topology
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import SessionCounts

METHOD = """\
`compute_plan()` with 5,000 nodes from PD. Each node has the results of both checks, TiDB's own connection
count and one Envoy's load report. The previous plan is an input.

* With node metrics: CPU, memory and failures of every node.
* With module reports: each of 100 Envoys reports all nodes: half a million counts, most of them 0. One node
  in a hundred has too many sessions.

Each figure is the median of 21 runs after 3 warm-up runs."""
_NODES = 5_000
_ENVOYS = 100
_DRAINED_NODES = 500
_RUNS = 21
_WARM_UP = 3
_TARGET_MS = 50.0
_NOW = 1_700_000_000.0
_BEFORE_SLOW_START = _NOW - 3_600  # early enough that slow start is over at _NOW


@dataclass(frozen=True, slots=True)
class _PlanCase:
    """The inputs of the timed plan, and how they differ from those of the previous plan."""

    name: str
    facts: Facts
    intents: Intents = field(default_factory=Intents)
    unusual_states: Mapping[State, int] = field(default_factory=dict)  # expected node counts, without ACTIVE
    health_before: Mapping[str, Health] | None = None  # None if the same as in `facts`
    expects_moves: bool = False  # whether the plan must migrate sessions


async def measure() -> list[BenchmarkFigure]:
    facts = _make_facts()
    return [_time_case(case) for case in _cases(facts)]


def _time_case(case: _PlanCase) -> BenchmarkFigure:
    before = replace(case.facts, health=case.health_before or case.facts.health)
    policy_without_rebalance = replace(Policy(), rebalance_enabled=False)
    previous = compute_plan(Plan(), before, Intents(), policy_without_rebalance, _BEFORE_SLOW_START)
    # This second call reuses the weights of the first, as a control plane does that has run for a while.
    previous = compute_plan(previous, before, Intents(), policy_without_rebalance, _NOW)
    milliseconds = []
    for _ in range(_WARM_UP + _RUNS):
        start = time.perf_counter()
        next_plan = compute_plan(previous, case.facts, case.intents, Policy(), _NOW + 1)
        milliseconds.append((time.perf_counter() - start) * 1000)
    states = Counter(planned.state for planned in next_plan.nodes.values())
    if states != {State.ACTIVE: _NODES - sum(case.unusual_states.values()), **case.unusual_states}:
        raise AssertionError(f"the plan has other states than expected: {states}")
    if bool(next_plan.rebalance.outgoing) is not case.expects_moves:
        raise AssertionError(f"the plan migrates sessions: {not case.expects_moves}")
    spread = Spread.of(milliseconds[_WARM_UP:])
    return BenchmarkFigure(f"plan(), {case.name}", spread.median, "ms", _TARGET_MS, spread)


def _cases(facts: Facts) -> list[_PlanCase]:
    # Unchanged nodes are the same objects as in the previous plan, as in the real fact store.
    failed_node = _address(_NODES // 2)
    failed_health = Health(status=_check_result(CheckStatus.FAIL, 3), sql=_check_result(CheckStatus.FAIL, 3))
    changed = replace(facts, health=MappingProxyType({**facts.health, failed_node: failed_health}))
    drains = {_address(index): DrainIntent(_NOW - 1, 600.0) for index in range(_DRAINED_NODES)}
    fleet = _with_module_reports(facts)
    return [
        _PlanCase("nothing changed", facts),
        _PlanCase("1 node failed", changed, unusual_states={State.UNHEALTHY: 1}, health_before=facts.health),
        _PlanCase(
            f"{_DRAINED_NODES} nodes draining",
            facts,
            Intents(drains=MappingProxyType(drains)),
            {State.DRAINING: _DRAINED_NODES},
        ),
        _PlanCase("with node metrics", _with_node_metrics(facts)),
        _PlanCase(f"with module reports of {_ENVOYS} Envoys", fleet, expects_moves=True),
        _PlanCase(
            f"with module reports of {_ENVOYS} Envoys and node metrics",
            _with_node_metrics(fleet),
            expects_moves=True,
        ),
    ]


def _make_facts() -> Facts:
    nodes, health, live = {}, {}, {}
    for index in range(_NODES):
        address = _address(index)
        nodes[address] = Node(address, Source.PD, status_address=address.replace(":4000", ":10080"))
        health[address] = Health(
            status=_check_result(CheckStatus.PASS, 50),
            sql=_check_result(CheckStatus.PASS, 50),
            connections=index % 40,
            connections_at=_NOW,
        )
        live[address] = index % 37
    load = EnvoyLoad("envoy-1", _NOW, sessions=MappingProxyType(live))
    return Facts(
        topologies=MappingProxyType(
            {Source.PD: Topology(Source.PD, nodes=MappingProxyType(nodes), is_complete=True)}
        ),
        health=MappingProxyType(health),
        loads=MappingProxyType({load.envoy: load}),
        sessions_by_endpoint=load.sessions,
        new_sessions_per_second=500.0,
        envoys_last_seen=MappingProxyType({load.envoy: _NOW}),
    )


def _with_module_reports(facts: Facts) -> Facts:
    """Add reports of all modules: 20 sessions per node, 30 on every hundredth. Nodes report the same."""
    addresses = [_address(index) for index in range(_NODES)]
    sessions_by_address = {address: 30 if index % 100 == 0 else 20 for index, address in enumerate(addresses)}
    everywhere = frozenset(addresses)
    session_counts = {}
    for envoy in range(_ENVOYS):
        sessions = {
            address: sessions_by_address[address] // _ENVOYS
            + (((envoy + index) % _ENVOYS) < sessions_by_address[address] % _ENVOYS)
            for index, address in enumerate(addresses)
        }
        reported_sessions = MappingProxyType({address: count for address, count in sessions.items() if count})
        name = f"envoy-{envoy}"
        session_counts[name] = SessionCounts(
            _NOW + 1, _NOW, reported_sessions, everywhere, instance=f"{envoy:016x}"
        )
    health = {
        address: replace(node_health, connections=sessions_by_address[address], connections_at=_NOW + 1)
        for address, node_health in facts.health.items()
    }
    return replace(
        facts,
        health=MappingProxyType(health),
        session_counts=MappingProxyType(session_counts),
        sessions_by_address=MappingProxyType(sessions_by_address),
    )


def _with_node_metrics(facts: Facts) -> Facts:
    """Add metrics of all nodes: CPU from 40 to 60 %, normal memory, no failures."""
    node_metrics = {
        _address(index): NodeMetrics(
            cpu=MetricValue(0.4 + index % 20 / 100, _NOW),
            cpu_quota=16.0,
            memory=MetricValue(0.4, _NOW),
            pd_failures=MetricValue(0.0, _NOW),
            tikv_failures=MetricValue(0.0, _NOW),
        )
        for index in range(_NODES)
    }
    return replace(facts, node_metrics=MappingProxyType(node_metrics))


def _address(index: int) -> str:
    return f"10.{index // 62_500}.{index // 250 % 250}.{index % 250 + 1}:4000"


def _check_result(status: CheckStatus, consecutive: int) -> CheckResult:
    return CheckResult(status, "a sentence", consecutive, _NOW)
