"""All resources of one plan for one class of Envoy, serialised once and shared by the streams of that class.

A version is a hash of content, so that replicas and restarted control planes that publish the same thing
give it the same name, and an Envoy that comes back is known to hold it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from controlplane.config import Settings
from controlplane.model import Plan
from controlplane.publish import resources
from controlplane.publish.envoy_class import CLASSES, EnvoyClass
from controlplane.publish.resource_type import CLUSTER, ENDPOINTS, LISTENER, ResourceType
from controlplane.publish.wire import delimited

# Field numbers of discovery.v3.DiscoveryResponse, DeltaDiscoveryResponse and Resource.
_SOTW_VERSION, _RESOURCES, _TYPE_URL = 1, 2, 4
_RESOURCE_VERSION, _RESOURCE_BODY, _RESOURCE_NAME = 1, 2, 3


def _version(*parts: bytes | str) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource. The two bodies are `resources` fields, ready to be put into a response."""

    name: str
    version: str
    sotw: bytes
    delta: bytes


@dataclass(frozen=True, slots=True)
class Collection:
    """All resources of one type. `body` is a whole state-of-the-world response but for its nonce."""

    kind: ResourceType
    version: str
    resources: Mapping[str, Resource]
    body: bytes

    def sotw_body(self, names: frozenset[str] | None) -> bytes:
        """A response with the resources of those names, without nonce; None: all there are."""
        if names is None or names >= self.resources.keys():
            return self.body
        return _sotw_body(
            self.kind, self.version, (self.resources[name] for name in sorted(names & self.resources.keys()))
        )


def collect(kind: ResourceType, bodies: Mapping[str, bytes]) -> Collection:
    """A collection of resources given as name -> serialised `google.protobuf.Any`."""
    entries = {name: _resource(name, bodies[name]) for name in sorted(bodies)}
    version = _version(*(part for entry in entries.values() for part in (entry.name, entry.version)))
    return Collection(kind, version, entries, _sotw_body(kind, version, entries.values()))


def _resource(name: str, body: bytes) -> Resource:
    version = _version(body)
    wrapped = (
        delimited(_RESOURCE_VERSION, version)
        + delimited(_RESOURCE_BODY, body)
        + delimited(_RESOURCE_NAME, name)
    )
    return Resource(name, version, delimited(_RESOURCES, body), delimited(_RESOURCES, wrapped))


def _sotw_body(kind: ResourceType, version: str, entries: Iterable[Resource]) -> bytes:
    head = delimited(_SOTW_VERSION, version) + delimited(_TYPE_URL, kind.url)
    return head + b"".join(entry.sotw for entry in entries)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one class of Envoy is to have. `version` names all of it.

    `demand` is the setting for whose sake a class without Tidevoy's module has no listener; empty: none.
    """

    version: str
    collections: Mapping[ResourceType, Collection]
    demand: str = ""


def snapshots(plan: Plan, settings: Settings) -> dict[EnvoyClass, Snapshot]:
    """One snapshot a class, from a plan; equal plans and settings give equal versions in any process."""
    endpoints = collect(ENDPOINTS, resources.assignments(plan))
    made: dict[EnvoyClass, Snapshot] = {}
    for envoy_class in CLASSES:
        collections = {
            CLUSTER: collect(CLUSTER, resources.clusters(settings, envoy_class)),
            ENDPOINTS: endpoints,
            LISTENER: collect(LISTENER, resources.listeners(settings, envoy_class)),
        }
        parts = (part for kind, held in collections.items() for part in (kind.url, held.version))
        made[envoy_class] = Snapshot(_version(*parts), collections, settings.tls.demand)
    return made
