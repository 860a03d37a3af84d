"""Stores what the observers report, sums session counts, and detects facts that may change the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import (
    EventDraft,
    check_problem_events,
    migration_blocker_events,
    module_config_rejected,
    node_metrics_events,
    topology_events,
)
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import CheckResult, Health
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP, NodeKey, Resolution, Source, Topology
from controlplane.model.plan import Policy
from controlplane.model.traffic import ConfigRejection, ModuleReport, SessionCounts
from controlplane.observe.drain_acks import DrainAcks
from controlplane.observe.migration_counters import MigrationCounters

# No rate is computed from reports with a shorter interval: they were queued in this process.
_MIN_RATE_INTERVAL_SECONDS = 0.05
_MAX_REJECTIONS_PER_ENVOY = 64  # limit of remembered rejected configurations
# An Envoy disconnects within this time after it has reported that it has ended: its supervisor stops it.
_END_SECONDS = 10.0


class FactStore:
    """The latest facts of all observers. Emits events when facts change."""

    def __init__(self, events: EventLog, policy: Policy, observing_since: float = 0.0) -> None:
        """`observing_since`: Unix time at which observation starts."""
        self.changed = asyncio.Event()
        """Set when a fact may change the plan; the planner clears it."""
        self.awaiting_empty: frozenset[NodeKey] = frozenset()
        """Nodes that stay in their state until they have no sessions. The planner sets this."""
        self.known_addresses: frozenset[str] = frozenset()
        """Addresses of all nodes."""
        self.discovery_serial = 0
        """Increases when a topology or a DNS resolution changes."""
        self._events = events
        self._policy = policy
        self._observing_since = observing_since
        self._topologies: dict[Source, Topology] = {}
        self._health: dict[str, Health] = {}
        self._resolutions: dict[str, Resolution] = {}
        self._loads: dict[str, EnvoyLoad] = {}
        self._sessions_by_endpoint: dict[str, int] = {}
        self._session_counts: dict[str, SessionCounts] = {}
        self._sessions_by_address: dict[str, int] = {}
        self._module_envoys: set[str] = set()
        self._envoys_without_module: set[str] = set()
        self._migrations = MigrationCounters()
        self._envoys_last_seen: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}  # when an Envoy reported last that it has ended
        self._envoy_zones: dict[str, str] = {}
        self._unsynced_envoys: set[str] = set()
        self._unreachable_replicas: Set[str] = frozenset()
        self._closed_acks = DrainAcks()
        self._new_session_rates: dict[str, float] = {}
        self._new_sessions: dict[str, int] = {}
        self._module_reports: dict[str, ModuleReport] = {}
        self._config_rejections: dict[str, ConfigRejection] = {}
        self._rejection_counts: dict[str, dict[tuple[str, str], int]] = {}
        self._node_metrics: Mapping[str, NodeMetrics] = {}
        self._node_metrics_outage = ""

    def configure(self, policy: Policy) -> None:
        """Apply changed thresholds of the health checks."""
        self._policy = policy

    def restart_observation(self, at: float) -> None:
        """Set when observation began: this replica became leader at `at` and may not know all Envoys yet."""
        self._observing_since = at

    def view(self) -> Facts:
        """Return a live view of all facts, which is consistent only until the next `await`."""
        return Facts(
            topologies=MappingProxyType(self._topologies),
            health=MappingProxyType(self._health),
            resolutions=MappingProxyType(self._resolutions),
            loads=MappingProxyType(self._loads),
            sessions_by_endpoint=MappingProxyType(self._sessions_by_endpoint),
            session_counts=MappingProxyType(self._session_counts),
            sessions_by_address=MappingProxyType(self._sessions_by_address),
            module_envoys=self._module_envoys,
            migrations=self._migrations.totals,
            new_sessions_per_second=sum(self._new_session_rates.values()),
            new_sessions=MappingProxyType(self._new_sessions),
            envoys_last_seen=MappingProxyType(self._envoys_last_seen),
            module_reports=MappingProxyType(self._module_reports),
            config_rejections=MappingProxyType(self._config_rejections),
            unsynced_envoys=self._unsynced_envoys,
            unreachable_replicas=self._unreachable_replicas,
            closed_acks=self._closed_acks.acknowledged_at,
            observing_since=self._observing_since,
            node_metrics=MappingProxyType(self._node_metrics),
            node_metrics_outage=self._node_metrics_outage,
            envoy_zones=MappingProxyType(self._envoy_zones),
        )

    def put_topology(self, topology: Topology) -> None:
        """Replace the topology of its source."""
        before = self._topologies.get(topology.source)
        self._topologies[topology.source] = topology
        self._emit(topology_events(before, topology))
        self.discovery_serial += 1
        self.changed.set()

    def put_resolution(self, resolution: Resolution) -> None:
        if self._resolutions.get(resolution.host) != resolution:
            self._resolutions[resolution.host] = resolution
            self.discovery_serial += 1
            self.changed.set()

    def put_health(self, address: str, health: Health) -> None:
        """Store the health of a node; request a plan if the node may become healthy or unhealthy."""
        before, policy = self._health.get(address), self._policy
        self._health[address] = health
        if (
            before is None
            or _may_change_verdict(before.status, health.status, policy.status_rise, policy.status_fall)
            or _may_change_verdict(before.sql, health.sql, policy.sql_rise, policy.sql_fall)
            or _may_change_verdict(
                before.statement, health.statement, policy.statement_rise, policy.statement_fall
            )
        ):
            self.changed.set()
        self._emit(migration_blocker_events(address, before or Health(), health))
        self._emit(check_problem_events(address, before or Health(), health))

    def put_node_metrics(self, metrics: Mapping[str, NodeMetrics], outage: str) -> None:
        """Store the metrics of all nodes. `outage`: why metrics are unavailable, or empty."""
        self._emit(node_metrics_events(self._node_metrics_outage, outage))
        self._node_metrics, self._node_metrics_outage = metrics, outage

    def put_load(self, load: EnvoyLoad) -> None:
        """Store an Envoy's load report and update the sums, unless it is older than the stored report."""
        before = self._loads.get(load.envoy)
        if before is not None:
            if load.at < before.at:
                return  # delayed by the replica that forwarded it
            elapsed = load.at - before.at
            if elapsed >= _MIN_RATE_INTERVAL_SECONDS:
                self._new_session_rates[load.envoy] = sum(load.new_sessions.values()) / elapsed
        _update_sums(
            self._new_sessions, before.new_sessions if before is not None else EMPTY_MAP, load.new_sessions
        )
        with self._updating_session_sums(load.envoy):
            self._loads[load.envoy] = load
        self.mark_envoy_seen(load.envoy, load.at)
        self._check_drains()

    def put_module_report(self, report: ModuleReport, *, is_already_reported: bool = False) -> None:
        """Store a report of an Envoy's module, unless it is older than the stored report.

        The lower counts of an old report would look like a restart of the module. `is_already_reported`:
        another replica emits the events for rejected configurations.
        """
        before = self._module_reports.get(report.envoy)
        is_newest = before is None or report.at >= before.at
        if is_newest:
            self._migrations.add_report(report)
            rejections = self._new_rejections(report)
            self._module_reports[report.envoy] = report
            if rejections:
                self._config_rejections[report.envoy] = rejections[-1]
            if not is_already_reported:
                self._emit(module_config_rejected(report.envoy, rejection) for rejection in rejections)
        self._put_session_counts(report)
        if is_newest and report.has_ended and not self._has_uncounted_sessions(report.envoy):
            self._ended_at[report.envoy] = report.at
        elif is_newest:
            self._ended_at.pop(report.envoy, None)

    def envoy_of_process(self, instance: str) -> str | None:
        """Return the Envoy whose module has reported this process id; None if there is none."""
        for envoy, report in self._module_reports.items():
            if report.instance == instance:
                return envoy
        return None

    def _new_rejections(self, report: ModuleReport) -> list[ConfigRejection]:
        """Return the configurations that the module has rejected since its previous report.

        Reports repeat earlier rejections, so a rejection is new only if its count has changed.
        """
        known_counts = self._rejection_counts.setdefault(report.envoy, {})
        rejections = [
            ConfigRejection(report.at, extension, text)
            for (extension, text), count in report.rejections.items()
            if known_counts.get((extension, text)) != count
        ]
        if len(known_counts) > _MAX_REJECTIONS_PER_ENVOY:
            known_counts.clear()
        known_counts.update(report.rejections)
        return rejections

    def _put_session_counts(self, report: ModuleReport) -> None:
        """Store the session counts of an Envoy's module, if they are complete, and update the sums.

        While a new stream has incomplete counts, the previous counts stay; otherwise nodes would look empty.
        """
        if report.session_counts is None or report.envoy in self._envoys_without_module:
            return
        before = self._session_counts.get(report.envoy)
        if before is not None and report.at < before.at:
            return
        with self._updating_session_sums(report.envoy):
            self._session_counts[report.envoy] = report.session_counts
        self._check_drains()

    def notify_acks_changed(self) -> None:
        """Request a plan if nodes drain, because an Envoy may have acknowledged that they are closed.

        The planner needs acknowledgements to decide whether a node is empty.
        """
        if self.awaiting_empty:
            self.changed.set()

    def mark_envoy_seen(self, envoy: str, at: float) -> None:
        """Record that an Envoy was connected or sent a report at the time `at`."""
        self._envoys_last_seen[envoy] = max(at, self._envoys_last_seen.get(envoy, 0.0))

    def put_fleet(
        self,
        statuses: Iterable[EnvoyStatus],
        now: float,
        retention: float,
        closed_nodes: Collection[str] = (),
        *,
        is_published: bool = True,
        ended_envoys: Mapping[str, float] = EMPTY_MAP,
        closed_nodes_by_remote_envoy: Mapping[str, Collection[str]] = EMPTY_MAP,
    ) -> None:
        """Store which Envoys are connected, their zones, their acknowledgements, and which have the module.

        `closed_nodes`: the nodes that the latest plan closes to new sessions.
        `is_published`: the latest plan is published.
        `closed_nodes_by_remote_envoy`: by Envoy id, closed nodes that another replica has sent to the Envoy.
        `ended_envoys`: when operators reported that an Envoy has ended, by Envoy id.

        Forgets Envoys that were last seen over `retention` seconds ago or before they were reported as ended,
        and disconnected Envoys that have reported themselves that they end.
        """
        synced_envoys = set()
        self._closed_acks.retain(closed_nodes)
        self._module_envoys, self._envoys_without_module, self._envoy_zones = set(), set(), {}
        for status in statuses:
            connected = status.connected_since is not None
            if self.has_ended(status):
                if status.id in self._envoys_last_seen:
                    self._forget_envoy(status.id)
                continue
            self.mark_envoy_seen(status.id, now if connected else status.last_seen)
            if status.zone:
                self._envoy_zones[status.id] = status.zone
            if status.module_version:
                self._module_envoys.add(status.id)
            elif connected:
                self._envoys_without_module.add(status.id)
            is_synced = connected and status.has_acknowledged_endpoints and status.streams == 1
            if is_synced:
                synced_envoys.add(status.id)
            acknowledged = closed_nodes_by_remote_envoy.get(status.id, closed_nodes if is_published else ())
            self._closed_acks.update(status, acknowledged if is_synced else (), now)
        for envoy in self._envoys_without_module & self._session_counts.keys():
            self._forget_session_counts(envoy)
        self.forget_envoys(now - retention)
        for envoy, at in ended_envoys.items():
            if self._envoys_last_seen.get(envoy, at + 1) <= at:
                self._forget_envoy(envoy)
                self._forget_module_report(envoy)
        self._unsynced_envoys = self._envoys_last_seen.keys() - synced_envoys

    def _has_uncounted_sessions(self, envoy: str) -> bool:
        """Return whether an Envoy has sessions that its module does not count, as its listener lacks it."""
        counts, load = self._session_counts.get(envoy), self._loads.get(envoy)
        is_counted = counts is not None and counts.has_counted_sessions
        return not is_counted and load is not None and any(load.sessions.values())

    def has_ended(self, status: EnvoyStatus) -> bool:
        """Return whether a process of this id had no session left when it disconnected, and can get none.

        Another process of the same id may have sessions: it connects again, or much later.
        """
        ended_at = self._ended_at.get(status.id)
        if ended_at is None:
            return False
        if status.connected_since is not None:
            if status.connected_since > ended_at:
                del self._ended_at[status.id]
            return False
        return status.last_seen - ended_at <= _END_SECONDS

    def set_unreachable_replicas(self, replicas: Set[str]) -> None:
        """Store which replicas are registered but do not report their Envoys to this replica."""
        self._unreachable_replicas = replicas

    def forget_envoys(self, seen_before: float) -> None:
        """Forget Envoys that were last seen before `seen_before`, and the sessions that they reported."""
        for envoy in [e for e, last_seen in self._envoys_last_seen.items() if last_seen < seen_before]:
            self._forget_envoy(envoy)
        for envoy in [e for e, report in self._module_reports.items() if report.at < seen_before]:
            self._forget_module_report(envoy)

    def retain_nodes(self, nodes: Mapping[str, object]) -> None:
        """Set the known nodes; forget the health, sessions, traffic and migrations of all others."""
        self.known_addresses = frozenset(nodes)
        for address in self._health.keys() - nodes.keys():
            del self._health[address]
        nodes_or_none = nodes.keys() | {""}
        for envoy, report in self._module_reports.items():
            self._module_reports[envoy] = report.filtered(nodes_or_none)
        for envoy, counts in self._session_counts.items():
            retained_sessions = {a: count for a, count in counts.sessions.items() if a in nodes}
            with self._updating_session_sums(envoy):
                self._session_counts[envoy] = replace(
                    counts,
                    sessions=MappingProxyType(retained_sessions),
                    complete_nodes=counts.complete_nodes & nodes.keys(),
                )
        self._migrations.retain_nodes(nodes)

    def retain_hosts(self, hosts: set[str]) -> None:
        """Forget the resolutions of host names that are not in `hosts`."""
        for host in self._resolutions.keys() - hosts:
            del self._resolutions[host]

    def _forget_envoy(self, envoy: str) -> None:
        del self._envoys_last_seen[envoy]
        self._closed_acks.remove(envoy)
        with self._updating_session_sums(envoy):
            load = self._loads.pop(envoy, None)
        _update_sums(self._new_sessions, load.new_sessions if load is not None else EMPTY_MAP, EMPTY_MAP)
        self._new_session_rates.pop(envoy, None)

    def _forget_module_report(self, envoy: str) -> None:
        self._module_reports.pop(envoy, None)
        self._rejection_counts.pop(envoy, None)
        self._config_rejections.pop(envoy, None)
        self._migrations.forget_envoy(envoy)
        self._ended_at.pop(envoy, None)
        if envoy in self._session_counts:
            self._forget_session_counts(envoy)

    def _forget_session_counts(self, envoy: str) -> None:
        with self._updating_session_sums(envoy):
            del self._session_counts[envoy]

    @contextmanager
    def _updating_session_sums(self, envoy: str) -> Iterator[None]:
        """Update the sums after the body of the `with` statement has changed the sessions of an Envoy."""
        by_module, by_load_report = self._sessions_by_key(envoy)
        yield
        by_module_now, by_load_report_now = self._sessions_by_key(envoy)
        _update_sums(self._sessions_by_address, by_module, by_module_now)
        _update_sums(self._sessions_by_endpoint, by_load_report, by_load_report_now)

    def _sessions_by_key(self, envoy: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return sessions by address (from the module) and by endpoint (from load reports); one is empty."""
        counts = self._session_counts.get(envoy)
        if counts is not None and counts.has_counted_sessions:
            return counts.sessions, EMPTY_MAP
        load = self._loads.get(envoy)
        return EMPTY_MAP, load.sessions if load is not None else EMPTY_MAP

    def _check_drains(self) -> None:
        """Request a plan if a node of `awaiting_empty` has no sessions."""
        if any(
            endpoint not in self._sessions_by_endpoint and address not in self._sessions_by_address
            for address, endpoint in self.awaiting_empty
        ):
            self.changed.set()

    def _emit(self, drafts: Iterable[EventDraft]) -> None:
        for draft in drafts:
            self._events.emit(*draft)


def _update_sums(sums: dict[str, int], before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Replace the counts of one Envoy in the sums. Only changed counts are updated, since few change."""
    if before is after:
        return
    # A copy, because thousands of lookups follow, and each takes twice as long in a `MappingProxyType`.
    previous = before.copy() if isinstance(before, MappingProxyType) else before
    deltas = {key: count - old for key, count in after.items() if (old := previous.get(key, 0)) != count}
    deltas |= {key: -previous[key] for key in previous.keys() - after.keys()}
    for key, delta in deltas.items():
        total = sums.get(key, 0) + delta
        if total > 0:
            sums[key] = total
        else:
            sums.pop(key, None)


def _may_change_verdict(before: CheckResult | None, after: CheckResult | None, rise: int, fall: int) -> bool:
    """Return whether the node may have become healthy or unhealthy by this check.

    It cannot if its status is unchanged and the number of consecutive results exceeds both thresholds.
    """
    if before is None or after is None:
        return before is not after
    if before.status is not after.status:
        return True
    return after.consecutive <= max(rise, fall)
