"""Whatever an Envoy and the network do, in the end it has what was published last: a model, at random."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from controlplane.xds.discovery_request import DeltaRequest, SotwRequest
from controlplane.xds.resource_set import Resource, ResourceSet, build_resource_set, make_resource
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, ResourceType
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription

# A type like clusters, but for what is true of them in our use: that they are not changed under an Envoy.
CHANGEABLE = replace(CLUSTER, immutable=False)

NAMES = ("a", "b", "c")
PADDING = b"padding "  # longer than any content
name = st.sampled_from(NAMES)
contents = st.dictionaries(name, st.binary(min_size=1, max_size=1), min_size=1)


class Client(ABC):
    """What all clients share: what they have, and that they were not told what they must not be told."""

    def __init__(self, kind: ResourceType) -> None:
        self.kind = kind
        self.everything = kind.wildcard
        self.wanted: set[str] = set() if kind.wildcard else {"a"}
        self.has: dict[str, bytes] = {}
        self.compared_with: dict[str, bytes] = {}  # what it was sent last, of a type that Envoy compares

    def wants(self, each: str) -> bool:
        return self.everything or each in self.wanted

    @staticmethod
    @abstractmethod
    def told(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        """The nonce of a response, and the names and versions that an answer to it is about."""

    def read(self, told: dict[str, bytes]) -> dict[str, bytes]:
        """What it reads of a response: of a type that it compares, not what is the same as the last time."""
        if not self.kind.skips_identical:
            return told
        new = dict(told.items() - self.compared_with.items())
        self.compared_with.update(told)
        return new

    def give_up(self, each: str) -> None:
        self.wanted.discard(each)
        self.has.pop(each, None)
        self.compared_with.pop(each, None)

    def check(self, told: dict[str, bytes]) -> None:
        if self.kind.immutable:
            assert all(self.has.get(each, body) == body for each, body in told.items())


class SotwClient(Client):
    def __init__(self, kind: ResourceType) -> None:
        super().__init__(kind)
        self.version = self.nonce = ""

    @staticmethod
    def told(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        message = discovery_pb2.DiscoveryResponse.FromString(data)
        return message.nonce, {("", message.version_info)}

    def request(self, refusal: str = "") -> SotwRequest:
        return SotwRequest(self.kind.url, self.version, self.nonce, frozenset(self.wanted), refusal)

    def reconnect(self) -> SotwRequest:
        self.nonce = ""
        return self.request()

    def again(self) -> SotwRequest:
        return self.request()

    def subscribe(self, each: str) -> SotwRequest:
        self.wanted.add(each)
        return self.request()

    def unsubscribe(self, each: str) -> SotwRequest:
        self.give_up(each)
        return self.request()

    def process(self, data: bytes, *, refuse: bool) -> SotwRequest:
        message = discovery_pb2.DiscoveryResponse.FromString(data)
        assert message.type_url == self.kind.url
        self.nonce = message.nonce
        told = {each.type_url: each.value for each in message.resources if self.wants(each.type_url)}
        read = self.read(told)
        if refuse and (read or not told):
            return self.request("no")
        self.check(told)
        # What a response leaves out is gone here, and what is sticky is not to go.
        assert not self.kind.immutable or self.has.keys() <= told.keys()
        kept = {} if self.kind.wildcard else self.has
        self.has = {each: body for each, body in {**kept, **read}.items() if self.wants(each)}
        self.version = message.version_info
        return self.request()


class DeltaClient(Client):
    def __init__(self, kind: ResourceType) -> None:
        super().__init__(kind)
        self.versions: dict[str, str] = {}

    @staticmethod
    def told(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        message = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        return message.nonce, {(each.name, each.version) for each in message.resources}

    def reconnect(self) -> DeltaRequest:
        return DeltaRequest(
            self.kind.url, subscribe=frozenset(self.wanted), initial_versions=dict(self.versions)
        )

    def again(self) -> DeltaRequest:
        return DeltaRequest(self.kind.url)

    def subscribe(self, each: str) -> DeltaRequest:
        self.wanted.add(each)
        return DeltaRequest(self.kind.url, subscribe=frozenset({each}))

    def unsubscribe(self, each: str) -> DeltaRequest:
        self.give_up(each)
        self.versions.pop(each, None)
        return DeltaRequest(self.kind.url, unsubscribe=frozenset({each}))

    def process(self, data: bytes, *, refuse: bool) -> DeltaRequest:
        message = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        assert message.type_url == self.kind.url
        told = {each.name: each.resource.value for each in message.resources if self.wants(each.name)}
        read = self.read(told)
        if refuse and (read or not told):
            return DeltaRequest(self.kind.url, message.nonce, error_detail="no")
        self.check(told)
        self.has.update(read)
        for each in message.resources:
            if self.wants(each.name):
                self.versions[each.name] = each.version
        for gone in message.removed_resources:
            self.has.pop(gone, None)
            self.versions.pop(gone, None)
        return DeltaRequest(self.kind.url, message.nonce)


class Exchange(RuleBasedStateMachine):
    """Client and server with messages of both under way, each delivered in order."""

    client: Any
    subscription: Any
    clients: ClassVar[type[Client]] = SotwClient
    subscriptions: ClassVar[type] = SotwSubscription
    kind: ClassVar[ResourceType] = ENDPOINTS

    @initialize(first=contents)
    def begin(self, first: dict[str, bytes]) -> None:
        self.client = self.clients(self.kind)
        self.to_server: deque[Any] = deque()
        self.to_client: deque[bytes] = deque()
        self.numbers = (str(number).encode() for number in itertools.count())
        self.put(first)
        self.reconnect()

    def put(self, bodies: dict[str, bytes]) -> None:
        # A resource's `Any` carries its name as its type, so that the client can tell whose body it is.
        self.bodies = bodies
        self.published: ResourceSet = build_resource_set(
            self.kind, (self.resource(each, body) for each, body in bodies.items())
        )
        self.refused: set[tuple[str, str]] = set()

    def resource(self, each: str, body: bytes) -> Resource:
        return make_resource(
            each, _packed(each, body), lambda: _packed(each, body + PADDING + next(self.numbers))
        )

    @rule(bodies=contents)
    def publish(self, bodies: dict[str, bytes]) -> None:
        self.put(bodies)

    @rule()
    def reconnect(self) -> None:
        self.subscription = self.subscriptions(self.kind)
        self.to_server.clear()
        self.to_client.clear()
        self.refused = set()
        self.sent: dict[str, set[tuple[str, str]]] = {}
        self.to_server.append(self.client.reconnect())

    @rule()
    def ask_again(self) -> None:
        self.to_server.append(self.client.again())

    @precondition(lambda self: not self.kind.wildcard)
    @rule(each=name)
    def subscribe(self, each: str) -> None:
        if each not in self.client.wanted:
            self.to_server.append(self.client.subscribe(each))

    @precondition(lambda self: not self.kind.wildcard)
    @rule(each=name)
    def unsubscribe(self, each: str) -> None:
        if each in self.client.wanted:
            self.to_server.append(self.client.unsubscribe(each))

    @precondition(lambda self: self.to_server)
    @rule()
    def server_reads(self) -> None:
        self.read()

    def read(self) -> None:
        request = self.to_server.popleft()
        answer = self.subscription.receive(request)
        if answer is not None and answer.error_detail:
            self.refused |= self.sent[request.nonce]
        # Who gives a name up and then asks for it gets it, refused or not.
        for given_up in getattr(request, "unsubscribe", ()):
            for told in (self.refused, *self.sent.values()):
                told -= {each for each in told if each[0] == given_up}

    @rule()
    def server_writes(self) -> None:
        self.write()

    def write(self) -> bool:
        data = self.subscription.next_response(self.published) or self.subscription.next_removal(
            self.published
        )
        if data is None:
            return False
        nonce, told = self.clients.told(data)
        assert not told & self.refused, "sent again what was refused"
        self.sent[nonce] = told
        self.to_client.append(data)
        return True

    @precondition(lambda self: self.to_client)
    @rule(refuse=st.booleans())
    def client_reads(self, refuse: bool) -> None:
        self.to_server.append(self.client.process(self.to_client.popleft(), refuse=refuse))

    def teardown(self) -> None:
        if not hasattr(self, "published"):
            return
        while self.kind.skips_identical and self.settle_one():
            pass
        if self.kind.skips_identical and self.subscription.is_synced(self.published):
            self.check_it_has_what_it_wants()
        # Something new, so that an earlier refusal does not stand in the way; and no refusals from now on.
        while self.to_client or self.to_server:
            self.settle_one()
        self.put({each: b"last " + body for each, body in self.bodies.items()})
        for _ in range(30):
            if not self.settle_one():
                break
        else:
            raise AssertionError("the exchange does not come to rest")
        if self.kind.immutable:
            assert set(self.client.has) & set(NAMES) or not self.bodies
            # In the other dialect an Envoy that is back does not say what it has, only which version.
            assert self.clients is SotwClient or set(self.bodies) <= set(self.client.has)
        else:
            self.check_it_has_what_it_wants()
        assert self.subscription.is_synced(self.published)

    def check_it_has_what_it_wants(self) -> None:
        wanted = {each: body for each, body in self.bodies.items() if self.client.wants(each)}
        has = {each: body.partition(PADDING)[0] for each, body in self.client.has.items()}
        if self.clients is SotwClient and not self.kind.wildcard:
            # Here the dialect cannot say that something is gone; Envoy drops it with its cluster.
            has = {each: body for each, body in has.items() if each in self.bodies}
        assert has == wanted

    def settle_one(self) -> bool:
        if self.to_client:
            self.to_server.append(self.client.process(self.to_client.popleft(), refuse=False))
            return True
        if self.to_server:
            self.read()
            return True
        return self.write()


def _packed(each: str, body: bytes) -> bytes:
    data: bytes = any_pb2.Any(type_url=each, value=body).SerializeToString()
    return data


class SotwWildcard(Exchange):
    kind = CHANGEABLE


class SotwListeners(Exchange):
    kind = LISTENER


class SotwLiveConfig(Exchange):
    kind = LIVE_CONFIG


class DeltaEndpoints(Exchange):
    clients = DeltaClient
    subscriptions = DeltaSubscription


class DeltaWildcard(DeltaEndpoints):
    kind = CHANGEABLE


class DeltaListeners(DeltaEndpoints):
    kind = LISTENER


class DeltaLiveConfig(DeltaEndpoints):
    kind = LIVE_CONFIG


for machine in (
    Exchange,
    SotwLiveConfig,
    SotwWildcard,
    SotwListeners,
    DeltaEndpoints,
    DeltaLiveConfig,
    DeltaWildcard,
    DeltaListeners,
):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestSotwEndpoints = Exchange.TestCase
TestSotwLiveConfig = SotwLiveConfig.TestCase
TestSotwWildcard = SotwWildcard.TestCase
TestSotwListeners = SotwListeners.TestCase
TestDeltaEndpoints = DeltaEndpoints.TestCase
TestDeltaLiveConfig = DeltaLiveConfig.TestCase
TestDeltaWildcard = DeltaWildcard.TestCase
TestDeltaListeners = DeltaListeners.TestCase

LIVE_CONFIGS = pytest.mark.parametrize("machine", [SotwLiveConfig, DeltaLiveConfig])


def begun(machine: type[Exchange]) -> Exchange:
    """An exchange whose client wants `a` and `b`, and has them."""
    exchange = machine()
    exchange.begin({"a": b"1", "b": b"1"})
    exchange.subscribe("b")
    while exchange.settle_one():
        pass
    exchange.check_it_has_what_it_wants()
    return exchange


def changed(machine: type[Exchange]) -> Exchange:
    """One that has written a change of `a` which its client has not read yet."""
    exchange = begun(machine)
    exchange.publish({"a": b"2", "b": b"1"})
    assert exchange.write()
    return exchange


@LIVE_CONFIGS
def test_what_was_refused_is_read_when_it_comes_by_another_stream(machine: type[Exchange]) -> None:
    exchange = changed(machine)
    exchange.client_reads(refuse=True)
    exchange.reconnect()
    exchange.teardown()


@LIVE_CONFIGS
def test_what_was_refused_is_read_when_something_else_has_changed(machine: type[Exchange]) -> None:
    exchange = changed(machine)
    exchange.client_reads(refuse=True)
    exchange.read()
    exchange.publish({"a": b"2", "b": b"2"})
    exchange.teardown()


@LIVE_CONFIGS
def test_what_was_refused_is_read_when_something_else_changed_meanwhile(machine: type[Exchange]) -> None:
    exchange = changed(machine)
    exchange.publish({"a": b"2", "b": b"2"})
    exchange.write()
    exchange.client_reads(refuse=True)
    exchange.teardown()
