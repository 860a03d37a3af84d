"""The state of the cluster that the API, the metrics and rollouts read: plan, facts and intents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.clock import Clock
from controlplane.decide import views
from controlplane.decide.explain import NodeExplanation, explain
from controlplane.engine.planner import Planner
from controlplane.errors import UnknownEnvoy, UnknownNode
from controlplane.intents.repository import IntentRepository
from controlplane.metrics.registry import MetricsSnapshot
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.nodes import TopologyProblem
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.rules import effective_rules
from controlplane.model.views import CaptureView, DrainProgress, EnvoyView, LimitView, NodeView, RuleView
from controlplane.observe.fact_store import FactStore
from controlplane.observe.statements.collector import StatementCollector
from controlplane.rollouts.observation import ClusterState


class ClusterView:
    """Reads the current state of nodes and Envoys; nothing is cached."""

    def __init__(
        self,
        clock: Clock,
        facts: FactStore,
        intents: IntentRepository,
        planner: Planner,
        statements: StatementCollector,
    ) -> None:
        self._clock = clock
        self._facts = facts
        self._intents = intents
        self._planner = planner
        self._statements = statements

    @property
    def plan(self) -> Plan:
        return self._planner.plan

    @property
    def facts(self) -> Facts:
        """The facts; they may change at the next `await`."""
        return self._facts.view()

    @property
    def reconnect_grace(self) -> float:
        """The seconds that Envoys have to reconnect after a start of the control plane."""
        return self._planner.policy.reconnect_grace

    def now(self) -> float:
        """Return the time by the clock that the facts use."""
        return self._clock()

    def nodes(self) -> list[NodeView]:
        facts = self.facts
        return [self._node_view(planned, facts) for planned in self.plan.nodes.values()]

    def node(self, address: str) -> NodeView:
        """Return one node. Raises UnknownNode."""
        if (planned := self.plan.nodes.get(address)) is None:
            raise UnknownNode(address)
        return self._node_view(planned, self.facts)

    def _node_view(self, planned: NodePlan, facts: Facts) -> NodeView:
        now = self._clock()
        drain_progress = self._planner.drain_progress.get(planned, facts, now)
        return views.node_view(
            planned, facts, self._intents.current, drain_progress, self.plan.rebalance, now
        )

    def explain(self, addresses: Iterable[str] | None = None) -> Mapping[str, NodeExplanation]:
        """Explain which share of the new sessions these nodes (by default all nodes) get, by address."""
        return explain(self.plan, self.facts, self._planner.policy, self._clock(), addresses)

    def topology_problems(self) -> list[TopologyProblem]:
        """Return the invalid entries of all node sources."""
        return views.topology_problems(self.facts)

    def excluded_addresses(self) -> list[str]:
        """Return the removed addresses that stay excluded even if a source still lists them."""
        return sorted(self._intents.current.removed.keys() - self.plan.nodes.keys())

    def other_keyspace(self) -> Mapping[str, str]:
        """Return the nodes of other keyspaces, address -> keyspace. These nodes never get traffic."""
        return views.other_keyspace(self.facts)

    def envoys(self, *, traffic: bool = True) -> list[EnvoyView]:
        """Return the Envoys of all control planes, sorted by id. Without `traffic`, the call is cheaper."""
        switches = self._planner.policy.module_switches
        return views.envoy_views(
            self._envoy_statuses(), self.facts, self._intents.current, switches, traffic=traffic
        )

    def envoys_with_sessions(self) -> list[EnvoyStatus]:
        """Return the Envoys that may have sessions, also those that have disconnected in the last minutes."""
        statuses = [view.status for view in self.envoys(traffic=False)]
        return [s for s in statuses if s.connected_since is not None or not self._facts.has_ended(s)]

    def envoy(self, envoy: str) -> EnvoyView:
        """Return one Envoy. Raises UnknownEnvoy."""
        for view in self.envoys():
            if view.status.id == envoy:
                return view
        raise UnknownEnvoy(envoy)

    def limits(self) -> list[LimitView]:
        """Return the limits of client connections, those of all connections first."""
        return views.limit_views(self.plan, self.facts)

    def rules(self) -> list[RuleView]:
        """Return the rules for statements in the order in which they apply."""
        rules = effective_rules(self._intents.current.rules, self._planner.policy.rules)
        return views.rule_views(rules, self.facts)

    def capture(self) -> CaptureView:
        """Return the running or last capture of the traffic of clients."""
        directory = self._planner.policy.capture_directory
        return views.capture_view(
            self._intents.current.capture, self._envoy_statuses(), self.facts, directory, self._clock()
        )

    def readiness_problems(self) -> list[str]:
        """Return why traffic cannot be served, one sentence each; empty if it can."""
        return views.readiness_problems(
            self.plan, self.facts, is_published=self._planner.publish_gate.is_open
        )

    def state_for_rollouts(self) -> ClusterState:
        """Return the state on which rollouts base their decisions."""
        plan, facts = self.plan, self.facts

        def drain_progress_of(address: str) -> DrainProgress | None:
            if (planned := plan.nodes.get(address)) is None:
                return None
            return self._planner.drain_progress.get(planned, facts, self._clock())

        return ClusterState(
            plan,
            facts,
            self._intents.current,
            self._planner.policy,
            self._envoy_statuses(),
            drain_progress_of,
        )

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return the state that `GET /metrics` exports."""
        facts = self.facts
        return MetricsSnapshot(
            nodes=self.nodes(),
            envoys=self.envoys(),
            topologies=list(facts.topologies.values()),
            is_panic_threshold_active=bool(self.plan.panic_threshold_reason),
            is_published=self._planner.publish_gate.is_open,
            module_reports=list(facts.module_reports.values()),
            limits=self.limits(),
            statements=self._statements.top_totals(),
            rules=self.rules(),
            has_node_metrics_outage=bool(facts.node_metrics_outage),
        )

    def _envoy_statuses(self) -> list[EnvoyStatus]:
        return [envoy.status for envoy in self._planner.fleet()]
