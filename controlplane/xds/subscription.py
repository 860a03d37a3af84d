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
from controlplane.xds.resource_set import Collection, Resource, gather
from controlplane.xds.resource_type import ResourceType

EVERYTHING = "*"

# Field numbers of discovery.v3.DeltaDiscoveryResponse; the nonce's is the same in DiscoveryResponse.
_SYSTEM_VERSION, _TYPE_URL, _NONCE, _REMOVED = 1, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Answer:
    """An Envoy's answer to a response: it took this version, or refused it and says why."""

    version: str
    refusal: str = ""


class SotwSubscription:
    """State of the world: each response holds all that the Envoy asked for by name, or all there is."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        self._named = False  # it has asked by name once, so an empty list means nothing, not everything
        self._wanted: frozenset[str] | None = frozenset()  # None: everything
        self._held = ""  # version that the Envoy took last, on this stream or before it
        self._refused = ""  # version that it refused, as long as that is what there is
        self._sent = ""  # version of the latest response
        self._offered: Collection | None = None  # what the latest response is of
        self._has: Collection | None = None  # what it took last; None: nothing, or from before this stream
        self._spurned: set[str] = set()  # versions of sticky resources that it refused
        self._count = 0  # responses on this stream; the latest nonce
        self._awaiting = False  # the latest response is not answered yet
        self._owed = False  # the Envoy waits for a response even if nothing has changed
        self._may_have_refused = True  # what is offered: on an earlier stream, or a part of it on this one

    @property
    def holds(self) -> bool:
        """Whether the Envoy has taken any version."""
        return bool(self._held)

    @property
    def awaiting(self) -> bool:
        """Whether a response is not answered yet, so that the Envoy may have taken it."""
        return self._awaiting

    @property
    def names(self) -> frozenset[str]:
        """The names that it asks for."""
        return self._wanted or frozenset()

    def receive(self, request: SotwRequest) -> Answer | None:
        """Take a request in. The answer that it is to the latest response; None when it is none."""
        if not self._started:
            self._started = True
            self._held = request.version
            self._want(request.names)
            # An Envoy that comes back may be waiting for endpoints that were lost with the former stream.
            self._owed = not (self._kind.sticky and self._held)
            return None
        if request.nonce != self._nonce:
            return None  # written before it saw the latest response; its answer to that one is on its way
        before = self._wanted
        self._want(request.names)
        if not self._awaiting:
            # Nothing new, but it asks again: after a change of a cluster Envoy does so, and keeps the new
            # cluster waiting for 15 s if nobody answers. Only giving names up asks for nothing.
            self._owed |= not _fewer(self._wanted, before)
            return None
        self._awaiting = False
        if request.refusal:
            self._refused = self._sent
            self._may_have_refused = True
            self._owed = True  # it may have taken a part: whatever comes next is sent, even what it had
            self._spurn()
            return Answer(self._sent, request.refusal)
        self._held, self._has = self._sent, self._offered
        self._may_have_refused = False
        self._owed = not (self._wanted == before or _fewer(self._wanted, before))
        return Answer(self._sent)

    def offer(
        self, offered: Collection, *, anew: bool = False, ready: Set[str] | None = None
    ) -> bytes | None:
        """The serialised DiscoveryResponse to send now, if any.

        `anew`: also in place of what is sticky. `ready`: what may come to that; None: all there is.
        """
        if not self._started or self._wants_none_of(offered):
            return None
        if self._kind.sticky:
            step = None if self._awaiting else self._step(offered, anew, ready)
            if step is None or not step.resources:
                return None  # taking nothing would count as holding something, which is not changed later
            offered = step
        if self._kind.compared and self._awaiting:
            return None  # the refusal of an earlier response would be missed
        if self._refused == offered.version:
            return None
        self._refused = ""
        known = self._sent if self._awaiting else self._held
        if known == offered.version and not self._owed:
            return None
        if (
            not self._kind.wildcard
            and self._wanted is not None
            and not self._wanted & offered.resources.keys()
        ):
            return None  # of these types a response may be a part, so that silence means "not yet"
        self._owed = False
        self._awaiting = True
        self._sent, self._offered = offered.version, offered
        self._count += 1
        if self._kind.compared and self._may_have_refused and offered.version != self._held:
            offered = offered.unlike_before()
        return offered.sotw_body(self._wanted) + delimited(_NONCE, self._nonce)

    def withdraw(self, offered: Collection) -> bytes | None:
        """None: in this dialect what is missing in an offer is gone."""
        return None

    def resend(self) -> None:
        """Nothing: in this dialect Envoy asks again by itself."""

    def settled(self, offered: Collection) -> bool:
        """Whether the Envoy has acknowledged all that it wants and may get of this collection."""
        if self._wants_none_of(offered):
            return True
        if self._kind.sticky and self.holds:
            has = self._known(offered)
            return has is None or (not self._awaiting and has.resources.keys() >= offered.resources.keys())
        return self._held == offered.version and not self._refused and not self._awaiting

    def outdated(self, offered: Collection) -> bool:
        """Whether the Envoy holds something in another version, of a type that is not changed under it."""
        if not self._kind.sticky or not self.holds:
            return False
        has = self._known(offered)
        return has is None or not has.versions.items() <= offered.versions.items()

    def has(self, resource: Resource, offered: Collection) -> bool:
        """Whether the Envoy holds this resource of a sticky type, which is offered."""
        has = self._known(offered)
        return has is not None and has.versions.get(resource.name) == resource.version

    def _known(self, offered: Collection) -> Collection | None:
        """What the Envoy holds; None: nothing, or from before this stream and no part of what there is."""
        if self._has is None and self._held:
            self._has = offered.part(self._held)
        return self._has

    def _step(self, offered: Collection, anew: bool, ready: Set[str] | None) -> Collection | None:
        """What an Envoy may get next: what it has as it is, and one resource that it lacks."""
        addable = offered if ready is None else offered.only(ready)
        if anew:
            return addable
        has = self._known(offered)
        if self.holds and has is None:
            return None
        held = {} if has is None else has.resources
        lacks = (
            each
            for name, each in addable.resources.items()
            if name not in held and each.version not in self._spurned
        )
        return gather(self._kind, (*held.values(), *itertools.islice(lacks, 1)))

    def _spurn(self) -> None:
        """Keep in mind what the Envoy lacks still, of what it was sent."""
        if self._kind.sticky and self._offered is not None:
            held = {} if self._has is None else self._has.resources
            self._spurned |= {
                each.version for name, each in self._offered.resources.items() if name not in held
            }

    @property
    def _nonce(self) -> str:
        return str(self._count) if self._count else ""

    def _wants_none_of(self, offered: Collection) -> bool:
        if not self._wanted:
            return self._wanted is not None
        # Where a response may be a part of all there is, silence means "not yet"; elsewhere what a response
        # leaves out is gone, and that has to be said.
        return not self._kind.wildcard and not self._wanted & offered.resources.keys()

    def _want(self, names: frozenset[str]) -> None:
        self._named = self._named or bool(names)
        everything = EVERYTHING in names or (self._kind.wildcard and not self._named)
        self._wanted = None if everything else names


def _fewer(now: frozenset[str] | None, before: frozenset[str] | None) -> bool:
    if now is None:
        return False
    return before is None or now < before


class DeltaSubscription:
    """Incremental: each response holds only what has changed, and names what is gone."""

    def __init__(self, kind: ResourceType) -> None:
        self._kind = kind
        self._started = False
        self._everything = False
        self._names: set[str] = set()
        self._held: dict[str, str] = {}  # name -> version that the Envoy has taken
        self._refused: dict[str, str] = {}  # name -> version that it refused, as long as that is offered
        self._pending: dict[str, _Pending] = {}  # nonce -> a response that is not answered yet
        self._owed: set[str] = set()  # names that the Envoy waits for even if nothing has changed
        self._may_have_refused = True  # what is offered: on an earlier stream
        self._count = 0

    @property
    def holds(self) -> bool:
        """Whether the Envoy has taken any resource."""
        return bool(self._held)

    @property
    def awaiting(self) -> bool:
        """Whether a response is not answered yet, so that the Envoy may have taken it."""
        return bool(self._pending)

    @property
    def names(self) -> frozenset[str]:
        """The names that it asks for."""
        return frozenset(self._names)

    def receive(self, request: DeltaRequest) -> Answer | None:
        """Take a request in. The answer that it is to one response; None when it is none."""
        answer = self._settle(request)
        if not self._started:
            self._started = True
            self._held = dict(request.held)
            self._everything = self._kind.wildcard and not request.subscribe
        for name in request.unsubscribe:
            self._unsubscribe(name)
        for name in request.subscribe:
            self._subscribe(name)
        return answer

    def offer(
        self, offered: Collection, *, anew: bool = False, ready: Set[str] | None = None
    ) -> bytes | None:
        """The serialised DeltaDiscoveryResponse with what is new or changed, if anything is.

        `anew`: also in place of what is sticky. `ready`: what may come to that; None: all there is.
        """
        sticky = self._kind.sticky and not anew
        if sticky and self._pending:
            return None
        addable = offered if ready is None else offered.only(ready)
        lacks = (each for each in addable.resources.values() if self._lacks(each.name, each.version, sticky))
        changed = list(itertools.islice(lacks, 1 if sticky else None))
        if not changed:
            return None
        self._owed.difference_update(each.name for each in changed)
        versions = {each.name: each.version for each in changed}
        if self._kind.compared and self._may_have_refused and not versions.items() <= self._held.items():
            changed = [each.unlike_before() for each in changed]
        return self._respond(addable, versions, (each.delta for each in changed))

    def withdraw(self, offered: Collection) -> bytes | None:
        """The serialised DeltaDiscoveryResponse that names what is gone or never was, if anything."""
        has = {name for name in self._known() if self._expected(name)}
        asked = self._owed & self._names
        gone = (asked - has if self._kind.sticky else asked | has) - offered.resources.keys()
        if not gone:
            return None
        self._owed -= gone
        names = sorted(gone)
        return self._respond(offered, dict.fromkeys(names, ""), (delimited(_REMOVED, name) for name in names))

    def resend(self) -> None:
        """Owe the Envoy all that it asked for by name: in this dialect it does not ask again by itself."""
        self._owed |= self._names

    def settled(self, offered: Collection) -> bool:
        """Whether the Envoy has acknowledged all that it wants and may get of this collection."""
        if self._kind.sticky and self.holds:
            return not self._pending and self._held.keys() >= offered.resources.keys()
        current = {name: each.version for name, each in offered.resources.items() if self._wants(name)}
        # Envoy may have applied parts of a response that it rejected. It is up to date only when it has
        # acknowledged another one since, even if that repeats the version that it acknowledged before.
        refused_some = not self._refused.keys().isdisjoint(current)
        return not self._pending and not refused_some and self._held == current

    def outdated(self, offered: Collection) -> bool:
        """Whether the Envoy holds something in another version, of a type that is not changed under it."""
        return self._kind.sticky and not self._held.items() <= offered.versions.items()

    def has(self, resource: Resource, offered: Collection) -> bool:
        """Whether the Envoy holds this resource of a sticky type, which is offered."""
        return self._held.get(resource.name) == resource.version

    def _settle(self, request: DeltaRequest) -> Answer | None:
        pending = self._pending.pop(request.nonce, None)
        if pending is None:
            return None
        if request.refusal:
            self._refused.update(pending.changes)
            self._owed.update(pending.changes)  # it may have taken a part: what comes next is sent
            return Answer(pending.version, request.refusal)
        self._may_have_refused = False
        for name, version in pending.changes.items():
            if version:
                self._held[name] = version
            else:
                self._held.pop(name, None)
        return Answer(pending.version)

    def _subscribe(self, name: str) -> None:
        if name == EVERYTHING:
            self._everything = True
            return
        self._names.add(name)
        if not (self._kind.sticky and name in self._held):
            self._owed.add(name)

    def _unsubscribe(self, name: str) -> None:
        if name == EVERYTHING:
            self._everything = False
            for each in self._known() - self._names:
                self._forget(each)
            return
        self._names.discard(name)
        if self._everything:
            self._owed.add(name)  # the protocol wants it told whether the wildcard still covers this name
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._held.pop(name, None)
        self._refused.pop(name, None)
        self._owed.discard(name)
        for pending in self._pending.values():
            pending.changes.pop(name, None)

    def _known(self) -> set[str]:
        """Names that the Envoy was ever told of, as far as that matters now."""
        return self._held.keys() | {name for each in self._pending.values() for name in each.changes}

    def _wants(self, name: str) -> bool:
        return self._everything or name in self._names

    def _lacks(self, name: str, version: str, sticky: bool) -> bool:
        if not self._wants(name) or self._refused.get(name) == version:
            return False
        self._refused.pop(name, None)
        expected = self._expected(name)
        if sticky and expected:
            return False
        return expected != version or name in self._owed

    def _expected(self, name: str) -> str:
        """The version that the Envoy will have when it has taken all that is on its way; empty: none."""
        for pending in reversed(self._pending.values()):
            if name in pending.changes:
                return pending.changes[name]
        return self._held.get(name, "")

    def _respond(self, offered: Collection, changes: dict[str, str], parts: Iterable[bytes]) -> bytes:
        self._count += 1
        nonce = str(self._count)
        self._pending[nonce] = _Pending(offered.version, changes)
        head = delimited(_SYSTEM_VERSION, offered.version) + delimited(_TYPE_URL, self._kind.url)
        return head + b"".join(parts) + delimited(_NONCE, nonce)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A response on its way: the collection's version, and name -> version (empty: gone)."""

    version: str
    changes: dict[str, str]
