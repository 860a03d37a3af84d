"""Tidevoy's control plane in a simulation: the decisions are the real ones, what they rest on is simulated.

Facts come as the engine gets them: each Envoy reports once an interval, with a phase of its own and late, and
each node is asked for its own count each second. Once a second a plan is made, and at once when a fact says
so. A changed plan reaches all Envoys a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from bench.balance.cases import Case
from bench.balance.cluster_state import World
from bench.balance.event_queue import Agenda
from bench.balance.simulated_modules import Advice, Envoys
from controlplane.decide import plan as decide
from controlplane.decide.session_counts import awaited
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.intents import Drain, Intents
from controlplane.model.nodes import Node, Place, Source, Topology
from controlplane.model.plan import Advice as NodeAdvice
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import MOVED, Census, ModuleReport, Traffic
from controlplane.observe.fact_store import FactStore

_EPOCH = 1_000_000.0  # the control plane's clock at the beginning
_POLL = 1.0  # seconds between two looks at a node's own count
_PUSH = 0.05  # seconds from a decision until Envoys go by it
_REST = 0.01  # the least time between two decisions
_FLUSH = 1.0  # how old what a stream has told may be, beside the time since its last report
_SILENCE, _SILENCES = 30.0, 60.0  # how long Envoys are silent, and how often


class Tidevoy:
    """The control plane, and the module in each Envoy."""

    def __init__(self, case: Case, world: World, agenda: Agenda, random: Random) -> None:
        self._case = case
        self._world = world
        self._agenda = agenda
        self._random = random
        self._policy = Policy()
        self._envoys = Envoys(world, agenda, random)
        self._facts = FactStore(_EPOCH)
        self._plan = Plan()
        self._told = Advice()
        self._intents = Intents()
        self._awaited: frozenset[Place] = frozenset()
        self._closed: frozenset[str] = frozenset()
        self._wakes = False
        self._under_way = 0  # plans that Envoys have not heard of yet
        self._nodes: list[Node] = []
        self._position: dict[str, int] = {}
        names = [f"envoy-{number:03}" for number in range(world.envoys)]
        self._ids = {f"{number:016x}": number for number in range(world.envoys)}
        self._instances = list(self._ids)
        self._names = names
        self._statuses = [
            EnvoyStatus(name, "10.255.0.1:1", "1.40.0", "module", _EPOCH, _EPOCH, module_version="0")
            for name in names
        ]
        self._reported_at = [-1.0] * world.envoys  # when the last report came, or is to come
        self._covered: list[frozenset[str]] = [frozenset()] * world.envoys
        self._opened: list[dict[str, int]] = [{} for _ in names]
        self._moves: list[dict[int, int]] = [{} for _ in names]  # sessions that have moved, by their node
        self._silent_until = [0.0] * world.envoys
        self.publications = 0
        for position in range(world.nodes):
            self._add(position)
        self._observe()
        for envoy in range(world.envoys):
            agenda.after(random.random() * self._policy.report_interval, self._report, envoy)
        if case.silent:
            agenda.after(_SILENCES, self._hush)

    # --- what a simulation asks ---

    def pick(self, envoy: int) -> int:
        """By the module."""
        node = self._envoys.pick(envoy)
        opened, address = self._opened[envoy], self._nodes[node].address
        opened[address] = opened.get(address, 0) + 1
        return node

    def shifted(self, envoy: int, node: int, by: int) -> None:
        """The module counts."""
        self._envoys.shifted(envoy, node, by)

    def joined(self, node: int) -> None:
        """PD has a node more, which passes its checks."""
        self._add(node)
        self._observe()
        self._wake()

    def leaves(self, node: int) -> None:
        """An operator drains it."""
        drains = {**self._intents.drains, self._nodes[node].address: Drain(self._now, 600.0)}
        self._intents = replace(self._intents, drains=MappingProxyType(drains))
        self._wake()

    def tick(self) -> None:
        """Time alone may change plans."""
        self._decide()

    # --- facts ---

    @property
    def _now(self) -> float:
        return _EPOCH + self._agenda.now

    def _add(self, position: int) -> None:
        address = f"10.0.{position // 250}.{position % 250 + 1}:4000"
        node = Node(
            address,
            Source.PD,
            status_address=address.replace(":4000", ":10080"),
            version="v8.5.3",
            weight=self._world.capacities[position],
        )
        self._nodes.append(node)
        self._position[address] = position
        self._agenda.after(0.0, self._poll, position)

    def _observe(self) -> None:
        nodes = MappingProxyType({node.address: node for node in self._nodes})
        self._facts.put_topology(Topology(Source.PD, nodes=nodes, complete=True))
        self._known = frozenset(nodes)

    def _poll(self, position: int) -> None:
        """A look at a node; the first one finds it as if it had been there for long."""
        passed = Probe(Outcome.PASS, "it answers", 1_000, self._now)
        health = Health(
            status=passed, sql=passed, connections=self._world.totals[position], connections_at=self._now
        )
        if self._facts.put_health(self._nodes[position].address, health, self._policy):
            self._wake()
        self._agenda.after(_POLL * self._random.uniform(0.98, 1.02), self._poll, position)

    def _report(self, envoy: int) -> None:
        """An Envoy takes stock, and sends that off."""
        now = self._agenda.now
        self._agenda.after(self._policy.report_interval, self._report, envoy)
        if now < self._silent_until[envoy]:
            return
        counts = {
            self._nodes[node].address: count for node, count in enumerate(self._world.counts[envoy]) if count
        }
        opened, self._opened[envoy] = self._opened[envoy], {}
        late = self._case.delay + self._random.random() * self._case.delay_spread
        before = self._reported_at[envoy]
        arrival = max(now + late, before)  # one does not overtake the other
        self._reported_at[envoy] = arrival
        moved, self._envoys.moved[envoy] = self._envoys.moved[envoy], {}
        self._agenda.at(arrival, self._receive, envoy, before, counts, opened, moved)

    def _receive(
        self,
        envoy: int,
        before: float,
        counts: dict[str, int],
        opened: dict[str, int],
        moved: Mapping[int, int],
    ) -> None:
        """A report arrives; how old what it says is can be told by the time of the one before only."""
        name, instance, now = self._names[envoy], self._instances[envoy], self._now
        sessions = MappingProxyType(counts)
        load = EnvoyLoad(name, now, live=sessions, opened=MappingProxyType(opened))
        is_due = self._facts.put_load(load, self._awaited)
        covered, self._covered[envoy] = self._covered[envoy], self._known
        told = self._moves[envoy]
        for node, count in moved.items():
            told[node] = told.get(node, 0) + count
        nodes = {self._nodes[node].address: Traffic(moves={(MOVED, "ok"): told[node]}) for node in moved}
        self._facts.put_report(ModuleReport(name, now, "0", instance, nodes, is_first=before < 0))
        if before >= 0:
            census = Census(now, _EPOCH + before - _FLUSH, sessions, covered, True, instance)
            report = ModuleReport(name, now, "0", instance, census=census)
            is_due = self._facts.put_census(report, self._awaited) or is_due
        if is_due:
            self._wake()

    def _hush(self) -> None:
        for envoy in self._random.sample(range(self._world.envoys), self._case.silent):
            self._silent_until[envoy] = self._agenda.now + _SILENCE
        self._agenda.after(_SILENCES, self._hush)

    # --- decisions ---

    def _wake(self) -> None:
        if not self._wakes:
            self._wakes = True
            self._agenda.after(_REST, self._decide)

    def _decide(self) -> None:
        self._wakes = False
        now = self._now
        self._facts.put_fleet(
            self._statuses, now, self._policy.envoy_memory, self._closed, is_published=not self._under_way
        )
        before = self._plan
        self._plan = decide.plan(before, self._facts.facts(), self._intents, self._policy, now)
        self._awaited = awaited(self._plan)
        self._closed = frozenset(a for a, p in self._plan.nodes.items() if p.closed_since is not None)
        if self._plan != before and (advice := self._advice(self._plan)) != self._told:
            self._told = advice
            self._under_way += 1
            self.publications += 1
            self._agenda.after(_PUSH, self._publish, advice)

    def _publish(self, advice: Advice) -> None:
        self._under_way -= 1
        self._envoys.hear(advice)

    def _advice(self, plan: Plan) -> Advice:
        weights = [0] * len(self._nodes)
        left = []
        for address, planned in plan.nodes.items():
            position = self._position[address]
            weights[position] = planned.weight
            if planned.advice is NodeAdvice.DRAINING:
                left.append(position)
        rebalance = plan.rebalance
        return Advice(
            tuple(weights),
            frozenset(left),
            rebalance.round,
            self._asked(rebalance.moves),
            self._asked(rebalance.wants),
        )

    def _asked(self, counts: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
        return {
            self._position[address]: {self._ids[instance]: count for instance, count in each.items()}
            for address, each in counts.items()
        }
