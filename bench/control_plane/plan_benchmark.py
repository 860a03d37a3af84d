"""How long one decision takes: `plan()` for 5,000 nodes, with reports of the fleet and vital signs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bench.reporting.report import Figure, Spread
from controlplane.decide.plan import plan
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.intents import Drain, Intents
from controlplane.model.node_metrics import Reading, Vitals
from controlplane.model.nodes import Node, Source, State, Topology
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import Census

METHOD = (
    "`plan()` in this process, for 5,000 nodes from PD, each with the outcomes of both checks, TiDB's own"
    " count of connections and one Envoy's load report; the last plan is given. With 100 Envoys: each one's"
    " module tells of sessions on all nodes, half a million counts, of which one node in a hundred has too"
    " many. Median of 21 runs after 3 to warm up."
)
_NODES = 5_000
_ENVOYS = 100
_DRAINED = 500
_RUNS = 21
_WARM_UP = 3
_TARGET_MS = 50.0
_NOW = 1_700_000_000.0
_LONG_AGO = _NOW - 3_600  # slow start is over


@dataclass(frozen=True, slots=True)
class _Case:
    """What changes between the last plan and the one that is timed."""

    name: str
    facts: Facts
    intents: Intents
    states: dict[State, int]  # how many nodes must be in which state
    health_before: Mapping[str, Health]
    moves: bool = False  # whether sessions must be asked to move


async def measure() -> list[Figure]:
    """Time all cases."""
    facts = _facts()
    return [_timed(case) for case in _cases(facts)]


def _timed(case: _Case) -> Figure:
    before = replace(case.facts, health=case.health_before)
    quiet = replace(Policy(), rebalance=False)
    previous = plan(Plan(), before, Intents(), quiet, _LONG_AGO)
    # The second pass has the weights of the first in hand, as in a control plane that has run for long.
    previous = plan(previous, before, Intents(), quiet, _NOW)
    taken = []
    for _ in range(_WARM_UP + _RUNS):
        start = time.perf_counter()
        following = plan(previous, case.facts, case.intents, Policy(), _NOW + 1)
        taken.append((time.perf_counter() - start) * 1000)
    _expect(following, case.states)
    if bool(following.rebalance.moves) is not case.moves:
        raise AssertionError(f"sessions are asked to move: {not case.moves}")
    spread = Spread.of(taken[_WARM_UP:])
    return Figure(f"plan(), {case.name}", spread.median, "ms", _TARGET_MS, spread)


def _expect(following: Plan, states: dict[State, int]) -> None:
    found = [planned.state for planned in following.nodes.values()]
    for state, count in states.items():
        if found.count(state) != count:
            raise AssertionError(f"the plan has {found.count(state)} nodes {state}, not {count}")


def _cases(facts: Facts) -> list[_Case]:
    # Unchanged nodes are the very objects of the last plan, as observers keep them.
    one = _address(_NODES // 2)
    down = Health(status=_probe(Outcome.FAIL, 3), sql=_probe(Outcome.FAIL, 3))
    changed = replace(facts, health=MappingProxyType({**facts.health, one: down}))
    drains = {_address(index): Drain(_NOW - 1, 600.0) for index in range(_DRAINED)}
    fleet = _with_fleet(facts)
    return [
        _Case("nothing changed", facts, Intents(), {State.ACTIVE: _NODES}, facts.health),
        _Case(
            "1 node failed", changed, Intents(), {State.ACTIVE: _NODES - 1, State.UNHEALTHY: 1}, facts.health
        ),
        _Case(
            f"{_DRAINED} nodes draining",
            facts,
            Intents(drains=MappingProxyType(drains)),
            {State.ACTIVE: _NODES - _DRAINED, State.DRAINING: _DRAINED},
            facts.health,
        ),
        _Case("vital signs of all", _with_vitals(facts), Intents(), {State.ACTIVE: _NODES}, facts.health),
        _Case(
            f"{_ENVOYS} Envoys' modules", fleet, Intents(), {State.ACTIVE: _NODES}, fleet.health, moves=True
        ),
        _Case(
            f"{_ENVOYS} Envoys' modules, and vital signs",
            _with_vitals(fleet),
            Intents(),
            {State.ACTIVE: _NODES},
            fleet.health,
            moves=True,
        ),
    ]


def _facts() -> Facts:
    nodes, health, live = {}, {}, {}
    for index in range(_NODES):
        address = _address(index)
        nodes[address] = Node(address, Source.PD, status_address=address.replace(":4000", ":10080"))
        health[address] = Health(
            status=_probe(Outcome.PASS, 50),
            sql=_probe(Outcome.PASS, 50),
            connections=index % 40,
            connections_at=_NOW,
        )
        live[address] = index % 37
    load = EnvoyLoad("envoy-1", _NOW, live=MappingProxyType(live))
    return Facts(
        topologies=MappingProxyType(
            {Source.PD: Topology(Source.PD, nodes=MappingProxyType(nodes), complete=True)}
        ),
        health=MappingProxyType(health),
        loads=MappingProxyType({load.envoy: load}),
        live=load.live,
        arrivals=500.0,
        envoys=MappingProxyType({load.envoy: _NOW}),
    )


def _with_fleet(facts: Facts) -> Facts:
    """The modules of all Envoys, with 20 sessions a node in all, and 30 on some; TiDB counts the same."""
    addresses = [_address(index) for index in range(_NODES)]
    counted = {address: 30 if index % 100 == 0 else 20 for index, address in enumerate(addresses)}
    everywhere = frozenset(addresses)
    censuses = {}
    for envoy in range(_ENVOYS):
        sessions = {
            address: counted[address] // _ENVOYS + (((envoy + index) % _ENVOYS) < counted[address] % _ENVOYS)
            for index, address in enumerate(addresses)
        }
        there = MappingProxyType({address: count for address, count in sessions.items() if count})
        name = f"envoy-{envoy}"
        censuses[name] = Census(_NOW + 1, _NOW, there, everywhere, instance=f"{envoy:016x}")
    health = {a: replace(h, connections=counted[a], connections_at=_NOW + 1) for a, h in facts.health.items()}
    return replace(
        facts,
        health=MappingProxyType(health),
        censuses=MappingProxyType(censuses),
        counted=MappingProxyType(counted),
    )


def _with_vitals(facts: Facts) -> Facts:
    """CPU from 40 to 60 % on all nodes, memory and failures as they should be."""
    vitals = {
        _address(index): Vitals(
            cpu=Reading(0.4 + index % 20 / 100, _NOW),
            cpu_quota=16.0,
            memory=Reading(0.4, _NOW),
            pd_failures=Reading(0.0, _NOW),
            tikv_failures=Reading(0.0, _NOW),
        )
        for index in range(_NODES)
    }
    return replace(facts, vitals=MappingProxyType(vitals))


def _address(index: int) -> str:
    return f"10.{index // 62_500}.{index // 250 % 250}.{index % 250 + 1}:4000"


def _probe(outcome: Outcome, streak: int) -> Probe:
    return Probe(outcome, "a sentence", streak, _NOW)
