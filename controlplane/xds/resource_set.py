"""Versioned resources, serialised once and shared by all streams that they are sent on.

A version is a hash of the content: replicas and restarted control planes that publish the same content give
it the same version, so a reconnected Envoy is known to hold it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from hashlib import blake2b

from controlplane.xds.protobuf_encoding import delimited
from controlplane.xds.resource_type import ResourceType

# Field numbers of discovery.v3.DiscoveryResponse, DeltaDiscoveryResponse and Resource.
_SOTW_VERSION, _RESOURCES, _TYPE_URL = 1, 2, 4
_RESOURCE_VERSION, _RESOURCE_BODY, _RESOURCE_NAME = 1, 2, 3

_VERSION_SEPARATOR = "."  # between the versions of resources


def digest_of(*parts: bytes | str) -> str:
    """Return a short hash of content, the same in any process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource. `sotw` and `delta` are encoded `resources` fields, ready to append to a response.

    `reencode` returns the same content as other bytes each time; resources of a `skips_identical` type have
    it.
    """

    name: str
    version: str
    sotw: bytes
    delta: bytes
    reencode: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def reencoded(self) -> Resource:
        """Return the same resource and version in bytes that no Envoy was ever sent."""
        return self if self.reencode is None else _make_resource(self.name, self.version, self.reencode())


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """All resources of one type. `body` is a whole state-of-the-world response without its nonce."""

    kind: ResourceType
    version: str
    resources: Mapping[str, Resource]
    body: bytes

    def sotw_body(self, names: frozenset[str] | None) -> bytes:
        """Return a response with the resources of these names (None: all), without its nonce."""
        if names is None or names >= self.resources.keys():
            return self.body
        return _sotw_body(
            self.kind, self.version, (self.resources[name] for name in sorted(names & self.resources.keys()))
        )

    @property
    def versions(self) -> dict[str, str]:
        """Version of each resource by name."""
        return {name: resource.version for name, resource in self.resources.items()}

    def reencoded(self) -> ResourceSet:
        """Return the same resources and versions in bytes that no Envoy was ever sent."""
        return build_resource_set(self.kind, (resource.reencoded() for resource in self.resources.values()))

    def filtered(self, names: Set[str]) -> ResourceSet:
        """Return the set of those resources that have one of these names."""
        if names >= self.resources.keys():
            return self
        return build_resource_set(
            self.kind, (resource for name, resource in self.resources.items() if name in names)
        )

    def subset_by_version(self, version: str) -> ResourceSet | None:
        """Return the subset of resources that has this version, else None; only for immutable types."""
        if version == self.version:
            return self
        by_version = {resource.version: resource for resource in self.resources.values()}
        versions = version.split(_VERSION_SEPARATOR)
        if not self.kind.immutable or not all(part in by_version for part in versions):
            return None
        return build_resource_set(self.kind, (by_version[part] for part in versions))


def resource_set_from_bodies(kind: ResourceType, bodies: Mapping[str, bytes]) -> ResourceSet:
    """Build a set from name -> serialised `google.protobuf.Any`."""
    return build_resource_set(kind, (make_resource(name, body) for name, body in bodies.items()))


def build_resource_set(kind: ResourceType, resources: Iterable[Resource]) -> ResourceSet:
    """Build a set of these resources.

    The version of a set of immutable resources joins the versions of all of them: a reconnected Envoy holds
    some of the published resources, and may get the rest. A body holds its resource's name.
    """
    entries = {resource.name: resource for resource in sorted(resources, key=lambda resource: resource.name)}
    if kind.immutable and entries:
        version = _VERSION_SEPARATOR.join(entry.version for entry in entries.values())
    else:
        version = digest_of(*(part for entry in entries.values() for part in (entry.name, entry.version)))
    return ResourceSet(kind, version, entries, _sotw_body(kind, version, entries.values()))


def make_resource(name: str, body: bytes, reencode: Callable[[], bytes] | None = None) -> Resource:
    """Build one resource from its name and its serialised `google.protobuf.Any`."""
    return _make_resource(name, digest_of(body), body, reencode)


def _make_resource(
    name: str, version: str, body: bytes, reencode: Callable[[], bytes] | None = None
) -> Resource:
    wrapped = (
        delimited(_RESOURCE_VERSION, version)
        + delimited(_RESOURCE_BODY, body)
        + delimited(_RESOURCE_NAME, name)
    )
    sotw, delta = delimited(_RESOURCES, body), delimited(_RESOURCES, wrapped)
    return Resource(name, version, sotw, delta, reencode)


def _sotw_body(kind: ResourceType, version: str, entries: Iterable[Resource]) -> bytes:
    head = delimited(_SOTW_VERSION, version) + delimited(_TYPE_URL, kind.url)
    return head + b"".join(entry.sotw for entry in entries)
