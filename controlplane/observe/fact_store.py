"""Stores the facts of the observers, maintains sums of them, and detects facts that may change the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import CheckResult, Health
from controlplane.model.node_metrics import NodeMetrics
from controlplane.model.nodes import EMPTY_MAP, NodeKey, Resolution, Source, Topology
from controlplane.model.plan import Policy
from controlplane.model.traffic import ConfigRejection, ModuleReport, SessionCounts
from controlplane.observe.drain_acks import DrainAcks
from controlplane.observe.migration_counters import MigrationCounters

# Reports that are closer together than this were queued here, so no rate can be computed from them.
_MIN_RATE_INTERVAL_SECONDS = 0.05
_MAX_REJECTIONS_PER_ENVOY = 64  # configuration rejections of one Envoy's module that are remembered


class FactStore:
    """The latest facts of every kind.

    A `put_` method that returns a bool returns whether a new plan has to be computed.
    """

    def __init__(self, observing_since: float = 0.0) -> None:
        """`observing_since`: Unix time at which observing starts."""
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

    def reset_start(self, at: float) -> None:
        """Restart the observation time: this replica became leader, and Envoys of others may still arrive."""
        self._observing_since = at

    def view(self) -> Facts:
        """Return a live view of all facts; use it before the next `await`."""
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
            closed_acks=self._closed_acks.acked_at,
            observing_since=self._observing_since,
            node_metrics=MappingProxyType(self._node_metrics),
            node_metrics_outage=self._node_metrics_outage,
            envoy_zones=MappingProxyType(self._envoy_zones),
        )

    def put_topology(self, topology: Topology) -> Topology | None:
        """Replace the topology of a source and return the previous one."""
        before = self._topologies.get(topology.source)
        self._topologies[topology.source] = topology
        return before

    def put_resolution(self, resolution: Resolution) -> bool:
        """Store the resolution of a host name; return whether it changed."""
        changed = self._resolutions.get(resolution.host) != resolution
        self._resolutions[resolution.host] = resolution
        return changed

    def put_health(self, address: str, health: Health, policy: Policy) -> bool:
        """Store the health of a node; return whether its verdict may change."""
        before = self._health.get(address)
        self._health[address] = health
        if before is None:
            return True
        return _may_change_verdict(
            before.status, health.status, policy.status_rise, policy.status_fall
        ) or _may_change_verdict(before.sql, health.sql, policy.sql_rise, policy.sql_fall)

    def health(self, address: str) -> Health:
        """Return the health of a node; empty if it has not been checked."""
        return self._health.get(address) or Health()

    def put_node_metrics(self, metrics: Mapping[str, NodeMetrics], outage: str) -> str:
        """Store the metrics of all nodes and the outage (empty: none); return the previous outage."""
        before, self._node_metrics_outage = self._node_metrics_outage, outage
        self._node_metrics = metrics
        return before

    def put_load(self, load: EnvoyLoad, awaiting_empty: Collection[NodeKey]) -> bool:
        """Store an Envoy's load report and update the sums; ignore a report older than the stored one.

        Returns True if no Envoy has a session on one of the nodes in `awaiting_empty`.
        """
        before = self._loads.get(load.envoy)
        if before is not None:
            if load.at < before.at:
                return False  # it was delayed on its way through another replica
            elapsed = load.at - before.at
            if elapsed >= _MIN_RATE_INTERVAL_SECONDS:
                self._new_session_rates[load.envoy] = sum(load.new_sessions.values()) / elapsed
        _replace_counts(
            self._new_sessions, before.new_sessions if before is not None else EMPTY_MAP, load.new_sessions
        )
        with self._updating_session_sums(load.envoy):
            self._loads[load.envoy] = load
        self.mark_envoy_seen(load.envoy, load.at)
        return self._has_emptied_node(awaiting_empty)

    def put_session_counts(self, report: ModuleReport, awaiting_empty: Collection[NodeKey]) -> bool:
        """Store the session counts of an Envoy's module, if they are complete, and update the sums.

        Returns True if no Envoy has a session on one of the nodes in `awaiting_empty`. After a stream
        restart, the previous counts stay until the new ones are complete: partial counts would make nodes
        look empty.
        """
        if report.session_counts is None or report.envoy in self._envoys_without_module:
            return False
        before = self._session_counts.get(report.envoy)
        if before is not None and report.at < before.at:
            return False
        with self._updating_session_sums(report.envoy):
            self._session_counts[report.envoy] = report.session_counts
        return self._has_emptied_node(awaiting_empty)

    def put_module_report(self, report: ModuleReport) -> list[ConfigRejection]:
        """Store a report of an Envoy's module; return the configurations that the module newly rejected.

        Ignores a report older than the stored one: it would look like the counters of a restarted module.
        """
        before = self._module_reports.get(report.envoy)
        if before is not None and report.at < before.at:
            return []
        self._migrations.add(report)
        # Compare counts: each report repeats all rejections, and a new stream delivers them in several parts.
        known_counts = self._rejection_counts.setdefault(report.envoy, {})
        new_rejections = [
            ConfigRejection(report.at, extension, text)
            for (extension, text), count in report.rejections.items()
            if known_counts.get((extension, text)) != count
        ]
        if len(known_counts) > _MAX_REJECTIONS_PER_ENVOY:
            known_counts.clear()
        known_counts.update(report.rejections)
        self._module_reports[report.envoy] = report
        if new_rejections:
            self._config_rejections[report.envoy] = new_rejections[-1]
        return new_rejections

    def mark_envoy_seen(self, envoy: str, at: float) -> None:
        """Record that an Envoy was present at that time."""
        self._envoys_last_seen[envoy] = max(at, self._envoys_last_seen.get(envoy, 0.0))

    def put_fleet(
        self,
        statuses: Iterable[EnvoyStatus],
        now: float,
        retention: float,
        closed: Collection[str] = (),
        *,
        is_published: bool = True,
        ended_envoys: Mapping[str, float] = EMPTY_MAP,
        known_closed: Mapping[str, Collection[str]] = EMPTY_MAP,
    ) -> None:
        """Store which Envoys are connected, their zones, their acknowledgements, and which have the module.

        `closed`: nodes that get no new sessions by the latest plan. Without `is_published`, the Envoys still
        have an earlier plan. `known_closed`: for Envoys that are connected to another replica, by Envoy id,
        the closed nodes that the other replica has sent to them.
        Forgets Envoys that were last seen over `retention` seconds ago, those in `ended_envoys` (id -> time,
        as operators reported it) that were not seen since, and module counts of Envoys that have no module
        now.
        """
        synced_envoys = set()
        self._closed_acks.retain(closed)
        self._module_envoys, self._envoys_without_module, self._envoy_zones = set(), set(), {}
        for status in statuses:
            connected = status.connected_since is not None
            self.mark_envoy_seen(status.id, now if connected else status.last_seen)
            if status.zone:
                self._envoy_zones[status.id] = status.zone
            if status.module_version:
                self._module_envoys.add(status.id)
            elif connected:
                self._envoys_without_module.add(status.id)
            is_synced = connected and status.eds_acked and status.streams == 1
            if is_synced:
                synced_envoys.add(status.id)
            acked_closed = known_closed.get(status.id, closed if is_published else ())
            self._closed_acks.update(status, acked_closed if is_synced else (), now)
        for envoy in self._envoys_without_module & self._session_counts.keys():
            self._forget_session_counts(envoy)
        self.forget_envoys(now - retention)
        for envoy, at in ended_envoys.items():
            if self._envoys_last_seen.get(envoy, at + 1) <= at:
                self._forget_envoy(envoy)
                self._forget_module_report(envoy)
        self._unsynced_envoys = self._envoys_last_seen.keys() - synced_envoys

    def set_unreachable_replicas(self, replicas: Set[str]) -> None:
        """Store which other replicas are running but do not report the state of their Envoys."""
        self._unreachable_replicas = replicas

    def forget_envoys(self, seen_before: float) -> None:
        """Forget Envoys that were last seen before that time, and the sessions that they reported."""
        for envoy in [e for e, last_seen in self._envoys_last_seen.items() if last_seen < seen_before]:
            self._forget_envoy(envoy)
        for envoy in [e for e, report in self._module_reports.items() if report.at < seen_before]:
            self._forget_module_report(envoy)

    def retain_nodes(self, nodes: Mapping[str, object]) -> None:
        """Forget the health and the traffic of all nodes that are not in `nodes`."""
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
        _replace_counts(self._new_sessions, load.new_sessions if load is not None else EMPTY_MAP, EMPTY_MAP)
        self._new_session_rates.pop(envoy, None)

    def _forget_module_report(self, envoy: str) -> None:
        self._module_reports.pop(envoy, None)
        self._rejection_counts.pop(envoy, None)
        self._config_rejections.pop(envoy, None)
        self._migrations.forget_envoy(envoy)
        if envoy in self._session_counts:
            self._forget_session_counts(envoy)

    def _forget_session_counts(self, envoy: str) -> None:
        with self._updating_session_sums(envoy):
            del self._session_counts[envoy]

    @contextmanager
    def _updating_session_sums(self, envoy: str) -> Iterator[None]:
        """Update the sums by what the body of the `with` statement changes in an Envoy's sessions."""
        by_module, by_load_report = self._counted_sessions(envoy)
        yield
        by_module_now, by_load_report_now = self._counted_sessions(envoy)
        _replace_counts(self._sessions_by_address, by_module, by_module_now)
        _replace_counts(self._sessions_by_endpoint, by_load_report, by_load_report_now)

    def _counted_sessions(self, envoy: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return an Envoy's sessions as (by module, by load report): the module's only, if it has counts."""
        counts = self._session_counts.get(envoy)
        if counts is not None and counts.has_served:
            return counts.sessions, EMPTY_MAP
        load = self._loads.get(envoy)
        return EMPTY_MAP, load.sessions if load is not None else EMPTY_MAP

    def _has_emptied_node(self, awaiting_empty: Collection[NodeKey]) -> bool:
        return any(
            endpoint not in self._sessions_by_endpoint and address not in self._sessions_by_address
            for address, endpoint in awaiting_empty
        )


def _replace_counts(sums: dict[str, int], before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Replace one Envoy's counts in the sums; touches only counts that differ, which few do."""
    if before is after:
        return
    # `copy`, because a lookup in a proxy takes twice as long, and there are thousands.
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
    """Return whether a verdict can differ from one probe to the next.

    It can if the status changed, or while the number of consecutive results still grows towards a threshold.
    """
    if before is None or after is None:
        return before is not after
    if before.status is not after.status:
        return True
    return after.consecutive <= max(rise, fall)
