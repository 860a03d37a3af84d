"""Tests of single cases of the xDS protocol in both variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2

from controlplane.xds.resource_set import ResourceSet, build_resource_set, make_resource
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, ResourceType
from controlplane.xds.subscription import AckResult, DeltaSubscription, SotwSubscription
from tests.support.controlplane.discovery_requests import delta_request, sotw_request

# A wildcard type like Tidevoy's clusters, but not `immutable`.
CHANGEABLE = replace(CLUSTER, immutable=False)


def resource_set(kind: ResourceType, **bodies: str) -> ResourceSet:
    return build_resource_set(
        kind,
        (
            make_resource(name, any_pb2.Any(type_url=name, value=body.encode()).SerializeToString())
            for name, body in bodies.items()
        ),
    )


class Sotw:
    """A state-of-the-world client; the test calls each step."""

    def __init__(self, kind: ResourceType, *names: str, version: str = "") -> None:
        self.kind, self.names, self.version, self.nonce = kind, frozenset(names), version, ""
        self.subscription = SotwSubscription(kind)
        self.request()

    def request(self, *, error_detail: str = "", nonce: str | None = None) -> AckResult | None:
        nonce = self.nonce if nonce is None else nonce
        return self.subscription.receive(
            sotw_request(self.kind, self.version, nonce, self.names, error_detail)
        )

    def get(self, published: ResourceSet) -> list[str] | None:
        data = self.subscription.next_response(published)
        if data is None:
            return None
        response = discovery_pb2.DiscoveryResponse.FromString(data)
        self.nonce, self.sent = response.nonce, response.version_info
        return [resource.value.decode() for resource in response.resources]

    def ack(self) -> AckResult | None:
        self.version = self.sent
        return self.request()


class Delta:
    """An incremental client; the test calls each step."""

    def __init__(self, kind: ResourceType, *names: str, **held: str) -> None:
        self.kind = kind
        self.subscription = DeltaSubscription(kind)
        self.subscription.receive(delta_request(kind, subscribe=frozenset(names), initial_versions=held))

    def request(self, **fields: Any) -> AckResult | None:
        return self.subscription.receive(delta_request(self.kind, **fields))

    def get(self, published: ResourceSet) -> tuple[list[str], list[str]] | None:
        data = self.subscription.next_response(published) or self.subscription.next_removal(published)
        if data is None:
            return None
        response = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        self.nonce = response.nonce
        return [resource.resource.value.decode() for resource in response.resources], list(
            response.removed_resources
        )

    def ack(self) -> AckResult | None:
        return self.request(nonce=self.nonce)


class TestSotw:
    def test_sends_each_version_once(self) -> None:
        one, two = resource_set(ENDPOINTS, tidb="1"), resource_set(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        assert client.get(one) == ["1"]
        assert client.get(one) is None
        assert not client.subscription.is_synced(one)
        assert client.ack() == AckResult(one.version)
        assert client.subscription.is_synced(one)
        assert client.get(one) is None
        assert client.get(two) == ["2"]

    def test_is_not_synced_with_old_version_while_new_one_is_pending(self) -> None:
        one, two = resource_set(ENDPOINTS, tidb="1"), resource_set(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.get(two)
        # `one` is published again while `two` is pending. The Envoy may already use `two`.
        assert not client.subscription.is_synced(one)
        assert client.get(one) == ["1"]
        assert not client.subscription.is_synced(one)
        client.ack()
        assert client.subscription.is_synced(one)

    def test_answers_repeated_request(self) -> None:
        """Envoy repeats its request after a cluster change, and waits up to 15 s for the response."""
        one = resource_set(ENDPOINTS, tidb="1")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        assert client.request() is None
        assert client.get(one) == ["1"]
        assert client.ack() == AckResult(one.version)
        assert client.get(one) is None

    def test_ignores_request_with_stale_nonce(self) -> None:
        one, two = resource_set(ENDPOINTS, tidb="1"), resource_set(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        stale = client.nonce
        assert client.get(two) == ["2"]
        assert client.request(nonce=stale) is None
        assert client.get(two) is None
        assert not client.subscription.is_synced(two)
        assert client.ack() == AckResult(two.version)

    def test_sotw_does_not_resend_rejected_version(self) -> None:
        good, bad = resource_set(CHANGEABLE, tidb="1"), resource_set(CHANGEABLE, tidb="2")
        client = Sotw(CHANGEABLE)
        client.get(good)
        client.ack()
        client.get(bad)
        assert client.request(error_detail="it is bad") == AckResult(bad.version, "it is bad")
        assert client.get(bad) is None
        assert not client.subscription.is_synced(bad)
        assert not client.subscription.is_synced(good)  # Envoy may have applied a part of what it rejected
        assert client.get(good) == ["1"]
        client.ack()
        assert client.subscription.is_synced(good)

    def test_empty_names_mean_wildcard_only_before_first_named_request(self) -> None:
        both = resource_set(CHANGEABLE, a="1", b="2")
        client = Sotw(CHANGEABLE)
        assert client.get(both) == ["1", "2"]
        client.names = frozenset({"b"})
        client.ack()
        assert client.get(both) is None
        client.names = frozenset()
        client.request()
        assert client.get(resource_set(CHANGEABLE, a="3")) is None
        client.names = frozenset({"*"})
        client.request()
        assert client.get(both) == ["1", "2"]

    def test_endpoints_have_no_wildcard(self) -> None:
        assert Sotw(ENDPOINTS).get(resource_set(ENDPOINTS, tidb="1")) is None

    def test_answers_added_name_but_not_removed_name(self) -> None:
        both = resource_set(ENDPOINTS, a="1", b="2")
        client = Sotw(ENDPOINTS, "a")
        assert client.get(both) == ["1"]
        client.names = frozenset({"a", "b"})
        client.ack()
        assert client.get(both) == ["1", "2"]
        client.ack()
        client.names = frozenset({"b"})
        client.request()
        assert client.get(both) is None

    def test_does_not_answer_for_missing_endpoints(self) -> None:
        client = Sotw(ENDPOINTS, "later")
        assert client.get(resource_set(ENDPOINTS, tidb="1")) is None
        assert client.get(resource_set(ENDPOINTS, tidb="1", later="2")) == ["2"]

    @pytest.mark.parametrize("kind", [CHANGEABLE, ENDPOINTS])
    def test_answers_reconnected_envoy_even_with_same_version(self, kind: ResourceType) -> None:
        one = resource_set(kind, tidb="1")
        client = Sotw(kind, "tidb", version=one.version)
        assert client.subscription.is_synced(one)
        assert client.get(one) == ["1"]

    def test_sotw_never_changes_held_listener(self) -> None:
        one, two = resource_set(LISTENER, sql="1"), resource_set(LISTENER, sql="2")
        client = Sotw(LISTENER)
        assert client.get(one) == ["1"]
        assert client.get(two) is None  # the first response is still pending
        client.ack()
        assert client.get(two) is None
        assert client.subscription.is_stale(two)
        assert client.subscription.is_synced(two)
        assert not client.subscription.is_stale(one)
        reconnected = Sotw(LISTENER, version=one.version)
        assert reconnected.get(two) is None
        assert reconnected.subscription.is_stale(two)
        assert reconnected.get(one) is None

    def test_adds_new_listeners_one_at_a_time(self) -> None:
        client = Sotw(LISTENER)
        assert client.get(resource_set(LISTENER, sql="1")) == ["1"]
        client.ack()
        more = resource_set(LISTENER, sql="2", b="3", c="4")
        assert client.get(more) == ["3", "1"]
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        client.ack()
        assert client.get(more) == ["3", "4", "1"]
        client.ack()
        assert client.subscription.is_synced(more)
        assert client.subscription.is_stale(more)
        assert client.get(resource_set(LISTENER, sql="2")) is None  # listeners are never removed

    def test_rejected_listener_does_not_block_others(self) -> None:
        client = Sotw(LISTENER)
        client.get(resource_set(LISTENER, sql="1"))
        client.ack()
        more = resource_set(LISTENER, a="bad", b="3", sql="1")
        assert client.get(more) == ["bad", "1"]
        client.request(error_detail="the port is taken")
        assert client.get(more) == ["3", "1"]
        client.ack()
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        fixed = resource_set(LISTENER, a="good", b="3", sql="1")
        assert client.get(fixed) == ["good", "3", "1"]
        client.ack()
        assert client.subscription.is_synced(fixed)
        assert not client.subscription.is_stale(fixed)

    def test_reconnected_envoy_gets_new_listeners_if_held_version_is_known(self) -> None:
        held = resource_set(LISTENER, b="2", sql="1").version
        more = resource_set(LISTENER, a="0", b="2", sql="1")
        assert Sotw(LISTENER, version=held).get(more) == ["0", "2", "1"]
        assert Sotw(LISTENER, version=held).get(resource_set(LISTENER, a="0", b="3", sql="1")) is None

    def test_sotw_adds_only_allowed_names(self) -> None:
        client = Sotw(LISTENER)
        more = resource_set(LISTENER, a="0", sql="1")
        assert client.subscription.next_response(more, allowed_names={"b"}) is None
        data = client.subscription.next_response(more, allowed_names={"sql"})
        assert data is not None
        assert len(discovery_pb2.DiscoveryResponse.FromString(data).resources) == 1

    def test_sotw_replaces_rejected_first_listener(self) -> None:
        one, two = resource_set(LISTENER, sql="1"), resource_set(LISTENER, sql="2")
        client = Sotw(LISTENER)
        client.get(one)
        client.request(error_detail="no such filter")
        assert not client.subscription.has_resources
        assert client.get(one) is None
        assert client.get(two) == ["2"]

    def test_sotw_replaces_held_cluster_on_request(self) -> None:
        one, two = resource_set(CLUSTER, tidb="1"), resource_set(CLUSTER, tidb="2")
        client = Sotw(CLUSTER)
        client.get(one)
        assert client.subscription.ack_pending
        # Nothing is replaced while a response is pending.
        assert client.subscription.next_response(two, may_replace=True) is None
        client.ack()
        assert not client.subscription.ack_pending
        assert client.subscription.next_response(one, may_replace=True) is None
        assert client.subscription.next_response(two, may_replace=True) is not None

    def test_sotw_sends_no_empty_set_of_listeners(self) -> None:
        client = Sotw(LISTENER)
        assert client.get(resource_set(LISTENER)) is None
        assert client.get(resource_set(LISTENER, sql="1")) == ["1"]


class TestDelta:
    def test_sends_only_changes(self) -> None:
        client = Delta(CHANGEABLE)
        assert client.get(resource_set(CHANGEABLE, a="1", b="2")) == (["1", "2"], [])
        client.ack()
        changed = resource_set(CHANGEABLE, a="1", b="3")
        assert client.get(changed) == (["3"], [])
        assert client.get(changed) is None
        assert not client.subscription.is_synced(changed)
        assert client.ack() == AckResult(changed.version)
        assert client.subscription.is_synced(changed)

    def test_latest_pending_response_counts_as_held(self) -> None:
        one, two = resource_set(CHANGEABLE, tidb="1"), resource_set(CHANGEABLE, tidb="2")
        client = Delta(CHANGEABLE)
        responses = [client.get(published) for published in (one, two, one)]
        assert responses == [(["1"], []), (["2"], []), (["1"], [])]

    def test_each_pending_response_is_acknowledged_by_its_nonce(self) -> None:
        one, two = resource_set(CHANGEABLE, tidb="1"), resource_set(CHANGEABLE, tidb="2")
        client = Delta(CHANGEABLE)
        client.get(one)
        first_nonce = client.nonce
        client.get(two)
        assert client.request(nonce=first_nonce, error_detail="no") == AckResult(one.version, "no")
        assert client.ack() == AckResult(two.version)

    def test_unsubscribed_name_is_sent_again_if_the_wildcard_covers_it(self) -> None:
        both = resource_set(CHANGEABLE, a="1", b="2")
        client = Delta(CHANGEABLE, "*", "a")
        client.get(both)
        client.ack()
        client.request(unsubscribe=frozenset({"a"}))
        assert client.get(both) == (["1"], [])

    @pytest.mark.parametrize(("subscribed", "unsubscribed"), [(("a", "b"), "b"), (("*", "a"), "*")])
    def test_forgets_name_unsubscribed_while_pending(
        self, subscribed: tuple[str, ...], unsubscribed: str
    ) -> None:
        both = resource_set(CHANGEABLE, a="1", b="2")
        client = Delta(CHANGEABLE, *subscribed)
        client.get(both)
        client.request(unsubscribe=frozenset({unsubscribed}))
        client.ack()
        assert client.subscription.is_synced(both)
        assert client.get(resource_set(CHANGEABLE, a="1")) is None

    def test_names_removed_resources(self) -> None:
        without_b = resource_set(CHANGEABLE, a="1")
        client = Delta(CHANGEABLE)
        client.get(resource_set(CHANGEABLE, a="1", b="2"))
        client.ack()
        assert client.get(without_b) == ([], ["b"])
        assert client.get(without_b) is None
        client.ack()
        assert client.subscription.is_synced(without_b)

    def test_reports_unknown_name_as_removed(self) -> None:
        client = Delta(ENDPOINTS, "none")
        assert client.get(resource_set(ENDPOINTS, tidb="1")) == ([], ["none"])
        assert client.get(resource_set(ENDPOINTS, none="2")) == (["2"], [])

    def test_reconnected_envoy_gets_only_changes(self) -> None:
        old, new = resource_set(CHANGEABLE, a="1", b="2"), resource_set(CHANGEABLE, a="1", b="3")
        held = {name: resource.version for name, resource in old.resources.items()}
        client = Delta(CHANGEABLE, **held, gone="x")
        assert client.get(new) == (["3"], [])
        assert client.get(new) == ([], ["gone"])

    def test_answers_repeated_subscription(self) -> None:
        one = resource_set(ENDPOINTS, tidb="1")
        client = Delta(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.request(subscribe=frozenset({"tidb"}))
        assert client.get(one) == (["1"], [])

    def test_mark_all_due_resends_subscribed_endpoints(self) -> None:
        one = resource_set(ENDPOINTS, tidb="1")
        client = Delta(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.subscription.mark_all_due()
        assert client.get(one) == (["1"], [])
        assert client.get(one) is None

    def test_does_not_send_unsubscribed_name(self) -> None:
        client = Delta(ENDPOINTS, "a", "b")
        client.get(resource_set(ENDPOINTS, a="1", b="2"))
        client.ack()
        client.request(unsubscribe=frozenset({"a"}))
        assert client.get(resource_set(ENDPOINTS, a="3", b="2")) is None
        client.request(subscribe=frozenset({"a"}))
        assert client.get(resource_set(ENDPOINTS, a="3", b="2")) == (["3"], [])

    def test_unsubscribing_wildcard_keeps_named_resources(self) -> None:
        client = Delta(CHANGEABLE, "*", "a")
        client.get(resource_set(CHANGEABLE, a="1", b="2"))
        client.ack()
        client.request(unsubscribe=frozenset({"*"}))
        assert client.get(resource_set(CHANGEABLE, a="3", b="4")) == (["3"], [])

    def test_delta_does_not_resend_rejected_version(self) -> None:
        good, bad = resource_set(CHANGEABLE, tidb="1"), resource_set(CHANGEABLE, tidb="2")
        client = Delta(CHANGEABLE)
        client.get(good)
        client.ack()
        client.get(bad)
        assert client.request(nonce=client.nonce, error_detail="it is bad") == AckResult(
            bad.version, "it is bad"
        )
        assert client.get(bad) is None
        assert not client.subscription.is_synced(bad)
        assert not client.subscription.is_synced(good)  # Envoy may have applied a part of what it rejected
        assert client.get(good) == (["1"], [])
        client.ack()
        assert client.subscription.is_synced(good)

    def test_ignores_unknown_nonce(self) -> None:
        client = Delta(CHANGEABLE)
        client.get(resource_set(CHANGEABLE, tidb="1"))
        assert client.request(nonce="from a former stream") is None

    def test_delta_never_changes_held_listener(self) -> None:
        one, two = resource_set(LISTENER, sql="1"), resource_set(LISTENER, sql="2")
        client = Delta(LISTENER)
        assert client.get(one) == (["1"], [])
        assert client.get(two) is None
        client.ack()
        assert client.get(two) is None
        assert client.get(resource_set(LISTENER, other="1")) == (["1"], [])  # `sql` is not removed either
        client.ack()
        assert client.subscription.is_stale(two)
        reconnected = Delta(LISTENER, sql=one.resources["sql"].version)
        assert reconnected.get(two) is None
        assert reconnected.subscription.is_stale(two)
        assert not reconnected.subscription.is_stale(one)

    def test_does_not_remove_pending_listener(self) -> None:
        client = Delta(LISTENER)
        client.get(resource_set(LISTENER, sql="1"))
        assert client.get(resource_set(LISTENER)) is None

    def test_adds_listeners_one_at_a_time_past_a_rejected_one(self) -> None:
        client = Delta(LISTENER)
        client.get(resource_set(LISTENER, sql="1"))
        client.ack()
        more = resource_set(LISTENER, a="bad", b="3", sql="2")
        assert client.get(more) == (["bad"], [])
        assert client.get(more) is None
        client.request(nonce=client.nonce, error_detail="the port is taken")
        assert client.get(more) == (["3"], [])
        client.ack()
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        assert client.get(resource_set(LISTENER, a="good", b="3", sql="2")) == (["good"], [])

    def test_delta_adds_only_allowed_names(self) -> None:
        client = Delta(LISTENER)
        more = resource_set(LISTENER, a="0", sql="1")
        assert client.subscription.next_response(more, allowed_names={"b"}) is None
        assert client.subscription.next_response(more, allowed_names={"sql"}) is not None

    def test_delta_replaces_rejected_first_listener(self) -> None:
        one, two = resource_set(LISTENER, sql="1"), resource_set(LISTENER, sql="2")
        client = Delta(LISTENER)
        client.get(one)
        client.request(nonce=client.nonce, error_detail="no such filter")
        assert not client.subscription.has_resources
        assert client.get(one) is None
        assert client.get(two) == (["2"], [])

    def test_delta_replaces_held_cluster_on_request(self) -> None:
        one, two = resource_set(CLUSTER, tidb="1"), resource_set(CLUSTER, tidb="2")
        client = Delta(CLUSTER)
        client.get(one)
        assert client.subscription.ack_pending
        client.ack()
        assert not client.subscription.ack_pending
        assert client.subscription.next_response(one, may_replace=True) is None
        assert client.subscription.next_response(two, may_replace=True) is not None

    def test_delta_sends_no_empty_set_of_listeners(self) -> None:
        client = Delta(LISTENER)
        assert client.get(resource_set(LISTENER)) is None
        assert client.get(resource_set(LISTENER, sql="1")) == (["1"], [])
