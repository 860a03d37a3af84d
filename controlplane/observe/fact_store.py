"""Where observers put facts: keeps the sums that decisions need, says when a fact may change a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import EnvoyLoad, Facts
from controlplane.model.health import Health, Probe
from controlplane.model.node_metrics import Vitals
from controlplane.model.nodes import NOTHING, Place, Resolution, Source, Topology
from controlplane.model.plan import Policy
from controlplane.model.traffic import Census, ModuleReport, Refusal
from controlplane.observe.drain_acks import Heeded
from controlplane.observe.migration_counters import MoveCounts

# Seconds: reports nearer to each other have waited for us, and say nothing of a rate.
_SHORTEST = 0.05
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
        self._censuses: dict[str, Census] = {}
        self._counted: dict[str, int] = {}
        self._modules: set[str] = set()
        self._plain: set[str] = set()
        self._moves = MoveCounts()
        self._envoys: dict[str, float] = {}
        self._zones: dict[str, str] = {}
        self._doubted: set[str] = set()
        self._unheard: Set[str] = frozenset()
        self._heeded = Heeded()
        self._rates: dict[str, float] = {}
        self._opened: dict[str, int] = {}
        self._reports: dict[str, ModuleReport] = {}
        self._refusals: dict[str, Refusal] = {}
        self._refused: dict[str, dict[tuple[str, str], int]] = {}
        self._vitals: Mapping[str, Vitals] = {}
        self._vitals_outage = ""

    def begin(self, at: float) -> None:
        """From now on it is this control plane that decides; Envoys of others may still be on their way."""
        self._began = at

    def facts(self) -> Facts:
        """A view of all facts, to be used before the event loop runs on."""
        return Facts(
            topologies=MappingProxyType(self._topologies),
            health=MappingProxyType(self._health),
            resolutions=MappingProxyType(self._resolutions),
            loads=MappingProxyType(self._loads),
            live=MappingProxyType(self._live),
            censuses=MappingProxyType(self._censuses),
            counted=MappingProxyType(self._counted),
            modules=self._modules,
            moves=self._moves.sums,
            arrivals=sum(self._rates.values()),
            opened=MappingProxyType(self._opened),
            envoys=MappingProxyType(self._envoys),
            reports=MappingProxyType(self._reports),
            refusals=MappingProxyType(self._refusals),
            doubted=self._doubted,
            unheard=self._unheard,
            heeded=self._heeded.since,
            began=self._began,
            vitals=MappingProxyType(self._vitals),
            vitals_outage=self._vitals_outage,
            zones=MappingProxyType(self._zones),
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

    def health(self, address: str) -> Health:
        """What the checks know of a node."""
        return self._health.get(address) or Health()

    def put_vitals(self, vitals: Mapping[str, Vitals], outage: str) -> str:
        """Keep what is known of the nodes' vital signs, and why nothing new comes; returns why not before."""
        before, self._vitals_outage = self._vitals_outage, outage
        self._vitals = vitals
        return before

    def put_load(self, load: EnvoyLoad, awaited: Collection[Place]) -> bool:
        """Keep an Envoy's report and bring the sums up to date. What is older than what is known is no news.

        A decision is due when no Envoy has a session on one of the places `awaited`.
        """
        before = self._loads.get(load.envoy)
        if before is not None:
            if load.at < before.at:
                return False  # it comes late, by way of another control plane
            elapsed = load.at - before.at
            if elapsed >= _SHORTEST:
                self._rates[load.envoy] = sum(load.opened.values()) / elapsed
        _shift(self._opened, before.opened if before is not None else NOTHING, load.opened)
        with self._shifted(load.envoy):
            self._loads[load.envoy] = load
        self.see_envoy(load.envoy, load.at)
        return self._leaves_none(awaited)

    def put_census(self, report: ModuleReport, awaited: Collection[Place]) -> bool:
        """Keep how many sessions an Envoy's module has where, if it has told all, and the sums up to date.

        A decision is due when no Envoy has a session on one of the places `awaited`. What was known before a
        stream began anew stays until the new one has told all: a part would make nodes look empty.
        """
        if report.census is None or report.envoy in self._plain:
            return False
        before = self._censuses.get(report.envoy)
        if before is not None and report.at < before.at:
            return False
        with self._shifted(report.envoy):
            self._censuses[report.envoy] = report.census
        return self._leaves_none(awaited)

    def put_report(self, report: ModuleReport) -> list[Refusal]:
        """Keep what an Envoy's module told of traffic; returns the configurations that it refused since.

        What is older than what is known would look like the counts of a module that began anew.
        """
        before = self._reports.get(report.envoy)
        if before is not None and report.at < before.at:
            return []
        self._moves.add(report)
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

    def put_fleet(
        self,
        statuses: Iterable[EnvoyStatus],
        now: float,
        memory: float,
        closed: Collection[str] = (),
        *,
        is_published: bool = True,
        ended: Mapping[str, float] = NOTHING,
        told: Mapping[str, Collection[str]] = NOTHING,
    ) -> None:
        """Keep who is there and where, who follows us and since when, and who has the module.

        `closed` are the nodes that the last plan keeps new sessions off; not `is_published`: what Envoys
        follow is an earlier plan still. `told` has, by id, for Envoys that another control plane tells what
        to do, which of these it has told them.
        Who was seen last over `memory` seconds ago is forgotten, and who was not seen since it `ended`, by
        id and since when, as an operator says; so is what the module counted in an Envoy that has none now.
        """
        followers = set()
        self._heeded.keep(closed)
        self._modules, self._plain, self._zones = set(), set(), {}
        for status in statuses:
            connected = status.connected_since is not None
            self.see_envoy(status.id, now if connected else status.last_seen)
            if status.zone:
                self._zones[status.id] = status.zone
            if status.module_version:
                self._modules.add(status.id)
            elif connected:
                self._plain.add(status.id)
            follows = connected and status.endpoints_acked and status.streams == 1
            if follows:
                followers.add(status.id)
            heeds = told.get(status.id, closed if is_published else ())
            self._heeded.look(status, heeds if follows else (), now)
        for envoy in self._plain & self._censuses.keys():
            self._forget_census(envoy)
        self.forget_envoys(now - memory)
        for envoy, at in ended.items():
            if self._envoys.get(envoy, at + 1) <= at:
                self._forget_envoy(envoy)
                self._forget_report(envoy)
        self._doubted = self._envoys.keys() - followers

    def put_unheard(self, replicas: Set[str]) -> None:
        """Keep which other control planes are there, and tell nothing of their Envoys."""
        self._unheard = replicas

    def forget_envoys(self, seen_before: float) -> None:
        """Forget Envoys that have not been seen since, and the sessions that they reported last."""
        for envoy in [e for e, seen in self._envoys.items() if seen < seen_before]:
            self._forget_envoy(envoy)
        for envoy in [e for e, report in self._reports.items() if report.at < seen_before]:
            self._forget_report(envoy)

    def keep_nodes(self, known: Mapping[str, object]) -> None:
        """Forget the health and the traffic of nodes that are not known any more."""
        for address in self._health.keys() - known.keys():
            del self._health[address]
        named = known.keys() | {""}
        for envoy, report in self._reports.items():
            self._reports[envoy] = report.only(named)
        for envoy, census in self._censuses.items():
            there = {a: count for a, count in census.sessions.items() if a in known}
            with self._shifted(envoy):
                self._censuses[envoy] = replace(
                    census, sessions=MappingProxyType(there), covered=census.covered & known.keys()
                )
        self._moves.keep(known)

    def keep_hosts(self, hosts: set[str]) -> None:
        """Forget names that nobody asks for any more."""
        for host in self._resolutions.keys() - hosts:
            del self._resolutions[host]

    def _forget_envoy(self, envoy: str) -> None:
        del self._envoys[envoy]
        self._heeded.forget(envoy)
        with self._shifted(envoy):
            load = self._loads.pop(envoy, None)
        _shift(self._opened, load.opened if load is not None else NOTHING, NOTHING)
        self._rates.pop(envoy, None)

    def _forget_report(self, envoy: str) -> None:
        self._reports.pop(envoy, None)
        self._refused.pop(envoy, None)
        self._refusals.pop(envoy, None)
        self._moves.forget(envoy)
        if envoy in self._censuses:
            self._forget_census(envoy)

    def _forget_census(self, envoy: str) -> None:
        with self._shifted(envoy):
            del self._censuses[envoy]

    @contextmanager
    def _shifted(self, envoy: str) -> Iterator[None]:
        """Bring the sums up to date with what changes meanwhile of an Envoy's sessions."""
        counted, live = self._sessions(envoy)
        yield
        counted_now, live_now = self._sessions(envoy)
        _shift(self._counted, counted, counted_now)
        _shift(self._live, live, live_now)

    def _sessions(self, envoy: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """What an Envoy adds to the sums: sessions by its module, where that counts, else by its reports."""
        census = self._censuses.get(envoy)
        if census is not None and census.has_served:
            return census.sessions, NOTHING
        load = self._loads.get(envoy)
        return NOTHING, load.live if load is not None else NOTHING

    def _leaves_none(self, awaited: Collection[Place]) -> bool:
        return any(
            endpoint not in self._live and address not in self._counted for address, endpoint in awaited
        )


def _shift(sums: dict[str, int], before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Put one Envoy's counts in the place of those that it had: few differ from one report to the next."""
    if before is after:
        return
    # `copy`, because a proxy takes twice as long to ask, thousands of times.
    held = before.copy() if isinstance(before, MappingProxyType) else before
    changed = {key: count - had for key, count in after.items() if (had := held.get(key, 0)) != count}
    changed |= {key: -held[key] for key in held.keys() - after.keys()}
    for key, more in changed.items():
        left = sums.get(key, 0) + more
        if left > 0:
            sums[key] = left
        else:
            sums.pop(key, None)


def _turns(before: Probe | None, after: Probe | None, rise: int, fall: int) -> bool:
    """Whether the step from one probe to the next can change a verdict.

    It can when the outcome is new, or while the streak still grows towards a threshold.
    """
    if before is None or after is None:
        return before is not after
    if before.outcome is not after.outcome:
        return True
    return after.streak <= max(rise, fall)
