"""State of one Envoy's subscription to one resource type on one stream. No I/O, no clock.

The xDS transport protocol has two variants, one class each with the same interface: `receive` processes a
request and returns the ACK or NACK in it; `next_response` compares with what is published now and returns
the one message that brings the Envoy closer to it, or None. A newer resource set may be passed at any time:
the versions in between are never sent.

Resources of an immutable type are not changed once an Envoy has them. New ones are sent one at a time, so
that a NACK concerns that one resource and blocks no other.

Sources: envoyproxy/envoy `docs/root/api-docs/xds_protocol.rst`, and Envoy 1.40's behaviour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set
from dataclasses import dataclass

from controlplane.xds.discovery_request import DeltaRequest, SotwRequest
from controlplane.xds.protobuf_encoding import delimited
from controlplane.xds.resource_set import Resource, ResourceSet, build_resource_set
from controlplane.xds.resource_type import ResourceType

WILDCARD = "*"

# Field numbers of discovery.v3.DeltaDiscoveryResponse; the nonce's is the same in DiscoveryResponse.
_SYSTEM_VERSION, _TYPE_URL, _NONCE, _REMOVED = 1, 4, 5, 6


@dataclass(frozen=True, slots=True)
class AckResult:
    """An Envoy's ACK of a response, or its NACK if `error_detail` is set."""

    version: str
    error_detail: str = ""


