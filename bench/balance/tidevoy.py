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
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.simulated_modules import EnvoyUpdate, SimulatedModules
from controlplane.decide import plan as decide
from controlplane.decide.session_counts import nodes_awaiting_empty
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, NodeKey, Source, Topology
from controlplane.model.plan import EdsHealth as NodeAdvice
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import MOVED, ModuleReport, SessionCounts, Traffic
from controlplane.observe.fact_store import FactStore

_START_TIME = 1_000_000.0  # the control plane's clock at the beginning
_POLL_INTERVAL_SECONDS = 1.0  # seconds between two looks at a node's own count
_PUBLISH_DELAY_SECONDS = 0.05  # seconds from a decision until Envoys go by it
_MIN_DECISION_INTERVAL_SECONDS = 0.01  # the least time between two decisions
_FLUSH_LAG_SECONDS = 1.0  # how old what a stream has told may be, beside the time since its last report
_SILENCE_SECONDS, _SILENCE_INTERVAL_SECONDS = 30.0, 60.0  # how long Envoys are silent, and how often


class TidevoyBalancer:
    """The control plane, and the module in each Envoy."""

    def __init__(self, case: Case, world: SimulatedCluster, agenda: EventQueue, random: Random) -> None:
        self._case = case
        self._world = world
        self._agenda = agenda
        self._random = random
        self._policy = Policy()
        self._modules = SimulatedModules(world, agenda, random)
        self._facts = FactStore(_START_TIME)
        self._plan = Plan()
        self._published = EnvoyUpdate()
        self._intents = Intents()
        self._awaited_nodes: frozenset[NodeKey] = frozenset()
        self._closed_nodes: frozenset[str] = frozenset()
        self._is_decision_scheduled = False
        self._plans_in_flight = 0  # plans that Envoys have not heard of yet
        self._nodes: list[Node] = []
        self._positions: dict[str, int] = {}
        names = [f"envoy-{number:03}" for number in range(world.envoys)]
        self._ids = {f"{number:016x}": number for number in range(world.envoys)}
        self._instances = list(self._ids)
        self._names = names
        self._statuses = [
            EnvoyStatus(
                name, "10.255.0.1:1", "1.40.0", "module", _START_TIME, _START_TIME, module_version="0"
            )
            for name in names
        ]
        self._reported_at = [-1.0] * world.envoys  # when the last report came, or is to come
        self._reported_nodes: list[frozenset[str]] = [frozenset()] * world.envoys
        self._opened: list[dict[str, int]] = [{} for _ in names]
        self._moves_by_node: list[dict[int, int]] = [
            {} for _ in names
        ]  # sessions that have moved, by their node
        self._silent_until = [0.0] * world.envoys
        self.publications = 0
        for position in range(world.nodes):
            self._add_node(position)
        self._put_topology()
        for envoy in range(world.envoys):
            agenda.after(random.random() * self._policy.report_interval, self._send_report, envoy)
        if case.silent_envoys:
            agenda.after(_SILENCE_INTERVAL_SECONDS, self._silence_envoys)

    # --- what a simulation asks ---

    def pick_node(self, envoy: int) -> int:
        """By the module."""
        node = self._modules.pick_node(envoy)
        opened, address = self._opened[envoy], self._nodes[node].address
        opened[address] = opened.get(address, 0) + 1
        return node

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        """The module counts."""
        self._modules.on_count_changed(envoy, node, delta)

    def on_node_joined(self, node: int) -> None:
        """PD has a node more, which passes its checks."""
        self._add_node(node)
        self._put_topology()
        self._schedule_decision()

    def on_node_drained(self, node: int) -> None:
        """An operator drains it."""
        drains = {**self._intents.drains, self._nodes[node].address: DrainIntent(self._now, 600.0)}
        self._intents = replace(self._intents, drains=MappingProxyType(drains))
        self._schedule_decision()

    def on_second_passed(self) -> None:
        """Time alone may change plans."""
        self._decide()

    # --- facts ---

    @property
    def _now(self) -> float:
        return _START_TIME + self._agenda.now

    def _add_node(self, position: int) -> None:
        address = f"10.0.{position // 250}.{position % 250 + 1}:4000"
        node = Node(
            address,
            Source.PD,
            status_address=address.replace(":4000", ":10080"),
            version="v8.5.3",
            weight=self._world.capacities[position],
        )
        self._nodes.append(node)
        self._positions[address] = position
        self._agenda.after(0.0, self._poll_node, position)

    def _put_topology(self) -> None:
        nodes = MappingProxyType({node.address: node for node in self._nodes})
        self._facts.put_topology(Topology(Source.PD, nodes=nodes, is_complete=True))
        self._known_nodes = frozenset(nodes)

    def _poll_node(self, position: int) -> None:
        """A look at a node; the first one finds it as if it had been there for long."""
        passed = CheckResult(CheckStatus.PASS, "it answers", 1_000, self._now)
        health = Health(
            status=passed, sql=passed, connections=self._world.totals[position], connections_at=self._now
        )
        if self._facts.put_health(self._nodes[position].address, health, self._policy):
            self._schedule_decision()
        self._agenda.after(
            _POLL_INTERVAL_SECONDS * self._random.uniform(0.98, 1.02), self._poll_node, position
        )

    def _send_report(self, envoy: int) -> None:
        """An Envoy takes stock, and sends that off."""
        now = self._agenda.now
        self._agenda.after(self._policy.report_interval, self._send_report, envoy)
        if now < self._silent_until[envoy]:
            return
        counts = {
            self._nodes[node].address: count for node, count in enumerate(self._world.counts[envoy]) if count
        }
        opened, self._opened[envoy] = self._opened[envoy], {}
        late = self._case.report_delay + self._random.random() * self._case.report_delay_spread
        before = self._reported_at[envoy]
        arrival = max(now + late, before)  # one does not overtake the other
        self._reported_at[envoy] = arrival
        moved, self._modules.moved[envoy] = self._modules.moved[envoy], {}
        self._agenda.at(arrival, self._receive_report, envoy, before, counts, opened, moved)

    def _receive_report(
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
        load = EnvoyLoad(name, now, sessions=sessions, new_sessions=MappingProxyType(opened))
        is_due = self._facts.put_load(load, self._awaited_nodes)
        covered, self._reported_nodes[envoy] = self._reported_nodes[envoy], self._known_nodes
        moves = self._moves_by_node[envoy]
        for node, count in moved.items():
            moves[node] = moves.get(node, 0) + count
        nodes = {
            self._nodes[node].address: Traffic(migrations={(MOVED, "ok"): moves[node]}) for node in moved
        }
        self._facts.put_module_report(ModuleReport(name, now, "0", instance, nodes, is_first=before < 0))
        if before >= 0:
            census = SessionCounts(
                now, _START_TIME + before - _FLUSH_LAG_SECONDS, sessions, covered, True, instance
            )
            report = ModuleReport(name, now, "0", instance, session_counts=census)
            is_due = self._facts.put_session_counts(report, self._awaited_nodes) or is_due
        if is_due:
            self._schedule_decision()

    def _silence_envoys(self) -> None:
        for envoy in self._random.sample(range(self._world.envoys), self._case.silent_envoys):
            self._silent_until[envoy] = self._agenda.now + _SILENCE_SECONDS
        self._agenda.after(_SILENCE_INTERVAL_SECONDS, self._silence_envoys)

    # --- decisions ---

    def _schedule_decision(self) -> None:
        if not self._is_decision_scheduled:
            self._is_decision_scheduled = True
            self._agenda.after(_MIN_DECISION_INTERVAL_SECONDS, self._decide)

    def _decide(self) -> None:
        self._is_decision_scheduled = False
        now = self._now
        self._facts.put_fleet(
            self._statuses,
            now,
            self._policy.envoy_retention,
            self._closed_nodes,
            is_published=not self._plans_in_flight,
        )
        before = self._plan
        self._plan = decide.plan(before, self._facts.view(), self._intents, self._policy, now)
        self._awaited_nodes = nodes_awaiting_empty(self._plan)
        self._closed_nodes = frozenset(a for a, p in self._plan.nodes.items() if p.closed_since is not None)
        if self._plan != before and (update := self._make_update(self._plan)) != self._published:
            self._published = update
            self._plans_in_flight += 1
            self.publications += 1
            self._agenda.after(_PUBLISH_DELAY_SECONDS, self._publish, update)

    def _publish(self, update: EnvoyUpdate) -> None:
        self._plans_in_flight -= 1
        self._modules.apply_update(update)

    def _make_update(self, plan: Plan) -> EnvoyUpdate:
        weights = [0] * len(self._nodes)
        draining = []
        for address, planned in plan.nodes.items():
            position = self._positions[address]
            weights[position] = planned.weight
            if planned.eds_health is NodeAdvice.DRAINING:
                draining.append(position)
        rebalance = plan.rebalance
        return EnvoyUpdate(
            tuple(weights),
            frozenset(draining),
            rebalance.round,
            self._by_position(rebalance.outgoing),
            self._by_position(rebalance.incoming),
        )

    def _by_position(self, counts: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
        return {
            self._positions[address]: {self._ids[instance]: count for instance, count in each.items()}
            for address, each in counts.items()
        }
