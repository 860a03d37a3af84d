"""Model-based random test: in the end, an Envoy has the latest resources, whatever happened before.

The rules of `Exchange` publish resources, reconnect, and deliver messages in random order.
"""

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

from controlplane.xds.resource_set import Resource, ResourceSet, build_resource_set, make_resource
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, ResourceType
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription
from tests.support.controlplane.discovery_requests import delta_request, sotw_request

# A wildcard type like Tidevoy's clusters, but not `immutable`.
CHANGEABLE = replace(CLUSTER, immutable=False)

NAMES = ("a", "b", "c")
PADDING = b"padding "  # between content and the number of a re-encoding; too long to occur in content
name = st.sampled_from(NAMES)
contents = st.dictionaries(name, st.binary(min_size=1, max_size=1), min_size=1)


class Client(ABC):
    """A client. `has` holds its resources; `check` asserts that none of an `immutable` type changes."""

    def __init__(self, kind: ResourceType) -> None:
        self.kind = kind
        self.everything = kind.wildcard
        self.wanted: set[str] = set() if kind.wildcard else {"a"}
        self.has: dict[str, bytes] = {}
        self.last_received: dict[str, bytes] = {}  # only for a `skips_identical` type

    def wants(self, resource_name: str) -> bool:
        return self.everything or resource_name in self.wanted

    @staticmethod
    @abstractmethod
    def nonce_and_versions(data: bytes) -> tuple[str, set[tuple[str, str]]]:
        """Return the nonce of a response, and the (name, version) pairs that an ACK of it acknowledges."""

    def read_new(self, received: dict[str, bytes]) -> dict[str, bytes]:
        """Return the resources that Envoy reads: of a `skips_identical` type, only changed resources."""
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

    def request(self, error_detail: str = "") -> Any:
        return sotw_request(self.kind, self.version, self.nonce, self.wanted, error_detail)

    def reconnect(self) -> Any:
        self.nonce = ""
        return self.request()

    def repeat(self) -> Any:
        return self.request()

    def subscribe(self, resource: str) -> Any:
        self.wanted.add(resource)
        return self.request()

    def unsubscribe(self, resource: str) -> Any:
        self.forget(resource)
        return self.request()

    def process(self, data: bytes, *, reject: bool) -> Any:
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
        # Envoy removes resources that are missing from a response; immutable ones must not be missing.
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

    def reconnect(self) -> Any:
        return delta_request(
            self.kind, subscribe=frozenset(self.wanted), initial_versions=dict(self.versions)
        )

    def repeat(self) -> Any:
        return delta_request(self.kind)

    def subscribe(self, resource: str) -> Any:
        self.wanted.add(resource)
        return delta_request(self.kind, subscribe=frozenset({resource}))

    def unsubscribe(self, resource: str) -> Any:
        self.forget(resource)
        self.versions.pop(resource, None)
        return delta_request(self.kind, unsubscribe=frozenset({resource}))

    def process(self, data: bytes, *, reject: bool) -> Any:
        message = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        assert message.type_url == self.kind.url
        received = {
            resource.name: resource.resource.value
            for resource in message.resources
            if self.wants(resource.name)
        }
        read = self.read_new(received)
        if reject and (read or not received):
            return delta_request(self.kind, message.nonce, error_detail="no")
        self.check(received)
        self.has.update(read)
        for resource in message.resources:
            if self.wants(resource.name):
                self.versions[resource.name] = resource.version
        for removed_name in message.removed_resources:
            self.has.pop(removed_name, None)
            self.versions.pop(removed_name, None)
        return delta_request(self.kind, message.nonce)


class Exchange(RuleBasedStateMachine):
    """A client and a server. In each direction, the messages are queued and delivered in order."""

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
        # The type URL of each `Any` is the name of the resource, so that the client can identify it.
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
            self.rejected |= self.sent[request.response_nonce]
        # After a client has unsubscribed from a name, a rejected version of it may be sent again.
        for unsubscribed in getattr(request, "resource_names_unsubscribe", ()):
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
        # Publish new content that the client has not rejected. From here on, the client rejects nothing.
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
            # In the state-of-the-world variant, a reconnected Envoy reports a version, but no resources.
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
            # The state-of-the-world variant cannot remove endpoints. Envoy removes them with their cluster.
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
    """Return an exchange whose client has subscribed to `a` and `b` and has both."""
    exchange = machine()
    exchange.begin({"a": b"1", "b": b"1"})
    exchange.subscribe("b")
    while exchange.settle_one():
        pass
    exchange.check_client_is_current()
    return exchange


def exchange_with_pending_change(machine: type[Exchange]) -> Exchange:
    """Return an exchange with a change of `a` that was sent but that the client has not read yet."""
    exchange = synced_exchange(machine)
    exchange.publish({"a": b"2", "b": b"1"})
    assert exchange.write()
    return exchange


def test_neither_of_two_rejected_versions_is_sent_again() -> None:
    """The state-of-the-world variant has only one response without an acknowledgement at a time."""
    exchange = exchange_with_pending_change(DeltaLiveConfig)
    exchange.publish({"a": b"3", "b": b"1"})
    assert exchange.write()
    exchange.client_reads(reject=True)
    exchange.client_reads(reject=True)
    exchange.publish({"a": b"2", "b": b"1"})
    exchange.read()
    exchange.read()
    exchange.write()
    exchange.teardown()


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