class SotwSubscription:
    """State of the world: each response holds all resources that the Envoy named, or all there are."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        # Once the Envoy has named resources, an empty list means none, not all.
        self._has_named_resources = False
        self._subscribed: frozenset[str] | None = frozenset()  # None: all resources
        self._acked_version = ""  # acknowledged last, on this stream or before it
        self._rejected_version = ""  # rejected, and still the published version
        self._sent_version = ""  # of the latest response
        self._sent_resources: ResourceSet | None = None  # content of the latest response
        # Acknowledged last; None: nothing, or only on an earlier stream.
        self._acked_resources: ResourceSet | None = None
        self._rejected_versions: set[str] = set()  # of immutable resources
        self._response_count = 0  # on this stream; also the latest nonce
        self._ack_pending = False  # the latest response has no ACK or NACK yet
        self._response_due = False  # the Envoy waits for a response even if nothing has changed
        # Whether the Envoy may have rejected resources of the published version: on an earlier stream, or
        # with its latest NACK on this one.
        self._may_have_rejected = True

    @property
    def has_resources(self) -> bool:
        """Whether the Envoy has acknowledged any version."""
        return bool(self._acked_version)

    @property
    def ack_pending(self) -> bool:
        """Whether a response has no ACK or NACK yet, so that the Envoy may have applied it."""
        return self._ack_pending

    @property
    def subscribed_names(self) -> frozenset[str]:
        """The names that the Envoy subscribes to."""
        return self._subscribed or frozenset()

    def receive(self, request: SotwRequest) -> AckResult | None:
        """Process a request and return the ACK or NACK of the latest response in it, if any."""
        if not self._started:
            self._started = True
            self._acked_version = request.version
            self._set_subscribed(request.names)
            # A reconnected Envoy may still wait for endpoints that were lost with the previous stream.
            self._response_due = not (self._kind.immutable and self._acked_version)
            return None
        if request.nonce != self._nonce:
            return None  # sent before the Envoy got the latest response; the ACK of that one is on its way
        previous = self._subscribed
        self._set_subscribed(request.names)
        if not self._ack_pending:
            # Envoy repeats its request unchanged after a cluster change, and delays the new cluster for 15 s
            # if it gets no response. A request that only drops names needs no response.
            self._response_due |= not _is_reduced(self._subscribed, previous)
            return None
        self._ack_pending = False
        if request.error_detail:
            self._rejected_version = self._sent_version
            self._may_have_rejected = True
            # The Envoy may have applied a part of the response, so the next version is sent even if the Envoy
            # had acknowledged that version before.
            self._response_due = True
            self._remember_rejected()
            return AckResult(self._sent_version, request.error_detail)
        self._acked_version, self._acked_resources = self._sent_version, self._sent_resources
        self._may_have_rejected = False
        self._response_due = not (self._subscribed == previous or _is_reduced(self._subscribed, previous))
        return AckResult(self._sent_version)

    def next_response(
        self, offered: ResourceSet, *, replaces: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        """Return the serialised DiscoveryResponse to send now, or None.

        `replaces`: immutable resources may be replaced. `allowed_names`: the resources that may be added;
        None: all.
        """
        if not self._started or self._wants_none_of(offered):
            return None
        if self._kind.immutable:
            next_set = (
                None if self._ack_pending else self._next_resource_set(offered, replaces, allowed_names)
            )
            if next_set is None or not next_set.resources:
                # Once acknowledged, an empty set would count as held, and held resources never change.
                return None
            offered = next_set
        if self._kind.skips_identical and self._ack_pending:
            # Envoy would acknowledge an identical resource without reading it, which would hide a NACK of the
            # earlier response.
            return None
        if self._rejected_version == offered.version:
            return None
        self._rejected_version = ""
        latest_version = self._sent_version if self._ack_pending else self._acked_version
        if latest_version == offered.version and not self._response_due:
            return None
        if (
            not self._kind.wildcard
            and self._subscribed is not None
            and not self._subscribed & offered.resources.keys()
        ):
            return None  # for these types a response may be partial, so no response means "not yet"
        self._response_due = False
        self._ack_pending = True
        self._sent_version, self._sent_resources = offered.version, offered
        self._response_count += 1
        # In the same bytes, Envoy would acknowledge the resources that it rejected without reading them.
        if self._kind.skips_identical and self._may_have_rejected and offered.version != self._acked_version:
            offered = offered.reencoded()
        return offered.sotw_body(self._subscribed) + delimited(_NONCE, self._nonce)

    def next_removal(self, offered: ResourceSet) -> bytes | None:
        """Return None: in state of the world, a resource missing from a response is removed."""
        return None

    def mark_all_due(self) -> None:
        """Do nothing: in state of the world, Envoy repeats its request by itself."""

    def is_synced(self, offered: ResourceSet) -> bool:
        """Whether the Envoy has acknowledged everything that it subscribes to and may get of this set."""
        if self._wants_none_of(offered):
            return True
        if self._kind.immutable and self.has_resources:
            held = self._held_resources(offered)
            return held is None or (
                not self._ack_pending and held.resources.keys() >= offered.resources.keys()
            )
        return self._acked_version == offered.version and not self._rejected_version and not self._ack_pending

    def is_stale(self, offered: ResourceSet) -> bool:
        """Whether the Envoy holds an immutable resource in another version than the published one."""
        if not self._kind.immutable or not self.has_resources:
            return False
        held = self._held_resources(offered)
        return held is None or not held.versions.items() <= offered.versions.items()

    def has_resource(self, resource: Resource, offered: ResourceSet) -> bool:
        """Whether the Envoy holds this published resource of an immutable type."""
        held = self._held_resources(offered)
        return held is not None and held.versions.get(resource.name) == resource.version

    def _held_resources(self, offered: ResourceSet) -> ResourceSet | None:
        """Return what the Envoy holds; None: nothing, or an unpublished version from an earlier stream."""
        if self._acked_resources is None and self._acked_version:
            self._acked_resources = offered.subset_by_version(self._acked_version)
        return self._acked_resources

    def _next_resource_set(
        self, offered: ResourceSet, replaces: bool, allowed_names: Set[str] | None
    ) -> ResourceSet | None:
        """Return what the Envoy may get next: what it holds, unchanged, and one resource that it lacks."""
        addable = offered if allowed_names is None else offered.filtered(allowed_names)
        if replaces:
            return addable
        held = self._held_resources(offered)
        if self.has_resources and held is None:
            return None
        held_by_name = {} if held is None else held.resources
        missing = (
            resource
            for name, resource in addable.resources.items()
            if name not in held_by_name and resource.version not in self._rejected_versions
        )
        return build_resource_set(self._kind, (*held_by_name.values(), *itertools.islice(missing, 1)))

    def _remember_rejected(self) -> None:
        """Remember which immutable resources of the rejected response the Envoy does not hold."""
        if self._kind.immutable and self._sent_resources is not None:
            held_by_name = {} if self._acked_resources is None else self._acked_resources.resources
            self._rejected_versions |= {
                resource.version
                for name, resource in self._sent_resources.resources.items()
                if name not in held_by_name
            }

    @property
    def _nonce(self) -> str:
        return str(self._response_count) if self._response_count else ""

    def _wants_none_of(self, offered: ResourceSet) -> bool:
        if not self._subscribed:
            return self._subscribed is not None
        # For types whose responses may be partial, no response means "not yet". For the others a resource
        # missing from the response is removed, so an empty response has to be sent.
        return not self._kind.wildcard and not self._subscribed & offered.resources.keys()

    def _set_subscribed(self, names: frozenset[str]) -> None:
        self._has_named_resources = self._has_named_resources or bool(names)
        is_wildcard = WILDCARD in names or (self._kind.wildcard and not self._has_named_resources)
        self._subscribed = None if is_wildcard else names


def _is_reduced(now: frozenset[str] | None, before: frozenset[str] | None) -> bool:
    if now is None:
        return False
    return before is None or now < before


class DeltaSubscription:
    """Incremental: each response holds only what has changed, and the names of removed resources."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        self._is_wildcard = False
        self._subscribed_names: set[str] = set()
        self._acked_versions: dict[str, str] = {}  # name -> acknowledged version
        self._rejected_versions: dict[str, str] = {}  # name -> version rejected, and still published
        self._pending: dict[str, _PendingResponse] = {}  # nonce -> response without ACK or NACK
        self._names_due: set[str] = set()  # names that the Envoy waits for even if nothing has changed
        # The Envoy may have rejected the published version on an earlier stream.
        self._may_have_rejected = True
        self._response_count = 0

    @property
    def has_resources(self) -> bool:
        """Whether the Envoy has acknowledged any resource."""
        return bool(self._acked_versions)

    @property
    def ack_pending(self) -> bool:
        """Whether a response has no ACK or NACK yet, so that the Envoy may have applied it."""
        return bool(self._pending)

    @property
    def subscribed_names(self) -> frozenset[str]:
        """The names that the Envoy subscribes to."""
        return frozenset(self._subscribed_names)

    def receive(self, request: DeltaRequest) -> AckResult | None:
        """Process a request and return the ACK or NACK of a response in it, if any."""
        ack_result = self._handle_ack(request)
        if not self._started:
            self._started = True
            self._acked_versions = dict(request.initial_versions)
            self._is_wildcard = self._kind.wildcard and not request.subscribe
        for name in request.unsubscribe:
            self._unsubscribe(name)
        for name in request.subscribe:
            self._subscribe(name)
        return ack_result

    def next_response(
        self, offered: ResourceSet, *, replaces: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        """Return the serialised DeltaDiscoveryResponse with what is new or changed, or None.

        `replaces`: immutable resources may be replaced. `allowed_names`: the resources that may be added;
        None: all.
        """
        immutable = self._kind.immutable and not replaces
        if immutable and self._pending:
            return None
        addable = offered if allowed_names is None else offered.filtered(allowed_names)
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
            self._kind.skips_identical
            and self._may_have_rejected
            and not versions.items() <= self._acked_versions.items()
        ):
            # In the same bytes, Envoy would acknowledge the resources that it rejected without reading them.
            changed = [resource.reencoded() for resource in changed]
        return self._build_response(addable, versions, (resource.delta for resource in changed))

    def next_removal(self, offered: ResourceSet) -> bytes | None:
        """Return the serialised DeltaDiscoveryResponse that names removed or unknown resources, or None."""
        expected_names = {name for name in self._known_names() if self._expected_version(name)}
        due_names = self._names_due & self._subscribed_names
        removed = (
            due_names - expected_names if self._kind.immutable else due_names | expected_names
        ) - offered.resources.keys()
        if not removed:
            return None
        self._names_due -= removed
        names = sorted(removed)
        return self._build_response(
            offered, dict.fromkeys(names, ""), (delimited(_REMOVED, name) for name in names)
        )

    def mark_all_due(self) -> None:
        """Send all named resources again: in the incremental variant Envoy does not repeat its request."""
        self._names_due |= self._subscribed_names

    def is_synced(self, offered: ResourceSet) -> bool:
        """Whether the Envoy has acknowledged everything that it subscribes to and may get of this set."""
        if self._kind.immutable and self.has_resources:
            return not self._pending and self._acked_versions.keys() >= offered.resources.keys()
        wanted = {
            name: resource.version
            for name, resource in offered.resources.items()
            if self._is_subscribed(name)
        }
        # Envoy may have applied parts of a response that it rejected. It is up to date only after it has
        # acknowledged a later response, even one with the version that it had before.
        has_rejected = not self._rejected_versions.keys().isdisjoint(wanted)
        return not self._pending and not has_rejected and self._acked_versions == wanted

    def is_stale(self, offered: ResourceSet) -> bool:
        """Whether the Envoy holds an immutable resource in another version than the published one."""
        return self._kind.immutable and not self._acked_versions.items() <= offered.versions.items()

    def has_resource(self, resource: Resource, offered: ResourceSet) -> bool:
        """Whether the Envoy holds this published resource of an immutable type."""
        return self._acked_versions.get(resource.name) == resource.version

    def _handle_ack(self, request: DeltaRequest) -> AckResult | None:
        pending = self._pending.pop(request.nonce, None)
        if pending is None:
            return None
        if request.error_detail:
            self._rejected_versions.update(pending.changes)
            self._names_due.update(pending.changes)  # it may have applied a part
            return AckResult(pending.version, request.error_detail)
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
        if not (self._kind.immutable and name in self._acked_versions):
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
        """Return the names that the Envoy holds or was sent in a response without ACK."""
        return self._acked_versions.keys() | {
            name for response in self._pending.values() for name in response.changes
        }

    def _is_subscribed(self, name: str) -> bool:
        return self._is_wildcard or name in self._subscribed_names

    def _needs_update(self, name: str, version: str, immutable: bool) -> bool:
        if not self._is_subscribed(name) or self._rejected_versions.get(name) == version:
            return False
        self._rejected_versions.pop(name, None)
        expected = self._expected_version(name)
        if immutable and expected:
            return False
        return expected != version or name in self._names_due

    def _expected_version(self, name: str) -> str:
        """Return the version that the Envoy holds once it has applied all pending responses; empty: none."""
        for pending in reversed(self._pending.values()):
            if name in pending.changes:
                return pending.changes[name]
        return self._acked_versions.get(name, "")

    def _build_response(self, offered: ResourceSet, changes: dict[str, str], parts: Iterable[bytes]) -> bytes:
        self._response_count += 1
        nonce = str(self._response_count)
        self._pending[nonce] = _PendingResponse(offered.version, changes)
        head = delimited(_SYSTEM_VERSION, offered.version) + delimited(_TYPE_URL, self._kind.url)
        return head + b"".join(parts) + delimited(_NONCE, nonce)


@dataclass(frozen=True, slots=True)
class _PendingResponse:
    """A response without ACK or NACK: the set's version, and name -> version (empty: removed)."""

    version: str
    changes: dict[str, str]
