"""What each class of Envoy is to have of one plan, made when the first Envoy of that class wants it.

What classes have in common is made once: clusters and listeners depend on the settings alone, endpoints on
the plan and, where there are nodes nearby, on the zone; live configurations on the settings and the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from controlplane.config.settings import Settings, policy
from controlplane.model.plan import Plan
from controlplane.xds.resource_set import Collection, Resource, collect, digest_of, gather, resource
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, ResourceType
from controlplane.xds.resources import listeners_and_clusters
from controlplane.xds.resources.endpoints import assignment, by_group, homes
from controlplane.xds.resources.live_config import live_config, live_config_text, padded
from controlplane.xds.resources.profile import EnvoyClass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one class of Envoy is to have. `version` names it.

    `demand` is the setting for whose sake a class without Tidevoy's module has no listener; empty: none.
    `absent` is the group of the class when there is no such group, and so nothing to have; empty: there is.
    """

    version: str
    collections: Mapping[ResourceType, Collection]
    demand: str = ""
    absent: str = ""
    _with_none: dict[frozenset[str], Collection] = field(default_factory=dict, compare=False, repr=False)

    def endpoints(self, clusters: Set[str]) -> Collection:
        """The endpoints for an Envoy that has these clusters; an empty set for each whose group is no more.

        An Envoy keeps such a cluster. Unless it is told so, it would lead to the nodes of before for ever.
        """
        held = self.collections[ENDPOINTS]
        lost = frozenset(n for n in clusters - held.resources.keys() if listeners_and_clusters.is_cluster(n))
        if not lost:
            return held
        if lost not in self._with_none:
            empty = (_assigned(name, assignment([], name)) for name in lost)
            self._with_none[lost] = gather(ENDPOINTS, (*held.resources.values(), *empty))
        return self._with_none[lost]


class Fixtures:
    """Clusters and listeners under some settings: what no plan changes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._made: dict[EnvoyClass, tuple[Collection, Collection]] = {}

    def of(self, envoy_class: EnvoyClass) -> tuple[Collection, Collection]:
        """The clusters and the listeners of a class; they are the same in each zone."""
        anywhere = envoy_class.at(envoy_class.group, "")
        if anywhere not in self._made:
            self._made[anywhere] = (
                collect(CLUSTER, listeners_and_clusters.clusters(self.settings, anywhere)),
                collect(LISTENER, listeners_and_clusters.listeners(self.settings, anywhere)),
            )
        return self._made[anywhere]


class Snapshots:
    """The snapshots of one plan, by class; equal plans and settings give equal versions in any process."""

    def __init__(self, plan: Plan | None = None, fixtures: Fixtures | None = None) -> None:
        """Without a plan nothing is published yet."""
        self._plan = plan or Plan()
        self._fixtures = None if plan is None else fixtures
        self._made: dict[EnvoyClass, Snapshot] = {}
        self._endpoints: dict[tuple[tuple[str, str, str], ...], Collection] = {}
        self._live_configs: dict[tuple[tuple[str, str], ...], Collection] = {}
        self._assigned: dict[tuple[str, str, str], Resource] = {}
        self._nodes = by_group(self._plan)
        self._homes = homes(self._plan, policy(fixtures.settings).strategy) if fixtures else frozenset()

    def get(self, envoy_class: EnvoyClass) -> Snapshot | None:
        """The snapshot of a class; None: nothing is published yet."""
        return None if self._fixtures is None else self[envoy_class]

    def __getitem__(self, envoy_class: EnvoyClass) -> Snapshot:
        if envoy_class not in self._made:
            if self._fixtures is None:
                raise KeyError(envoy_class)
            self._made[envoy_class] = self._make(envoy_class, self._fixtures)
        return self._made[envoy_class]

    def _make(self, envoy_class: EnvoyClass, fixtures: Fixtures) -> Snapshot:
        clusters, listeners = fixtures.of(envoy_class)
        ports = listeners_and_clusters.ports(fixtures.settings, envoy_class.group)
        collections = {
            CLUSTER: clusters,
            ENDPOINTS: self._endpoints_of(ports, envoy_class.zone),
            LISTENER: listeners,
            # Also of classes without the module: an Envoy keeps its listener when the settings name another.
            LIVE_CONFIG: self._live_config_of(ports),
        }
        parts = (part for kind, held in collections.items() for part in (kind.url, held.version))
        absent = "" if ports else envoy_class.group
        return Snapshot(digest_of(*parts), collections, fixtures.settings.tls.demand, absent)

    def _live_config_of(self, ports: list[listeners_and_clusters.Port]) -> Collection:
        """The live configurations of these ports' groups; the same in each zone."""
        wanted = tuple((port.live_config, port.group) for port in ports)
        if wanted not in self._live_configs:
            self._live_configs[wanted] = gather(LIVE_CONFIG, (self._live_config(*each) for each in wanted))
        return self._live_configs[wanted]

    def _live_config(self, name: str, group: str) -> Resource:
        assert self._fixtures is not None
        nodes = self._nodes.get(group, [])
        text = live_config_text(self._plan, nodes, self._fixtures.settings, group)

        def encode(json_text: str) -> bytes:
            return listeners_and_clusters.packed(LIVE_CONFIG, live_config(name, json_text))

        return resource(name, encode(text), lambda: encode(padded(text)))

    def _endpoints_of(self, ports: list[listeners_and_clusters.Port], zone: str) -> Collection:
        """The endpoints of these ports' clusters; those of a zone are those of all where it has no nodes."""
        wanted = tuple(
            (port.cluster, port.group, zone if (port.group, zone) in self._homes else "") for port in ports
        )
        if wanted not in self._endpoints:
            self._endpoints[wanted] = gather(ENDPOINTS, (self._assignment(*each) for each in wanted))
        return self._endpoints[wanted]

    def _assignment(self, cluster: str, group: str, home: str) -> Resource:
        key = (cluster, group, home)
        if key not in self._assigned:
            nodes = self._nodes.get(group, [])
            self._assigned[key] = _assigned(cluster, assignment(nodes, cluster, home))
        return self._assigned[key]


def snapshots(plan: Plan, settings: Settings) -> Snapshots:
    """What is published of a plan under these settings."""
    return Snapshots(plan, Fixtures(settings))


def _assigned(cluster: str, message: bytes) -> Resource:
    return resource(cluster, listeners_and_clusters.packed(ENDPOINTS, message))
