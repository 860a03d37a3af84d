"""Tidevoy's control plane in a simulation: real decisions on simulated facts.

Facts arrive as in the real control plane. Each Envoy reports once per interval, at its own phase and with a
delay. Each node is polled every second for its own session count. A plan is computed once a second, and
immediately if a fact requires it. A changed plan reaches all Envoys shortly afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from bench.balance.balancer import Balancer
from bench.balance.cases import Case
from bench.balance.cluster_state import SimulatedCluster
from bench.balance.event_queue import EventQueue
from bench.balance.simulated_modules import EnvoyUpdate, SimulatedModules
from controlplane.decide.plan import compute_plan
from controlplane.decide.session_counts import nodes_awaiting_empty
from controlplane.events.event_log import EventLog
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, Topology
from controlplane.model.plan import EdsHealth as NodeAdvice
from controlplane.model.plan import Plan, Policy
from controlplane.model.traffic import MOVED, ModuleReport, SessionCounts
from controlplane.observe.fact_store import FactStore

_START_TIME = 1_000_000.0  # the control plane's clock at the start
_POLL_INTERVAL_SECONDS = 1.0
_PUBLISH_DELAY_SECONDS = 0.05  # from a decision until Envoys apply it
_MIN_DECISION_INTERVAL_SECONDS = 0.01
_FLUSH_LAG_SECONDS = 1.0  # counts in a report may be older than the previous report by this much
_SILENCE_SECONDS, _SILENCE_INTERVAL_SECONDS = 30.0, 60.0  # how long and how often some Envoys are silent


class TidevoyBalancer(Balancer):
    """The control plane, and the module in each Envoy."""

    def __init__(
        self, case: Case, cluster: SimulatedCluster, event_queue: EventQueue, random: Random
    ) -> None:
        super().__init__(case, cluster, event_queue, random)
        self._policy = Policy()
        self._modules = SimulatedModules(cluster, event_queue, random)
        self._facts = FactStore(EventLog(lambda: self._now), self._policy, _START_TIME)
        self._plan = Plan()
        self._published = EnvoyUpdate()
        self._intents = Intents()
        self._closed_nodes: frozenset[str] = frozenset()
        self._is_decision_scheduled = False
        self._plans_in_flight = 0  # published plans that Envoys have not received yet
        self._nodes: list[Node] = []
        self._positions: dict[str, int] = {}
        names = [f"envoy-{number:03}" for number in range(cluster.envoys)]
        self._ids = {f"{number:016x}": number for number in range(cluster.envoys)}
        self._instances = list(self._ids)
        self._names = names
        self._statuses = [
            EnvoyStatus(
                name, "10.255.0.1:1", "1.40.0", "module", _START_TIME, _START_TIME, module_version="0"
            )
            for name in names
        ]
        self._reported_at = [-1.0] * cluster.envoys  # when each Envoy's last sent report arrives
        self._reported_nodes: list[frozenset[str]] = [frozenset()] * cluster.envoys
        self._opened: list[dict[str, int]] = [{} for _ in names]
        self._moves_by_node: list[dict[int, int]] = [{} for _ in names]  # migrations by source node
        self._silent_until = [0.0] * cluster.envoys
        for position in range(cluster.nodes):
            self._add_node(position)
        self._put_topology()
        for envoy in range(cluster.envoys):
            event_queue.after(random.random() * self._policy.report_interval, self._send_report, envoy)
        if case.silent_envoys:
            event_queue.after(_SILENCE_INTERVAL_SECONDS, self._silence_envoys)

    # --- the Balancer interface ---

    def pick_node(self, envoy: int) -> int:
        node = self._modules.pick_node(envoy)
        opened, address = self._opened[envoy], self._nodes[node].address
        opened[address] = opened.get(address, 0) + 1
        return node

    def on_count_changed(self, envoy: int, node: int, delta: int) -> None:
        self._modules.on_count_changed(envoy, node, delta)

    def on_node_joined(self, node: int) -> None:
        """Register a node in PD. The node passes all health checks."""
        self._add_node(node)
        self._put_topology()
        self._schedule_decision()

    def on_node_drained(self, node: int) -> None:
        """Drain the node as an operator does."""
        drains = {**self._intents.drains, self._nodes[node].address: DrainIntent(self._now, 600.0)}
        self._intents = replace(self._intents, drains=MappingProxyType(drains))
        self._schedule_decision()

    def on_second_passed(self) -> None:
        """Compute a plan, since it may change even without new facts."""
        self._decide()

    # --- facts ---

    @property
    def _now(self) -> float:
        return _START_TIME + self._event_queue.now

    def _add_node(self, position: int) -> None:
        address = f"10.0.{position // 250}.{position % 250 + 1}:4000"
        node = Node(
            address,
            Source.PD,
            status_address=address.replace(":4000", ":10080"),
            version="v8.5.3",
            weight=self._cluster.capacities[position],
        )
        self._nodes.append(node)
        self._positions[address] = position
        self._event_queue.after(0.0, self._poll_node, position)

    def _put_topology(self) -> None:
        nodes = MappingProxyType({node.address: node for node in self._nodes})
        self._facts.put_topology(Topology(Source.PD, nodes=nodes, is_complete=True))
        self._facts.changed.clear()  # `on_node_joined` schedules a decision
        self._known_nodes = frozenset(nodes)

    def _poll_node(self, position: int) -> None:
        """Poll a node. All checks pass, and even the first result counts as the 1,000th success in a row."""
        passed = CheckResult(CheckStatus.PASS, "it answers", 1_000, self._now)
        health = Health(
            status=passed, sql=passed, connections=self._cluster.totals[position], connections_at=self._now
        )
        self._facts.put_health(self._nodes[position].address, health)
        self._schedule_decision_if_due()
        self._event_queue.after(
            _POLL_INTERVAL_SECONDS * self._random.uniform(0.98, 1.02), self._poll_node, position
        )

    def _send_report(self, envoy: int) -> None:
        """Snapshot an Envoy's sessions and send them as a report."""
        now = self._event_queue.now
        self._event_queue.after(self._policy.report_interval, self._send_report, envoy)
        if now < self._silent_until[envoy]:
            return
        counts = {
            self._nodes[node].address: count
            for node, count in enumerate(self._cluster.counts[envoy])
            if count
        }
        opened, self._opened[envoy] = self._opened[envoy], {}
        delay = self._case.report_delay + self._random.random() * self._case.report_delay_spread
        previous_arrival = self._reported_at[envoy]
        arrival = max(now + delay, previous_arrival)  # reports arrive in order
        self._reported_at[envoy] = arrival
        moved, self._modules.moved[envoy] = self._modules.moved[envoy], {}
        self._event_queue.at(arrival, self._receive_report, envoy, previous_arrival, counts, opened, moved)

    def _receive_report(
        self,
        envoy: int,
        previous_arrival: float,
        counts: dict[str, int],
        opened: dict[str, int],
        moved: Mapping[int, int],
    ) -> None:
        """Process a report. Its counts have no timestamp, so `previous_arrival` limits their age."""
        name, instance, now = self._names[envoy], self._instances[envoy], self._now
        sessions = MappingProxyType(counts)
        load = EnvoyLoad(name, now, sessions=sessions, new_sessions=MappingProxyType(opened))
        self._facts.put_load(load)
        covered, self._reported_nodes[envoy] = self._reported_nodes[envoy], self._known_nodes
        moves = self._moves_by_node[envoy]
        for node, count in moved.items():
            moves[node] = moves.get(node, 0) + count
        migrations = {self._nodes[node].address: {(MOVED, "ok"): moves[node]} for node in moved}
        is_first = previous_arrival < 0
        counted_since = _START_TIME + previous_arrival - _FLUSH_LAG_SECONDS
        session_counts = SessionCounts(now, counted_since, sessions, covered, True, instance)
        report = ModuleReport(
            name,
            now,
            "0",
            instance,
            migrations=migrations,
            session_counts=None if is_first else session_counts,
            is_first=is_first,
        )
        self._facts.put_module_report(report)
        self._schedule_decision_if_due()

    def _silence_envoys(self) -> None:
        for envoy in self._random.sample(range(self._cluster.envoys), self._case.silent_envoys):
            self._silent_until[envoy] = self._event_queue.now + _SILENCE_SECONDS
        self._event_queue.after(_SILENCE_INTERVAL_SECONDS, self._silence_envoys)

    # --- decisions ---

    def _schedule_decision_if_due(self) -> None:
        if self._facts.changed.is_set():
            self._schedule_decision()

    def _schedule_decision(self) -> None:
        if not self._is_decision_scheduled:
            self._is_decision_scheduled = True
            self._event_queue.after(_MIN_DECISION_INTERVAL_SECONDS, self._decide)

    def _decide(self) -> None:
        self._is_decision_scheduled = False
        self._facts.changed.clear()
        now = self._now
        self._facts.put_fleet(
            self._statuses,
            now,
            self._policy.envoy_retention,
            self._closed_nodes,
            is_published=not self._plans_in_flight,
        )
        before = self._plan
        self._plan = compute_plan(before, self._facts.view(), self._intents, self._policy, now)
        self._facts.awaiting_empty = nodes_awaiting_empty(self._plan)
        self._closed_nodes = frozenset(a for a, p in self._plan.nodes.items() if p.closed_since is not None)
        if self._plan != before and (update := self._make_update(self._plan)) != self._published:
            self._published = update
            self._plans_in_flight += 1
            self._event_queue.after(_PUBLISH_DELAY_SECONDS, self._publish, update)

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
            self._positions[address]: {self._ids[instance]: count for instance, count in by_instance.items()}
            for address, by_instance in counts.items()
        }
