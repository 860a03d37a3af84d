"""State of one Envoy's subscription to one resource type on one stream. No I/O, no clock.

The xDS transport protocol has two variants, with one class each. The caller passes the latest resource set
with each call, so a version that is replaced before the next call is never sent.

Resources of an immutable type are not changed after an Envoy has them. New ones are sent one at a time, so
that a NACK concerns one resource and does not block others.

Sources: envoyproxy/envoy `docs/root/api-docs/xds_protocol.rst`, and Envoy 1.40's behaviour.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from envoy.service.discovery.v3 import discovery_pb2

from controlplane.xds.discovery_request import parse_error_detail
from controlplane.xds.protobuf_encoding import delimited
from controlplane.xds.resource_set import Resource, ResourceSet, build_resource_set, structures_of
from controlplane.xds.resource_type import ResourceType

WILDCARD = "*"

# Field numbers of discovery.v3.DeltaDiscoveryResponse; `nonce` has the same number in DiscoveryResponse.
_SYSTEM_VERSION, _TYPE_URL, _NONCE, _REMOVED = 1, 4, 5, 6


@dataclass(frozen=True, slots=True)
class AckResult:
    """An Envoy's ACK of a response, or its NACK if `error_detail` is set."""

    version: str
    error_detail: str = ""


class Subscription(ABC):
    """Base of the two variants of the protocol."""

    request_class: ClassVar[Any]
    """The protobuf class of the requests."""

    def __init__(self, resource_type: ResourceType) -> None:
        self._type = resource_type
        self.is_started = False
        """Whether the Envoy has asked for resources of this type."""
        self._response_count = 0  # on this stream; the nonce of each response is its number
        # True until the first ACK, since the Envoy may have rejected a published resource on an earlier
        # stream. In the state-of-the-world variant, a NACK sets it again, until the next ACK.
        self._may_have_rejected = True

    @property
    @abstractmethod
    def has_resources(self) -> bool:
        """Whether the Envoy has acknowledged any resource."""

    @property
    @abstractmethod
    def ack_pending(self) -> bool:
        """Whether a response has no ACK or NACK yet."""

    @property
    @abstractmethod
    def subscribed_names(self) -> frozenset[str]:
        """The names that the Envoy has subscribed to."""

    @abstractmethod
    def receive(self, request: Any) -> AckResult | None:
        """Process a request and return the ACK or NACK in it, if any."""

    @abstractmethod
    def next_response(
        self, published: ResourceSet, *, may_replace: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        """Return the next serialised response with published resources that the Envoy lacks, or None.

        If `may_replace`, the Envoy's immutable resources may change. Only resources in `allowed_names` may be
        sent; None means all.
        """

    def next_removal(self, published: ResourceSet) -> bytes | None:
        """Return the next serialised response that says which resources do not exist, or None."""
        return None  # in state of the world, Envoy removes resources that are missing from a response

    def mark_all_due(self) -> None:  # noqa: B027 - in state of the world, Envoy repeats its request by itself
        """Mark all subscribed resources to be sent again."""

    @abstractmethod
    def is_synced(self, published: ResourceSet) -> bool:
        """Whether the Envoy has acknowledged all resources of this set that it wants and may get."""

    def is_stale(self, published: ResourceSet) -> bool:
        """Whether the Envoy has an immutable resource in another version than the published one.

        Settings that the Envoy applies while it runs do not count.
        """
        if not self._type.immutable or not self.has_resources:
            return False
        return not self.held_structures() <= structures_of(published.versions.values())

    def has_resource(self, resource: Resource) -> bool:
        """Whether the Envoy has this published resource of an immutable type."""
        return structures_of([resource.version]) <= self.held_structures()

    def held_structures(self) -> frozenset[str]:
        """Return what identifies the resources that the Envoy has, except for settings that it applies."""
        return structures_of(self._held_versions())

    @abstractmethod
    def _held_versions(self) -> Iterable[str]:
        """Return the versions of the resources, or of the set, that the Envoy has acknowledged."""


class SotwSubscription(Subscription):
    """State of the world: each response has all resources that the Envoy subscribed to."""

    request_class = discovery_pb2.DiscoveryRequest

    def __init__(self, resource_type: ResourceType) -> None:
        super().__init__(resource_type)
        # For a wildcard type, an empty list of names means all resources until the Envoy has named one.
        self._has_named_resources = False
        self._subscribed: frozenset[str] | None = frozenset()  # None: all resources
        self._acked_version = ""  # acknowledged last, on this stream or an earlier one
        self._rejected_version = ""  # rejected by the latest NACK, and still published
        self._sent_version = ""  # version of the latest response
        self._sent_resources: ResourceSet | None = None  # content of the latest response
        # The resource set of `_acked_version`. None if the Envoy has acknowledged nothing, or if the set of a
        # version from an earlier stream has not been found yet.
        self._acked_resources: ResourceSet | None = None
        self._rejected_versions: set[str] = set()  # versions of immutable resources
        self._ack_pending = False  # the latest response has no ACK or NACK yet
        self._response_due = False  # the Envoy waits for a response even if nothing has changed

    @property
    def has_resources(self) -> bool:
        return bool(self._acked_version)

    @property
    def ack_pending(self) -> bool:
        return self._ack_pending

    @property
    def subscribed_names(self) -> frozenset[str]:
        return self._subscribed or frozenset()

    def receive(self, request: Any) -> AckResult | None:
        names = frozenset(request.resource_names)
        if not self.is_started:
            self.is_started = True
            self._acked_version = request.version_info
            self._set_subscribed(names)
            # The response to the last request may have been lost with the previous stream.
            self._response_due = not (self._type.immutable and self._acked_version)
            return None
        if request.response_nonce != self._nonce:
            return None  # sent before the Envoy got the latest response; the ACK of that response follows
        previous = self._subscribed
        self._set_subscribed(names)
        if not self._ack_pending:
            # Envoy repeats its request after a cluster change. Without a response, it would use the new
            # cluster only after 15 s. A request that only removes names needs no response.
            self._response_due |= not _is_reduced(self._subscribed, previous)
            return None
        self._ack_pending = False
        if error_detail := parse_error_detail(request):
            self._rejected_version = self._sent_version
            self._may_have_rejected = True
            # The Envoy may have applied a part of the response, so the next response is sent even if it has
            # the version that the Envoy acknowledged before.
            self._response_due = True
            self._remember_rejected()
            return AckResult(self._sent_version, error_detail)
        self._acked_version, self._acked_resources = self._sent_version, self._sent_resources
        self._may_have_rejected = False
        self._response_due = not (self._subscribed == previous or _is_reduced(self._subscribed, previous))
        return AckResult(self._sent_version)

    def next_response(
        self, published: ResourceSet, *, may_replace: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        if not self.is_started or self._wants_none_of(published):
            return None
        next_set = published
        if self._type.immutable:
            extended_set = (
                None if self._ack_pending else self._next_resource_set(published, may_replace, allowed_names)
            )
            if extended_set is None or not extended_set.resources:
                # Never send an empty set: its ACK would make `has_resources` true.
                return None
            next_set = extended_set
        if self._type.skips_identical and self._ack_pending:
            # Wait for the ACK or NACK: Envoy acknowledges a resource without reading it if the pending
            # response has the same resource, even if Envoy rejects that response.
            return None
        if self._rejected_version == next_set.version:
            return None
        self._rejected_version = ""
        latest_version = self._sent_version if self._ack_pending else self._acked_version
        if latest_version == next_set.version and not self._response_due:
            return None
        if self._wants_none_of(next_set):
            return None
        self._response_due = False
        self._ack_pending = True
        self._sent_version, self._sent_resources = next_set.version, next_set
        self._response_count += 1
        # Envoy would acknowledge rejected resources without reading them if the bytes were the same.
        if self._type.skips_identical and self._may_have_rejected and next_set.version != self._acked_version:
            next_set = next_set.reencoded()
        return next_set.sotw_body(self._subscribed) + delimited(_NONCE, self._nonce)

    def is_synced(self, published: ResourceSet) -> bool:
        if self._wants_none_of(published):
            return True
        if self._type.immutable and self.has_resources:
            held = self._held_resources(published)
            return held is None or (
                not self._ack_pending and held.resources.keys() >= published.resources.keys()
            )
        is_latest = self._acked_version == published.version
        return is_latest and not self._rejected_version and not self._ack_pending

    def is_stale(self, published: ResourceSet) -> bool:
        if super().is_stale(published):
            return True
        # Resources whose content is not known cannot be repeated, so the Envoy gets no further ones.
        lacks_any = not structures_of(published.versions.values()) <= self.held_structures()
        is_unknown = self.has_resources and self._held_resources(published) is None
        return self._type.immutable and is_unknown and lacks_any

    def _held_versions(self) -> Iterable[str]:
        return [self._acked_version] if self._acked_version else []

    def _held_resources(self, published: ResourceSet) -> ResourceSet | None:
        """Return the Envoy's resources; None if it has none, or if their version is no longer published."""
        if self._acked_resources is None and self._acked_version:
            self._acked_resources = published.subset_by_version(self._acked_version)
        return self._acked_resources

    def _next_resource_set(
        self, published: ResourceSet, may_replace: bool, allowed_names: Set[str] | None
    ) -> ResourceSet | None:
        """Return the Envoy's resources and one that it lacks, or None if its resources are unknown.

        If `may_replace`, return all resources in `allowed_names` instead.
        """
        addable = published if allowed_names is None else published.filtered(allowed_names)
        if may_replace:
            return addable
        held = self._held_resources(published)
        if self.has_resources and held is None:
            return None
        held_by_name = {} if held is None else held.resources
        missing = (
            resource
            for name, resource in addable.resources.items()
            if name not in held_by_name and resource.version not in self._rejected_versions
        )
        return build_resource_set(self._type, (*held_by_name.values(), *itertools.islice(missing, 1)))

    def _remember_rejected(self) -> None:
        """Remember which immutable resources were new in the rejected response."""
        if self._type.immutable and self._sent_resources is not None:
            held_by_name = {} if self._acked_resources is None else self._acked_resources.resources
            self._rejected_versions |= {
                resource.version
                for name, resource in self._sent_resources.resources.items()
                if name not in held_by_name
            }

    @property
    def _nonce(self) -> str:
        return str(self._response_count) if self._response_count else ""

    def _wants_none_of(self, published: ResourceSet) -> bool:
        if not self._subscribed:
            return self._subscribed is not None
        # If no named resource is published, a type without wildcard gets no response, so that the Envoy waits
        # for the resources. Other types get a response without them, so that the Envoy removes them.
        return not self._type.wildcard and not self._subscribed & published.resources.keys()

    def _set_subscribed(self, names: frozenset[str]) -> None:
        self._has_named_resources = self._has_named_resources or bool(names)
        is_wildcard = WILDCARD in names or (self._type.wildcard and not self._has_named_resources)
        self._subscribed = None if is_wildcard else names


def _is_reduced(now: frozenset[str] | None, before: frozenset[str] | None) -> bool:
    if now is None:
        return False
    return before is None or now < before


class DeltaSubscription(Subscription):
    """Incremental: each response has only changed resources, and the names of removed resources."""

    request_class = discovery_pb2.DeltaDiscoveryRequest

    def __init__(self, resource_type: ResourceType) -> None:
        super().__init__(resource_type)
        self._is_wildcard = False
        self._subscribed_names: set[str] = set()
        self._acked_versions: dict[str, str] = {}  # acknowledged version by name
        # By name: the versions that the Envoy has rejected. Cleared when another version is sent.
        self._rejected_versions: dict[str, set[str]] = {}
        self._pending: dict[str, _PendingResponse] = {}  # nonce -> response without ACK or NACK
        self._names_due: set[str] = set()  # names to send even if nothing has changed

    @property
    def has_resources(self) -> bool:
        return bool(self._acked_versions)

    @property
    def ack_pending(self) -> bool:
        return bool(self._pending)

    @property
    def subscribed_names(self) -> frozenset[str]:
        return frozenset(self._subscribed_names)

    def receive(self, request: Any) -> AckResult | None:
        ack_result = self._handle_ack(request)
        if not self.is_started:
            self.is_started = True
            self._acked_versions = dict(request.initial_resource_versions)
            self._is_wildcard = self._type.wildcard and not request.resource_names_subscribe
        for name in request.resource_names_unsubscribe:
            self._unsubscribe(name)
        for name in request.resource_names_subscribe:
            self._subscribe(name)
        return ack_result

    def next_response(
        self, published: ResourceSet, *, may_replace: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        immutable = self._type.immutable and not may_replace
        if immutable and self._pending:
            return None
        addable = published if allowed_names is None else published.filtered(allowed_names)
        missing = (
            resource
            for resource in addable.resources.values()
            if self._needs_update(resource.name, resource.version, immutable)
        )
        changed = list(itertools.islice(missing, 1 if immutable else None))
        if not changed:
            return None
        self._names_due.difference_update(resource.name for resource in changed)
        versions = {resource.name: resource.version for resource in changed}
        if (
            self._type.skips_identical
            and self._may_have_rejected
            and not versions.items() <= self._acked_versions.items()
        ):
            # Envoy would acknowledge rejected resources without reading them if the bytes were the same.
            changed = [resource.reencoded() for resource in changed]
        return self._build_response(addable.version, versions, (resource.delta for resource in changed))

    def next_removal(self, published: ResourceSet) -> bytes | None:
        expected_names = {name for name in self._known_names() if self._expected_version(name)}
        due_names = self._names_due & self._subscribed_names
        removed = (
            due_names - expected_names if self._type.immutable else due_names | expected_names
        ) - published.resources.keys()
        if not removed:
            return None
        self._names_due -= removed
        names = sorted(removed)
        return self._build_response(
            published.version, dict.fromkeys(names, ""), (delimited(_REMOVED, name) for name in names)
        )

    def mark_all_due(self) -> None:
        # In this variant, Envoy does not repeat its request after a cluster change.
        self._names_due |= self._subscribed_names

    def is_synced(self, published: ResourceSet) -> bool:
        if self._type.immutable and self.has_resources:
            return not self._pending and self._acked_versions.keys() >= published.resources.keys()
        wanted = {
            name: resource.version
            for name, resource in published.resources.items()
            if self._is_subscribed(name)
        }
        # An Envoy may have applied parts of a response that it rejected. So it is synced only after an ACK of
        # a later response, even if the version that it had before is published again.
        has_rejected = not self._rejected_versions.keys().isdisjoint(wanted)
        return not self._pending and not has_rejected and self._acked_versions == wanted

    def _held_versions(self) -> Iterable[str]:
        return self._acked_versions.values()

    def _handle_ack(self, request: Any) -> AckResult | None:
        pending = self._pending.pop(request.response_nonce, None)
        if pending is None:
            return None
        if error_detail := parse_error_detail(request):
            for name, version in pending.changes.items():
                self._rejected_versions.setdefault(name, set()).add(version)
            self._names_due.update(pending.changes)  # the Envoy may have applied a part
            return AckResult(pending.version, error_detail)
        self._may_have_rejected = False
        for name, version in pending.changes.items():
            if version:
                self._acked_versions[name] = version
            else:
                self._acked_versions.pop(name, None)
        return AckResult(pending.version)

    def _subscribe(self, name: str) -> None:
        if name == WILDCARD:
            self._is_wildcard = True
            return
        self._subscribed_names.add(name)
        if not (self._type.immutable and name in self._acked_versions):
            self._names_due.add(name)

    def _unsubscribe(self, name: str) -> None:
        if name == WILDCARD:
            self._is_wildcard = False
            for known_name in self._known_names() - self._subscribed_names:
                self._forget(known_name)
            return
        self._subscribed_names.discard(name)
        if self._is_wildcard:
            # The protocol requires a response that says whether the wildcard still covers this name.
            self._names_due.add(name)
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._acked_versions.pop(name, None)
        self._rejected_versions.pop(name, None)
        self._names_due.discard(name)
        for pending in self._pending.values():
            pending.changes.pop(name, None)

    def _known_names(self) -> set[str]:
        """Return the names of resources that the Envoy has, or may have from a pending response."""
        return self._acked_versions.keys() | {
            name for response in self._pending.values() for name in response.changes
        }

    def _is_subscribed(self, name: str) -> bool:
        return self._is_wildcard or name in self._subscribed_names

    def _needs_update(self, name: str, version: str, immutable: bool) -> bool:
        if not self._is_subscribed(name) or version in self._rejected_versions.get(name, ()):
            return False
        self._rejected_versions.pop(name, None)
        expected = self._expected_version(name)
        if immutable and expected:
            return False
        return expected != version or name in self._names_due

    def _expected_version(self, name: str) -> str:
        """Return the version that the Envoy will have after all pending responses; empty if none."""
        for pending in reversed(self._pending.values()):
            if name in pending.changes:
                return pending.changes[name]
        return self._acked_versions.get(name, "")

    def _build_response(self, version: str, changes: dict[str, str], parts: Iterable[bytes]) -> bytes:
        self._response_count += 1
        nonce = str(self._response_count)
        self._pending[nonce] = _PendingResponse(version, changes)
        head = delimited(_SYSTEM_VERSION, version) + delimited(_TYPE_URL, self._type.url)
        return head + b"".join(parts) + delimited(_NONCE, nonce)


@dataclass(frozen=True, slots=True)
class _PendingResponse:
    """A response without ACK or NACK. `changes` maps names to versions; an empty version is a removal."""

    version: str
    changes: dict[str, str]
