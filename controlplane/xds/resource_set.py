"""Resources with their versions, serialised once and shared by all streams that they are for.

A version is a hash of content, so that replicas and restarted control planes that publish the same thing
give it the same name, and an Envoy that comes back is known to hold it or not.
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
    """A short name for content, the same in any process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource. The two bodies are `resources` fields, ready to be put into a response.

    `encode_again` gives the same content as other bytes each time; a `compared` type has it.
    """

    name: str
    version: str
    sotw: bytes
    delta: bytes
    reencode: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def reencoded(self) -> Resource:
        """The same resource and version, in bytes that no Envoy was ever sent."""
        return self if self.reencode is None else _make_resource(self.name, self.version, self.reencode())


@dataclass(frozen=True, slots=True)
class ResourceSet:
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

    @property
    def versions(self) -> dict[str, str]:
        """The version of each resource, by name."""
        return {name: each.version for name, each in self.resources.items()}

    def reencoded(self) -> ResourceSet:
        """The same resources and versions, in bytes that no Envoy was ever sent."""
        return build_resource_set(self.kind, (each.reencoded() for each in self.resources.values()))

    def filtered(self, names: Set[str]) -> ResourceSet:
        """The resources of those names, of those that are there."""
        if names >= self.resources.keys():
            return self
        return build_resource_set(self.kind, (each for name, each in self.resources.items() if name in names))

    def subset_by_version(self, version: str) -> ResourceSet | None:
        """Those of its resources that make up this version, if they do; only of a sticky type."""
        if version == self.version:
            return self
        found = {each.version: each for each in self.resources.values()}
        versions = version.split(_VERSION_SEPARATOR)
        if not self.kind.immutable or not all(each in found for each in versions):
            return None
        return build_resource_set(self.kind, (found[each] for each in versions))


def resource_set_from_bodies(kind: ResourceType, bodies: Mapping[str, bytes]) -> ResourceSet:
    """A collection of resources given as name -> serialised `google.protobuf.Any`."""
    return build_resource_set(kind, (make_resource(name, body) for name, body in bodies.items()))


def build_resource_set(kind: ResourceType, resources: Iterable[Resource]) -> ResourceSet:
    """A collection of these resources.

    The version of resources that are not changed under an Envoy names each of them: an Envoy that comes back
    has some of what there is now, and may be given the rest. A body holds its resource's name.
    """
    entries = {each.name: each for each in sorted(resources, key=lambda each: each.name)}
    if kind.immutable and entries:
        version = _VERSION_SEPARATOR.join(entry.version for entry in entries.values())
    else:
        version = digest_of(*(part for entry in entries.values() for part in (entry.name, entry.version)))
    return ResourceSet(kind, version, entries, _sotw_body(kind, version, entries.values()))


def make_resource(name: str, body: bytes, reencode: Callable[[], bytes] | None = None) -> Resource:
    """One resource, given as its name and its serialised `google.protobuf.Any`."""
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
