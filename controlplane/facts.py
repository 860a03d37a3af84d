"""Where observers put facts: keeps the sums that decisions need, says when a fact may change a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from controlplane.model import (
    EnvoyLoad,
    EnvoyStatus,
    Facts,
    Health,
    Policy,
    Probe,
    Resolution,
    Source,
    Topology,
)
from controlplane.traffic import ModuleReport, Refusal

_MOST_REFUSED = 64  # refusals of one Envoy's module that are remembered


class FactStore:
    """The latest fact of every kind. Each `put_` says whether a new decision is due."""

    def __init__(self, began: float = 0.0) -> None:
        """`began`: when observing begins."""
        self._began = began
        self._topologies: dict[Source, Topology] = {}
        self._health: dict[str, Health] = {}
        self._resolutions: dict[str, Resolution] = {}
        self._loads: dict[str, EnvoyLoad] = {}
        self._live: dict[str, int] = {}
        self._envoys: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._rates: dict[str, float] = {}
        self._reports: dict[str, ModuleReport] = {}
        self._refusals: dict[str, Refusal] = {}
        self._refused: dict[str, dict[tuple[str, str], int]] = {}

    def facts(self) -> Facts:
        """A view of all facts, to be used before the event loop runs on."""
        return Facts(
            topologies=MappingProxyType(self._topologies),
            health=MappingProxyType(self._health),
            resolutions=MappingProxyType(self._resolutions),
            loads=MappingProxyType(self._loads),
            live=MappingProxyType(self._live),
            arrivals=sum(self._rates.values()),
            envoys=MappingProxyType(self._envoys),
            reports=MappingProxyType(self._reports),
            refusals=MappingProxyType(self._refusals),
            doubted=self._doubted,
            began=self._began,
        )

    def put_topology(self, topology: Topology) -> Topology | None:
        """Replace what a source said; returns what it said before."""
        before = self._topologies.get(topology.source)
        self._topologies[topology.source] = topology
        return before

    def put_resolution(self, resolution: Resolution) -> bool:
        """Keep the answer for a host name."""
        changed = self._resolutions.get(resolution.host) != resolution
        self._resolutions[resolution.host] = resolution
        return changed

    def put_health(self, address: str, health: Health, policy: Policy) -> bool:
        """Keep the outcome of a check."""
        before = self._health.get(address)
        self._health[address] = health
        if before is None:
            return True
        return _turns(before.status, health.status, policy.status_rise, policy.status_fall) or _turns(
            before.sql, health.sql, policy.sql_rise, policy.sql_fall
        )

    def put_load(self, load: EnvoyLoad, awaited: Collection[str]) -> bool:
        """Keep an Envoy's report and bring the sums up to date.

        A decision is due when no Envoy has a session on one of the endpoints `awaited`.
        """
        before = self._loads.get(load.envoy)
        if before is not None:
            self._subtract(before)
            elapsed = load.at - before.at
            if elapsed > 0:
                self._rates[load.envoy] = sum(load.opened.values()) / elapsed
        for endpoint, count in load.live.items():
            self._live[endpoint] = self._live.get(endpoint, 0) + count
        self._loads[load.envoy] = load
        self.see_envoy(load.envoy, load.at)
        return any(endpoint not in self._live for endpoint in awaited)

    def put_report(self, report: ModuleReport) -> list[Refusal]:
        """Keep what an Envoy's module told; returns the configurations that it refused since.

        It decides nothing: whether a node is empty is told by load reports alone.
        """
        # By count, for all that were ever refused are told each time, and bit by bit when a stream begins.
        known = self._refused.setdefault(report.envoy, {})
        news = [
            Refusal(report.at, extension, text)
            for (extension, text), count in report.refusals.items()
            if known.get((extension, text)) != count
        ]
        if len(known) > _MOST_REFUSED:
            known.clear()
        known.update(report.refusals)
        self._reports[report.envoy] = report
        if news:
            self._refusals[report.envoy] = news[-1]
        return news

    def see_envoy(self, envoy: str, at: float) -> None:
        """An Envoy was there at that time."""
        self._envoys[envoy] = max(at, self._envoys.get(envoy, 0.0))

    def put_fleet(self, statuses: Iterable[EnvoyStatus], now: float, memory: float) -> None:
        """Keep who is there and follows us; forget who was seen last over `memory` seconds ago."""
        followers = set()
        for status in statuses:
            connected = status.connected_since is not None
            self.see_envoy(status.id, now if connected else status.last_seen)
            if connected and status.endpoints_acked and status.streams == 1:
                followers.add(status.id)
        self.forget_envoys(now - memory)
        self._doubted = self._envoys.keys() - followers

    def forget_envoys(self, seen_before: float) -> None:
        """Forget Envoys that have not been seen since, and the sessions that they reported last."""
        for envoy in [e for e, seen in self._envoys.items() if seen < seen_before]:
            del self._envoys[envoy]
            load = self._loads.pop(envoy, None)
            if load is not None:
                self._subtract(load)
            self._rates.pop(envoy, None)
        for envoy in [e for e, report in self._reports.items() if report.at < seen_before]:
            del self._reports[envoy], self._refused[envoy]
            self._refusals.pop(envoy, None)

    def keep_nodes(self, known: Mapping[str, object]) -> None:
        """Forget the health and the traffic of nodes that are not known any more."""
        for address in self._health.keys() - known.keys():
            del self._health[address]
        for envoy, report in self._reports.items():
            kept = {a: traffic for a, traffic in report.nodes.items() if a in known or not a}
            self._reports[envoy] = replace(report, nodes=MappingProxyType(kept))

    def keep_hosts(self, hosts: set[str]) -> None:
        """Forget names that nobody asks for any more."""
        for host in self._resolutions.keys() - hosts:
            del self._resolutions[host]

    def _subtract(self, load: EnvoyLoad) -> None:
        for endpoint, count in load.live.items():
            left = self._live.get(endpoint, 0) - count
            if left > 0:
                self._live[endpoint] = left
            else:
                self._live.pop(endpoint, None)


def _turns(before: Probe | None, after: Probe | None, rise: int, fall: int) -> bool:
    """Whether the step from one probe to the next can change a verdict.

    It can when the outcome is new, or while the streak still grows towards a threshold.
    """
    if before is None or after is None:
        return before is not after
    if before.outcome is not after.outcome:
        return True
    return after.streak <= max(rise, fall)
