"""What one Envoy has, wants and is owed of one type of resource, on one stream. No I/O, no clock.

Two dialects of the xDS transport protocol, one class each, with the same face: `receive` takes a request and
says what it meant; `offer` takes what is published now and gives the one message that brings the Envoy closer
to it, or None when there is nothing to say. A newer collection may be offered at any time: what lies between
is never sent.

Of a sticky type an Envoy keeps what it has as it is. What is new there is sent as one resource at a time, so
that a refusal is one of that resource, and nothing else has to wait for it.

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
    """An Envoy's answer to a response: it took this version, or refused it and says why."""

    version: str
    error_detail: str = ""


class SotwSubscription:
    """State of the world: each response holds all that the Envoy asked for by name, or all there is."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        self._has_named_resources = (
            False  # it has asked by name once, so an empty list means nothing, not everything
        )
        self._subscribed: frozenset[str] | None = frozenset()  # None: everything
        self._acked_version = ""  # version that the Envoy took last, on this stream or before it
        self._rejected_version = ""  # version that it refused, as long as that is what there is
        self._sent_version = ""  # version of the latest response
        self._sent_resources: ResourceSet | None = None  # what the latest response is of
        self._acked_resources: ResourceSet | None = (
            None  # what it took last; None: nothing, or from before this stream
        )
        self._rejected_versions: set[str] = set()  # versions of sticky resources that it refused
        self._response_count = 0  # responses on this stream; the latest nonce
        self._ack_pending = False  # the latest response is not answered yet
        self._response_due = False  # the Envoy waits for a response even if nothing has changed
        self._may_have_rejected = True  # what is offered: on an earlier stream, or a part of it on this one

    @property
    def has_resources(self) -> bool:
        """Whether the Envoy has taken any version."""
        return bool(self._acked_version)

    @property
    def ack_pending(self) -> bool:
        """Whether a response is not answered yet, so that the Envoy may have taken it."""
        return self._ack_pending

    @property
    def subscribed_names(self) -> frozenset[str]:
        """The names that it asks for."""
        return self._subscribed or frozenset()

    def receive(self, request: SotwRequest) -> AckResult | None:
        """Take a request in. The answer that it is to the latest response; None when it is none."""
        if not self._started:
            self._started = True
            self._acked_version = request.version
            self._set_subscribed(request.names)
            # An Envoy that comes back may be waiting for endpoints that were lost with the former stream.
            self._response_due = not (self._kind.immutable and self._acked_version)
            return None
        if request.nonce != self._nonce:
            return None  # written before it saw the latest response; its answer to that one is on its way
        previous = self._subscribed
        self._set_subscribed(request.names)
        if not self._ack_pending:
            # Nothing new, but it asks again: after a change of a cluster Envoy does so, and keeps the new
            # cluster waiting for 15 s if nobody answers. Only giving names up asks for nothing.
            self._response_due |= not _is_reduced(self._subscribed, previous)
            return None
        self._ack_pending = False
        if request.error_detail:
            self._rejected_version = self._sent_version
            self._may_have_rejected = True
            self._response_due = (
                True  # it may have taken a part: whatever comes next is sent, even what it had
            )
            self._remember_rejected()
            return AckResult(self._sent_version, request.error_detail)
        self._acked_version, self._acked_resources = self._sent_version, self._sent_resources
        self._may_have_rejected = False
        self._response_due = not (self._subscribed == previous or _is_reduced(self._subscribed, previous))
        return AckResult(self._sent_version)

    def next_response(
        self, offered: ResourceSet, *, replaces: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        """The serialised DiscoveryResponse to send now, if any.

        `anew`: also in place of what is sticky. `ready`: what may come to that; None: all there is.
        """
        if not self._started or self._wants_none_of(offered):
            return None
        if self._kind.immutable:
            step = None if self._ack_pending else self._next_resource_set(offered, replaces, allowed_names)
            if step is None or not step.resources:
                return None  # taking nothing would count as holding something, which is not changed later
            offered = step
        if self._kind.skips_identical and self._ack_pending:
            return None  # the refusal of an earlier response would be missed
        if self._rejected_version == offered.version:
            return None
        self._rejected_version = ""
        known = self._sent_version if self._ack_pending else self._acked_version
        if known == offered.version and not self._response_due:
            return None
        if (
            not self._kind.wildcard
            and self._subscribed is not None
            and not self._subscribed & offered.resources.keys()
        ):
            return None  # of these types a response may be a part, so that silence means "not yet"
        self._response_due = False
        self._ack_pending = True
        self._sent_version, self._sent_resources = offered.version, offered
        self._response_count += 1
        if self._kind.skips_identical and self._may_have_rejected and offered.version != self._acked_version:
            offered = offered.reencoded()
        return offered.sotw_body(self._subscribed) + delimited(_NONCE, self._nonce)

    def next_removal(self, offered: ResourceSet) -> bytes | None:
        """None: in this dialect what is missing in an offer is gone."""
        return None

    def mark_all_due(self) -> None:
        """Nothing: in this dialect Envoy asks again by itself."""

    def is_synced(self, offered: ResourceSet) -> bool:
        """Whether the Envoy has acknowledged all that it wants and may get of this collection."""
        if self._wants_none_of(offered):
            return True
        if self._kind.immutable and self.has_resources:
            has = self._held_resources(offered)
            return has is None or (not self._ack_pending and has.resources.keys() >= offered.resources.keys())
        return self._acked_version == offered.version and not self._rejected_version and not self._ack_pending

    def is_stale(self, offered: ResourceSet) -> bool:
        """Whether the Envoy holds something in another version, of a type that is not changed under it."""
        if not self._kind.immutable or not self.has_resources:
            return False
        has = self._held_resources(offered)
        return has is None or not has.versions.items() <= offered.versions.items()

    def has_resource(self, resource: Resource, offered: ResourceSet) -> bool:
        """Whether the Envoy holds this resource of a sticky type, which is offered."""
        has = self._held_resources(offered)
        return has is not None and has.versions.get(resource.name) == resource.version

    def _held_resources(self, offered: ResourceSet) -> ResourceSet | None:
        """What the Envoy holds; None: nothing, or from before this stream and no part of what there is."""
        if self._acked_resources is None and self._acked_version:
            self._acked_resources = offered.subset_by_version(self._acked_version)
        return self._acked_resources

    def _next_resource_set(
        self, offered: ResourceSet, replaces: bool, allowed_names: Set[str] | None
    ) -> ResourceSet | None:
        """What an Envoy may get next: what it has as it is, and one resource that it lacks."""
        addable = offered if allowed_names is None else offered.filtered(allowed_names)
        if replaces:
            return addable
        has = self._held_resources(offered)
        if self.has_resources and has is None:
            return None
        held = {} if has is None else has.resources
        missing = (
            each
            for name, each in addable.resources.items()
            if name not in held and each.version not in self._rejected_versions
        )
        return build_resource_set(self._kind, (*held.values(), *itertools.islice(missing, 1)))

    def _remember_rejected(self) -> None:
        """Keep in mind what the Envoy lacks still, of what it was sent."""
        if self._kind.immutable and self._sent_resources is not None:
            held = {} if self._acked_resources is None else self._acked_resources.resources
            self._rejected_versions |= {
                each.version for name, each in self._sent_resources.resources.items() if name not in held
            }

    @property
    def _nonce(self) -> str:
        return str(self._response_count) if self._response_count else ""

    def _wants_none_of(self, offered: ResourceSet) -> bool:
        if not self._subscribed:
            return self._subscribed is not None
        # Where a response may be a part of all there is, silence means "not yet"; elsewhere what a response
        # leaves out is gone, and that has to be said.
        return not self._kind.wildcard and not self._subscribed & offered.resources.keys()

    def _set_subscribed(self, names: frozenset[str]) -> None:
        self._has_named_resources = self._has_named_resources or bool(names)
        everything = WILDCARD in names or (self._kind.wildcard and not self._has_named_resources)
        self._subscribed = None if everything else names


def _is_reduced(now: frozenset[str] | None, before: frozenset[str] | None) -> bool:
    if now is None:
        return False
    return before is None or now < before


class DeltaSubscription:
    """Incremental: each response holds only what has changed, and names what is gone."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        self._is_wildcard = False
        self._subscribed_names: set[str] = set()
        self._acked_versions: dict[str, str] = {}  # name -> version that the Envoy has taken
        self._rejected_versions: dict[
            str, str
        ] = {}  # name -> version that it refused, as long as that is offered
        self._pending: dict[str, _PendingResponse] = {}  # nonce -> a response that is not answered yet
        self._names_due: set[str] = set()  # names that the Envoy waits for even if nothing has changed
        self._may_have_rejected = True  # what is offered: on an earlier stream
        self._response_count = 0

    @property
    def has_resources(self) -> bool:
        """Whether the Envoy has taken any resource."""
        return bool(self._acked_versions)

    @property
    def ack_pending(self) -> bool:
        """Whether a response is not answered yet, so that the Envoy may have taken it."""
        return bool(self._pending)

    @property
    def subscribed_names(self) -> frozenset[str]:
        """The names that it asks for."""
        return frozenset(self._subscribed_names)

    def receive(self, request: DeltaRequest) -> AckResult | None:
        """Take a request in. The answer that it is to one response; None when it is none."""
        answer = self._handle_ack(request)
        if not self._started:
            self._started = True
            self._acked_versions = dict(request.initial_versions)
            self._is_wildcard = self._kind.wildcard and not request.subscribe
        for name in request.unsubscribe:
            self._unsubscribe(name)
        for name in request.subscribe:
            self._subscribe(name)
        return answer

    def next_response(
        self, offered: ResourceSet, *, replaces: bool = False, allowed_names: Set[str] | None = None
    ) -> bytes | None:
        """The serialised DeltaDiscoveryResponse with what is new or changed, if anything is.

        `anew`: also in place of what is sticky. `ready`: what may come to that; None: all there is.
        """
        immutable = self._kind.immutable and not replaces
        if immutable and self._pending:
            return None
        addable = offered if allowed_names is None else offered.filtered(allowed_names)
        missing = (
            each
            for each in addable.resources.values()
            if self._needs_update(each.name, each.version, immutable)
        )
        changed = list(itertools.islice(missing, 1 if immutable else None))
        if not changed:
            return None
        self._names_due.difference_update(each.name for each in changed)
        versions = {each.name: each.version for each in changed}
        if (
            self._kind.skips_identical
            and self._may_have_rejected
            and not versions.items() <= self._acked_versions.items()
        ):
            changed = [each.reencoded() for each in changed]
        return self._build_response(addable, versions, (each.delta for each in changed))

    def next_removal(self, offered: ResourceSet) -> bytes | None:
        """The serialised DeltaDiscoveryResponse that names what is gone or never was, if anything."""
        expected_names = {name for name in self._known_names() if self._expected_version(name)}
        due_names = self._names_due & self._subscribed_names
        gone = (
            due_names - expected_names if self._kind.immutable else due_names | expected_names
        ) - offered.resources.keys()
        if not gone:
            return None
        self._names_due -= gone
        names = sorted(gone)
        return self._build_response(
            offered, dict.fromkeys(names, ""), (delimited(_REMOVED, name) for name in names)
        )

    def mark_all_due(self) -> None:
        """Owe the Envoy all that it asked for by name: in this dialect it does not ask again by itself."""
        self._names_due |= self._subscribed_names

    def is_synced(self, offered: ResourceSet) -> bool:
        """Whether the Envoy has acknowledged all that it wants and may get of this collection."""
        if self._kind.immutable and self.has_resources:
            return not self._pending and self._acked_versions.keys() >= offered.resources.keys()
        current = {
            name: each.version for name, each in offered.resources.items() if self._is_subscribed(name)
        }
        # Envoy may have applied parts of a response that it rejected. It is up to date only when it has
        # acknowledged another one since, even if that repeats the version that it acknowledged before.
        has_rejected = not self._rejected_versions.keys().isdisjoint(current)
        return not self._pending and not has_rejected and self._acked_versions == current

    def is_stale(self, offered: ResourceSet) -> bool:
        """Whether the Envoy holds something in another version, of a type that is not changed under it."""
        return self._kind.immutable and not self._acked_versions.items() <= offered.versions.items()

    def has_resource(self, resource: Resource, offered: ResourceSet) -> bool:
        """Whether the Envoy holds this resource of a sticky type, which is offered."""
        return self._acked_versions.get(resource.name) == resource.version

    def _handle_ack(self, request: DeltaRequest) -> AckResult | None:
        pending = self._pending.pop(request.nonce, None)
        if pending is None:
            return None
        if request.error_detail:
            self._rejected_versions.update(pending.changes)
            self._names_due.update(pending.changes)  # it may have taken a part: what comes next is sent
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
            for each in self._known_names() - self._subscribed_names:
                self._forget(each)
            return
        self._subscribed_names.discard(name)
        if self._is_wildcard:
            self._names_due.add(
                name
            )  # the protocol wants it told whether the wildcard still covers this name
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._acked_versions.pop(name, None)
        self._rejected_versions.pop(name, None)
        self._names_due.discard(name)
        for pending in self._pending.values():
            pending.changes.pop(name, None)

    def _known_names(self) -> set[str]:
        """Names that the Envoy was ever told of, as far as that matters now."""
        return self._acked_versions.keys() | {
            name for each in self._pending.values() for name in each.changes
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
        """The version that the Envoy will have when it has taken all that is on its way; empty: none."""
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
    """A response on its way: the collection's version, and name -> version (empty: gone)."""

    version: str
    changes: dict[str, str]
