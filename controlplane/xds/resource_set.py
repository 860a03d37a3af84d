"""Versioned resources, serialised once for all streams.

A version is a hash of the content, so the same content has the same version in all replicas and after a
restart. The version that an Envoy reports when it reconnects therefore shows whether it has the content.
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

_VERSION_SEPARATOR = "."  # between the versions of the resources of an immutable type
# Between the two parts of a version: the hash of what only new Envoys get, and the hash of the whole body.
_STRUCTURE_SEPARATOR = "-"


def digest_of(*parts: bytes | str) -> str:
    """Return a short hash of the parts, which is the same in every process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource. `sotw` and `delta` are the field `resources` of a response, encoded for each variant.

    Each call of `reencode` returns the same content in other bytes; see `ResourceType.skips_identical`.
    """

    name: str
    version: str
    sotw: bytes
    delta: bytes
    reencode: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def reencoded(self) -> Resource:
        """Return the same resource and version, with `reencode` in bytes that were never sent to an Envoy."""
        return (
            self if self.reencode is None else make_resource(self.name, self.reencode(), version=self.version)
        )


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """Resources of one type. `body` is the state-of-the-world response with all of them, without a nonce."""

    resource_type: ResourceType
    version: str
    resources: Mapping[str, Resource]
    body: bytes

    def sotw_body(self, names: frozenset[str] | None) -> bytes:
        """Return the response with the resources of these names (None: all), without a nonce."""
        if names is None or names >= self.resources.keys():
            return self.body
        return _sotw_body(
            self.resource_type,
            self.version,
            (self.resources[name] for name in sorted(names & self.resources.keys())),
        )

    @property
    def versions(self) -> dict[str, str]:
        """Version of each resource by name."""
        return {name: resource.version for name, resource in self.resources.items()}

    def reencoded(self) -> ResourceSet:
        """Return the set with each resource reencoded."""
        return build_resource_set(
            self.resource_type, (resource.reencoded() for resource in self.resources.values())
        )

    def filtered(self, names: Set[str]) -> ResourceSet:
        """Return the subset of resources with one of these names."""
        if names >= self.resources.keys():
            return self
        return build_resource_set(
            self.resource_type, (resource for name, resource in self.resources.items() if name in names)
        )

    def subset_by_version(self, version: str) -> ResourceSet | None:
        """Return the subset whose version as a set is `version`, or None if there is none."""
        if version == self.version:
            return self
        by_version = {resource.version: resource for resource in self.resources.values()}
        versions = version.split(_VERSION_SEPARATOR)
        if not self.resource_type.immutable or not all(part in by_version for part in versions):
            return None
        return build_resource_set(self.resource_type, (by_version[part] for part in versions))


def build_resource_set(resource_type: ResourceType, resources: Iterable[Resource]) -> ResourceSet:
    """Build a set of these resources.

    For an immutable type, the set's version joins the versions of the resources. So the version that an Envoy
    reports when it reconnects shows which resources it has.
    """
    entries = {resource.name: resource for resource in sorted(resources, key=lambda resource: resource.name)}
    if resource_type.immutable and entries:
        version = _VERSION_SEPARATOR.join(entry.version for entry in entries.values())
    else:
        version = digest_of(*(part for entry in entries.values() for part in (entry.name, entry.version)))
    return ResourceSet(resource_type, version, entries, _sotw_body(resource_type, version, entries.values()))


def structures_of(versions: Iterable[str]) -> frozenset[str]:
    """Return what identifies resources of these versions, except for settings that running Envoys apply.

    Each version may be that of a resource or of a set of an immutable type.
    """
    parts = (part for version in versions for part in version.split(_VERSION_SEPARATOR))
    return frozenset(part.partition(_STRUCTURE_SEPARATOR)[0] for part in parts)


def make_resource_with_live_settings(name: str, body: bytes, structure: bytes) -> Resource:
    """Build one resource that contains initial values of settings that running Envoys apply.

    `structure` is the body without these settings.
    """
    version = f"{digest_of(structure)}{_STRUCTURE_SEPARATOR}{digest_of(body)}"
    return make_resource(name, body, version=version)


def make_resource(
    name: str, body: bytes, reencode: Callable[[], bytes] | None = None, *, version: str = ""
) -> Resource:
    """Build one resource. `body` is its serialised `google.protobuf.Any`, which contains the name.

    `version` is the hash of the body by default.
    """
    version = version or digest_of(body)
    delta = (
        delimited(_RESOURCE_VERSION, version)
        + delimited(_RESOURCE_BODY, body)
        + delimited(_RESOURCE_NAME, name)
    )
    return Resource(name, version, delimited(_RESOURCES, body), delimited(_RESOURCES, delta), reencode)


def _sotw_body(resource_type: ResourceType, version: str, entries: Iterable[Resource]) -> bytes:
    head = delimited(_SOTW_VERSION, version) + delimited(_TYPE_URL, resource_type.url)
    return head + b"".join(entry.sotw for entry in entries)
