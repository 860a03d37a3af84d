"""Model-based random test: whatever an Envoy and the network do, it ends up with the latest resources."""

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

# Like clusters, but mutable: Tidevoy never changes the clusters that an Envoy holds.
CHANGEABLE = replace(CLUSTER, immutable=False)

NAMES = ("a", "b", "c")
PADDING = b"padding "  # longer than any content
name = st.sampled_from(NAMES)
contents = st.dictionaries(name, st.binary(min_size=1, max_size=1), min_size=1)


class Client(ABC):
    """Base of the clients: holds resources, and asserts that held immutable resources do not change."""

    def __init__(self, kind: ResourceType) -> None:
        self.kind = kind
        self.everything = kind.wildcard
        self.wanted: set[str] = set() if kind.wildcard else {"a"}
        self.has: dict[str, bytes] = {}
        self.last_received: dict[str, bytes] = {}  # received last, of a `skips_identical` type

    def wants(self, resource_name: str) -> bool:
        return self.everything or resource_name in self.wanted

    @staticmethod
    @abstractmethod
    def nonce_and_versions(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        """Return the nonce of a response, and the names and versions that its ACK covers."""

    def read_new(self, received: dict[str, bytes]) -> dict[str, bytes]:
        """Return what the Envoy reads of a response: what is new, if the type skips identical resources."""
        if not self.kind.skips_identical:
            return received
        new = dict(received.items() - self.last_received.items())
        self.last_received.update(received)
        return new

    def forget(self, resource_name: str) -> None:
        self.wanted.discard(resource_name)
        self.has.pop(resource_name, None)
        self.last_received.pop(resource_name, None)

    def check(self, received: dict[str, bytes]) -> None:
        if self.kind.immutable:
            assert all(self.has.get(resource_name, body) == body for resource_name, body in received.items())


class SotwClient(Client):
    def __init__(self, kind: ResourceType) -> None:
        super().__init__(kind)
        self.version = self.nonce = ""

    @staticmethod
    def nonce_and_versions(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        message = discovery_pb2.DiscoveryResponse.FromString(data)
        return message.nonce, {("", message.version_info)}

    def request(self, error_detail: str = "") -> SotwRequest:
        return SotwRequest(self.kind.url, self.version, self.nonce, frozenset(self.wanted), error_detail)

    def reconnect(self) -> SotwRequest:
        self.nonce = ""
        return self.request()

    def repeat(self) -> SotwRequest:
        return self.request()

    def subscribe(self, resource: str) -> SotwRequest:
        self.wanted.add(resource)
        return self.request()

    def unsubscribe(self, resource: str) -> SotwRequest:
        self.forget(resource)
        return self.request()

    def process(self, data: bytes, *, reject: bool) -> SotwRequest:
        message = discovery_pb2.DiscoveryResponse.FromString(data)
        assert message.type_url == self.kind.url
        self.nonce = message.nonce
        received = {
            resource.type_url: resource.value
            for resource in message.resources
            if self.wants(resource.type_url)
        }
        read = self.read_new(received)
        if reject and (read or not received):
            return self.request("no")
        self.check(received)
        # A resource missing from a response is removed, and immutable ones must not be.
        assert not self.kind.immutable or self.has.keys() <= received.keys()
        held = {} if self.kind.wildcard else self.has
        self.has = {resource: body for resource, body in {**held, **read}.items() if self.wants(resource)}
        self.version = message.version_info
        return self.request()


class DeltaClient(Client):
    def __init__(self, kind: ResourceType) -> None:
        super().__init__(kind)
        self.versions: dict[str, str] = {}

    @staticmethod
    def nonce_and_versions(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        message = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        return message.nonce, {(resource.name, resource.version) for resource in message.resources}

    def reconnect(self) -> DeltaRequest:
        return DeltaRequest(
            self.kind.url, subscribe=frozenset(self.wanted), initial_versions=dict(self.versions)
        )

    def repeat(self) -> DeltaRequest:
        return DeltaRequest(self.kind.url)

    def subscribe(self, resource: str) -> DeltaRequest:
        self.wanted.add(resource)
        return DeltaRequest(self.kind.url, subscribe=frozenset({resource}))

    def unsubscribe(self, resource: str) -> DeltaRequest:
        self.forget(resource)
        self.versions.pop(resource, None)
        return DeltaRequest(self.kind.url, unsubscribe=frozenset({resource}))

    def process(self, data: bytes, *, reject: bool) -> DeltaRequest:
        message = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        assert message.type_url == self.kind.url
        received = {
            resource.name: resource.resource.value
            for resource in message.resources
            if self.wants(resource.name)
        }
        read = self.read_new(received)
        if reject and (read or not received):
            return DeltaRequest(self.kind.url, message.nonce, error_detail="no")
        self.check(received)
        self.has.update(read)
        for resource in message.resources:
            if self.wants(resource.name):
                self.versions[resource.name] = resource.version
        for removed_name in message.removed_resources:
            self.has.pop(removed_name, None)
            self.versions.pop(removed_name, None)
        return DeltaRequest(self.kind.url, message.nonce)


class Exchange(RuleBasedStateMachine):
    """Client and server with messages in flight in both directions, delivered in order."""

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
        # A resource's `Any` has the resource's name as its type, so that the client can identify the body.
        self.bodies = bodies
        self.published: ResourceSet = build_resource_set(
            self.kind, (self.resource(resource_name, body) for resource_name, body in bodies.items())
        )
        self.rejected: set[tuple[str, str]] = set()

    def resource(self, resource_name: str, body: bytes) -> Resource:
        return make_resource(
            resource_name,
            _packed(resource_name, body),
            lambda: _packed(resource_name, body + PADDING + next(self.numbers)),
        )

    @rule(bodies=contents)
    def publish(self, bodies: dict[str, bytes]) -> None:
        self.put(bodies)

    @rule()
    def reconnect(self) -> None:
        self.subscription = self.subscriptions(self.kind)
        self.to_server.clear()
        self.to_client.clear()
        self.rejected = set()
        self.sent: dict[str, set[tuple[str, str]]] = {}
        self.to_server.append(self.client.reconnect())

    @rule()
    def ask_again(self) -> None:
        self.to_server.append(self.client.repeat())

    @precondition(lambda self: not self.kind.wildcard)
    @rule(resource_name=name)
    def subscribe(self, resource_name: str) -> None:
        if resource_name not in self.client.wanted:
            self.to_server.append(self.client.subscribe(resource_name))

    @precondition(lambda self: not self.kind.wildcard)
    @rule(resource_name=name)
    def unsubscribe(self, resource_name: str) -> None:
        if resource_name in self.client.wanted:
            self.to_server.append(self.client.unsubscribe(resource_name))

    @precondition(lambda self: self.to_server)
    @rule()
    def server_reads(self) -> None:
        self.read()

    def read(self) -> None:
        request = self.to_server.popleft()
        ack_result = self.subscription.receive(request)
        if ack_result is not None and ack_result.error_detail:
            self.rejected |= self.sent[request.nonce]
        # A client that unsubscribes a name and subscribes it again gets it even if it was rejected.
        for unsubscribed in getattr(request, "unsubscribe", ()):
            for versions in (self.rejected, *self.sent.values()):
                versions -= {version for version in versions if version[0] == unsubscribed}

    @rule()
    def server_writes(self) -> None:
        self.write()

    def write(self) -> bool:
        data = self.subscription.next_response(self.published) or self.subscription.next_removal(
            self.published
        )
        if data is None:
            return False
        nonce, versions = self.clients.nonce_and_versions(data)
        assert not versions & self.rejected, "resent a rejected version"
        self.sent[nonce] = versions
        self.to_client.append(data)
        return True

    @precondition(lambda self: self.to_client)
    @rule(reject=st.booleans())
    def client_reads(self, reject: bool) -> None:
        self.to_server.append(self.client.process(self.to_client.popleft(), reject=reject))

    def teardown(self) -> None:
        if not hasattr(self, "published"):
            return
        while self.kind.skips_identical and self.settle_one():
            pass
        if self.kind.skips_identical and self.subscription.is_synced(self.published):
            self.check_client_is_current()
        # Publish new content, so that no earlier rejection applies; from now on nothing is rejected.
        while self.to_client or self.to_server:
            self.settle_one()
        self.put({resource_name: b"last " + body for resource_name, body in self.bodies.items()})
        for _ in range(30):
            if not self.settle_one():
                break
        else:
            raise AssertionError("the exchange does not settle")
        if self.kind.immutable:
            assert set(self.client.has) & set(NAMES) or not self.bodies
            # In state of the world, a reconnected Envoy reports only a version, not what it has.
            assert self.clients is SotwClient or set(self.bodies) <= set(self.client.has)
        else:
            self.check_client_is_current()
        assert self.subscription.is_synced(self.published)

    def check_client_is_current(self) -> None:
        wanted = {
            resource_name: body
            for resource_name, body in self.bodies.items()
            if self.client.wants(resource_name)
        }
        has = {resource_name: body.partition(PADDING)[0] for resource_name, body in self.client.has.items()}
        if self.clients is SotwClient and not self.kind.wildcard:
            # State of the world cannot remove endpoints; Envoy drops them with their cluster.
            has = {resource_name: body for resource_name, body in has.items() if resource_name in self.bodies}
        assert has == wanted

    def settle_one(self) -> bool:
        if self.to_client:
            self.to_server.append(self.client.process(self.to_client.popleft(), reject=False))
            return True
        if self.to_server:
            self.read()
            return True
        return self.write()


def _packed(resource_name: str, body: bytes) -> bytes:
    data: bytes = any_pb2.Any(type_url=resource_name, value=body).SerializeToString()
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


def synced_exchange(machine: type[Exchange]) -> Exchange:
    """Return an exchange whose client subscribes to `a` and `b`, and has them."""
    exchange = machine()
    exchange.begin({"a": b"1", "b": b"1"})
    exchange.subscribe("b")
    while exchange.settle_one():
        pass
    exchange.check_client_is_current()
    return exchange


def exchange_with_pending_change(machine: type[Exchange]) -> Exchange:
    """Return an exchange with a sent change of `a` that its client has not read yet."""
    exchange = synced_exchange(machine)
    exchange.publish({"a": b"2", "b": b"1"})
    assert exchange.write()
    return exchange


@LIVE_CONFIGS
def test_rejected_resource_is_read_on_new_stream(machine: type[Exchange]) -> None:
    exchange = exchange_with_pending_change(machine)
    exchange.client_reads(reject=True)
    exchange.reconnect()
    exchange.teardown()


@LIVE_CONFIGS
def test_rejected_resource_is_read_with_later_change(machine: type[Exchange]) -> None:
    exchange = exchange_with_pending_change(machine)
    exchange.client_reads(reject=True)
    exchange.read()
    exchange.publish({"a": b"2", "b": b"2"})
    exchange.teardown()


@LIVE_CONFIGS
def test_rejected_resource_is_read_with_concurrent_change(machine: type[Exchange]) -> None:
    exchange = exchange_with_pending_change(machine)
    exchange.publish({"a": b"2", "b": b"2"})
    exchange.write()
    exchange.client_reads(reject=True)
    exchange.teardown()
