"""The cases of the protocol that have to be right, one by one, in both dialects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2

from controlplane.xds.discovery_request import DeltaRequest, SotwRequest
from controlplane.xds.resource_set import ResourceSet, resource_set_from_bodies
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, ResourceType
from controlplane.xds.subscription import AckResult, DeltaSubscription, SotwSubscription

# A type like clusters, but for what is true of them in our use: that they are not changed under an Envoy.
CHANGEABLE = replace(CLUSTER, immutable=False)


def collection(kind: ResourceType, **bodies: str) -> ResourceSet:
    return resource_set_from_bodies(
        kind,
        {
            name: any_pb2.Any(type_url=name, value=body.encode()).SerializeToString()
            for name, body in bodies.items()
        },
    )


class Sotw:
    """A client of the state of the world that answers as it is told."""

    def __init__(self, kind: ResourceType, *names: str, version: str = "") -> None:
        self.kind, self.names, self.version, self.nonce = kind, frozenset(names), version, ""
        self.subscription = SotwSubscription(kind)
        self.ask()

    def ask(self, *, error_detail: str = "", nonce: str | None = None) -> AckResult | None:
        nonce = self.nonce if nonce is None else nonce
        return self.subscription.receive(
            SotwRequest(self.kind.url, self.version, nonce, self.names, error_detail)
        )

    def get(self, offered: ResourceSet) -> list[str] | None:
        data = self.subscription.next_response(offered)
        if data is None:
            return None
        response = discovery_pb2.DiscoveryResponse.FromString(data)
        self.nonce, self.sent = response.nonce, response.version_info
        return [each.value.decode() for each in response.resources]

    def ack(self) -> AckResult | None:
        self.version = self.sent
        return self.ask()


class Delta:
    """An incremental client that answers as it is told."""

    def __init__(self, kind: ResourceType, *names: str, **held: str) -> None:
        self.kind = kind
        self.subscription = DeltaSubscription(kind)
        self.subscription.receive(DeltaRequest(kind.url, subscribe=frozenset(names), initial_versions=held))

    def ask(self, **fields: Any) -> AckResult | None:
        return self.subscription.receive(DeltaRequest(self.kind.url, **fields))

    def get(self, offered: ResourceSet) -> tuple[list[str], list[str]] | None:
        data = self.subscription.next_response(offered) or self.subscription.next_removal(offered)
        if data is None:
            return None
        response = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        self.nonce = response.nonce
        return [each.resource.value.decode() for each in response.resources], list(response.removed_resources)

    def ack(self) -> AckResult | None:
        return self.ask(nonce=self.nonce)


class TestSotw:
    def test_a_response_is_sent_once_and_acknowledged(self) -> None:
        one, two = collection(ENDPOINTS, tidb="1"), collection(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        assert client.get(one) == ["1"]
        assert client.get(one) is None
        assert not client.subscription.is_synced(one)
        assert client.ack() == AckResult(one.version)
        assert client.subscription.is_synced(one)
        assert client.get(one) is None
        assert client.get(two) == ["2"]

    def test_a_former_version_is_not_settled_while_another_is_on_its_way(self) -> None:
        one, two = collection(ENDPOINTS, tidb="1"), collection(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.get(two)
        assert not client.subscription.is_synced(
            one
        )  # taken back before the Envoy has answered: it may run two
        assert client.get(one) == ["1"]
        assert not client.subscription.is_synced(one)
        client.ack()
        assert client.subscription.is_synced(one)

    def test_the_same_request_again_is_answered_again(self) -> None:
        """As Envoy asks after a change of the cluster; silence keeps the new cluster waiting for 15 s."""
        one = collection(ENDPOINTS, tidb="1")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        assert client.ask() is None
        assert client.get(one) == ["1"]
        assert client.ack() == AckResult(one.version)
        assert client.get(one) is None

    def test_a_stale_nonce_is_no_answer(self) -> None:
        one, two = collection(ENDPOINTS, tidb="1"), collection(ENDPOINTS, tidb="2")
        client = Sotw(ENDPOINTS, "tidb")
        client.get(one)
        stale = client.nonce
        assert client.get(two) == ["2"]
        assert client.ask(nonce=stale) is None
        assert client.get(two) is None
        assert not client.subscription.is_synced(two)
        assert client.ack() == AckResult(two.version)

    def test_what_was_refused_is_not_sent_again_until_it_changes(self) -> None:
        good, bad = collection(CHANGEABLE, tidb="1"), collection(CHANGEABLE, tidb="2")
        client = Sotw(CHANGEABLE)
        client.get(good)
        client.ack()
        client.get(bad)
        assert client.ask(error_detail="it is bad") == AckResult(bad.version, "it is bad")
        assert client.get(bad) is None
        assert not client.subscription.is_synced(bad)
        assert not client.subscription.is_synced(good)  # Envoy may have applied a part of what it rejected
        assert client.get(good) == ["1"]
        client.ack()
        assert client.subscription.is_synced(good)

    def test_an_empty_list_is_everything_until_something_was_named(self) -> None:
        both = collection(CHANGEABLE, a="1", b="2")
        client = Sotw(CHANGEABLE)
        assert client.get(both) == ["1", "2"]
        client.names = frozenset({"b"})
        client.ack()
        assert client.get(both) is None
        client.names = frozenset()
        client.ask()
        assert client.get(collection(CHANGEABLE, a="3")) is None
        client.names = frozenset({"*"})
        client.ask()
        assert client.get(both) == ["1", "2"]

    def test_endpoints_have_no_wildcard(self) -> None:
        assert Sotw(ENDPOINTS).get(collection(ENDPOINTS, tidb="1")) is None

    def test_one_more_name_is_answered_and_one_less_is_not(self) -> None:
        both = collection(ENDPOINTS, a="1", b="2")
        client = Sotw(ENDPOINTS, "a")
        assert client.get(both) == ["1"]
        client.names = frozenset({"a", "b"})
        client.ack()
        assert client.get(both) == ["1", "2"]
        client.ack()
        client.names = frozenset({"b"})
        client.ask()
        assert client.get(both) is None

    def test_endpoints_that_are_not_there_are_waited_for(self) -> None:
        client = Sotw(ENDPOINTS, "later")
        assert client.get(collection(ENDPOINTS, tidb="1")) is None
        assert client.get(collection(ENDPOINTS, tidb="1", later="2")) == ["2"]

    @pytest.mark.parametrize("kind", [CHANGEABLE, ENDPOINTS])
    def test_who_comes_back_is_answered_even_with_what_it_has(self, kind: ResourceType) -> None:
        one = collection(kind, tidb="1")
        client = Sotw(kind, "tidb", version=one.version)
        assert client.subscription.is_synced(one)
        assert client.get(one) == ["1"]

    def test_a_listener_that_is_held_is_never_changed(self) -> None:
        one, two = collection(LISTENER, sql="1"), collection(LISTENER, sql="2")
        client = Sotw(LISTENER)
        assert client.get(one) == ["1"]
        assert client.get(two) is None  # the answer to the first may be that it is held
        client.ack()
        assert client.get(two) is None
        assert client.subscription.is_stale(two)
        assert client.subscription.is_synced(two)
        assert not client.subscription.is_stale(one)
        back = Sotw(LISTENER, version=one.version)
        assert back.get(two) is None
        assert back.subscription.is_stale(two)
        assert back.get(one) is None

    def test_new_listeners_come_one_by_one_beside_those_that_are_held_as_they_are(self) -> None:
        client = Sotw(LISTENER)
        assert client.get(collection(LISTENER, sql="1")) == ["1"]
        client.ack()
        more = collection(LISTENER, sql="2", b="3", c="4")
        assert client.get(more) == ["3", "1"]
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        client.ack()
        assert client.get(more) == ["3", "4", "1"]
        client.ack()
        assert client.subscription.is_synced(more)
        assert client.subscription.is_stale(more)
        assert client.get(collection(LISTENER, sql="2")) is None  # nothing is taken away

    def test_a_new_listener_that_is_refused_keeps_no_other_waiting(self) -> None:
        client = Sotw(LISTENER)
        client.get(collection(LISTENER, sql="1"))
        client.ack()
        more = collection(LISTENER, a="bad", b="3", sql="1")
        assert client.get(more) == ["bad", "1"]
        client.ask(error_detail="the port is taken")
        assert client.get(more) == ["3", "1"]
        client.ack()
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        mended = collection(LISTENER, a="good", b="3", sql="1")
        assert client.get(mended) == ["good", "3", "1"]
        client.ack()
        assert client.subscription.is_synced(mended)
        assert not client.subscription.is_stale(mended)

    def test_who_comes_back_gets_what_is_new_if_what_it_has_is_known(self) -> None:
        held = collection(LISTENER, b="2", sql="1").version
        more = collection(LISTENER, a="0", b="2", sql="1")
        assert Sotw(LISTENER, version=held).get(more) == ["0", "2", "1"]
        assert Sotw(LISTENER, version=held).get(collection(LISTENER, a="0", b="3", sql="1")) is None

    def test_only_what_is_ready_is_added(self) -> None:
        client = Sotw(LISTENER)
        more = collection(LISTENER, a="0", sql="1")
        assert client.subscription.next_response(more, allowed_names={"b"}) is None
        data = client.subscription.next_response(more, allowed_names={"sql"})
        assert data is not None
        assert len(discovery_pb2.DiscoveryResponse.FromString(data).resources) == 1

    def test_a_refused_first_listener_makes_room_for_another(self) -> None:
        one, two = collection(LISTENER, sql="1"), collection(LISTENER, sql="2")
        client = Sotw(LISTENER)
        client.get(one)
        client.ask(error_detail="no such filter")
        assert not client.subscription.has_resources
        assert client.get(one) is None
        assert client.get(two) == ["2"]

    def test_a_held_cluster_is_sent_anew_when_that_is_asked_for(self) -> None:
        one, two = collection(CLUSTER, tidb="1"), collection(CLUSTER, tidb="2")
        client = Sotw(CLUSTER)
        client.get(one)
        assert client.subscription.ack_pending
        assert (
            client.subscription.next_response(two, replaces=True) is None
        )  # not before it is known what it holds
        client.ack()
        assert not client.subscription.ack_pending
        assert client.subscription.next_response(one, replaces=True) is None
        assert client.subscription.next_response(two, replaces=True) is not None

    def test_the_lack_of_a_listener_is_not_told_so_that_one_may_come_later(self) -> None:
        client = Sotw(LISTENER)
        assert client.get(collection(LISTENER)) is None
        assert client.get(collection(LISTENER, sql="1")) == ["1"]


class TestDelta:
    def test_only_what_changed_is_sent(self) -> None:
        client = Delta(CHANGEABLE)
        assert client.get(collection(CHANGEABLE, a="1", b="2")) == (["1", "2"], [])
        client.ack()
        changed = collection(CHANGEABLE, a="1", b="3")
        assert client.get(changed) == (["3"], [])
        assert client.get(changed) is None
        assert not client.subscription.is_synced(changed)
        assert client.ack() == AckResult(changed.version)
        assert client.subscription.is_synced(changed)

    def test_what_is_on_its_way_counts_and_the_latest_most(self) -> None:
        one, two = collection(CHANGEABLE, tidb="1"), collection(CHANGEABLE, tidb="2")
        client = Delta(CHANGEABLE)
        assert [client.get(each) for each in (one, two, one)] == [(["1"], []), (["2"], []), (["1"], [])]

    @pytest.mark.parametrize(("asked", "given_up"), [(("a", "b"), "b"), (("*", "a"), "*")])
    def test_what_was_given_up_while_on_its_way_is_forgotten(
        self, asked: tuple[str, ...], given_up: str
    ) -> None:
        both = collection(CHANGEABLE, a="1", b="2")
        client = Delta(CHANGEABLE, *asked)
        client.get(both)
        client.ask(unsubscribe=frozenset({given_up}))
        client.ack()
        assert client.subscription.is_synced(both)
        assert client.get(collection(CHANGEABLE, a="1")) is None

    def test_what_is_gone_is_named(self) -> None:
        less = collection(CHANGEABLE, a="1")
        client = Delta(CHANGEABLE)
        client.get(collection(CHANGEABLE, a="1", b="2"))
        client.ack()
        assert client.get(less) == ([], ["b"])
        assert client.get(less) is None
        client.ack()
        assert client.subscription.is_synced(less)

    def test_a_name_that_does_not_exist_is_told_to_be_gone(self) -> None:
        client = Delta(ENDPOINTS, "none")
        assert client.get(collection(ENDPOINTS, tidb="1")) == ([], ["none"])
        assert client.get(collection(ENDPOINTS, none="2")) == (["2"], [])

    def test_who_comes_back_gets_what_is_new(self) -> None:
        old, new = collection(CHANGEABLE, a="1", b="2"), collection(CHANGEABLE, a="1", b="3")
        held = {name: each.version for name, each in old.resources.items()}
        client = Delta(CHANGEABLE, **held, gone="x")
        assert client.get(new) == (["3"], [])
        assert client.get(new) == ([], ["gone"])

    def test_a_name_asked_for_again_is_answered_again(self) -> None:
        one = collection(ENDPOINTS, tidb="1")
        client = Delta(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.ask(subscribe=frozenset({"tidb"}))
        assert client.get(one) == (["1"], [])

    def test_endpoints_are_owed_after_a_change_of_the_cluster(self) -> None:
        one = collection(ENDPOINTS, tidb="1")
        client = Delta(ENDPOINTS, "tidb")
        client.get(one)
        client.ack()
        client.subscription.mark_all_due()
        assert client.get(one) == (["1"], [])
        assert client.get(one) is None

    def test_a_name_given_up_is_not_sent(self) -> None:
        client = Delta(ENDPOINTS, "a", "b")
        client.get(collection(ENDPOINTS, a="1", b="2"))
        client.ack()
        client.ask(unsubscribe=frozenset({"a"}))
        assert client.get(collection(ENDPOINTS, a="3", b="2")) is None
        client.ask(subscribe=frozenset({"a"}))
        assert client.get(collection(ENDPOINTS, a="3", b="2")) == (["3"], [])

    def test_giving_up_the_wildcard_leaves_what_is_named(self) -> None:
        client = Delta(CHANGEABLE, "*", "a")
        client.get(collection(CHANGEABLE, a="1", b="2"))
        client.ack()
        client.ask(unsubscribe=frozenset({"*"}))
        assert client.get(collection(CHANGEABLE, a="3", b="4")) == (["3"], [])

    def test_what_was_refused_is_not_sent_again_until_it_changes(self) -> None:
        good, bad = collection(CHANGEABLE, tidb="1"), collection(CHANGEABLE, tidb="2")
        client = Delta(CHANGEABLE)
        client.get(good)
        client.ack()
        client.get(bad)
        assert client.ask(nonce=client.nonce, error_detail="it is bad") == AckResult(bad.version, "it is bad")
        assert client.get(bad) is None
        assert not client.subscription.is_synced(bad)
        assert not client.subscription.is_synced(good)  # Envoy may have applied a part of what it rejected
        assert client.get(good) == (["1"], [])
        client.ack()
        assert client.subscription.is_synced(good)

    def test_an_unknown_nonce_is_no_answer(self) -> None:
        client = Delta(CHANGEABLE)
        client.get(collection(CHANGEABLE, tidb="1"))
        assert client.ask(nonce="from a former stream") is None

    def test_a_listener_that_is_held_is_never_changed(self) -> None:
        one, two = collection(LISTENER, sql="1"), collection(LISTENER, sql="2")
        client = Delta(LISTENER)
        assert client.get(one) == (["1"], [])
        assert client.get(two) is None
        client.ack()
        assert client.get(two) is None
        assert client.get(collection(LISTENER, other="1")) == (["1"], [])  # nor taken away
        client.ack()
        assert client.subscription.is_stale(two)
        back = Delta(LISTENER, sql=one.resources["sql"].version)
        assert back.get(two) is None
        assert back.subscription.is_stale(two)
        assert not back.subscription.is_stale(one)

    def test_a_listener_on_its_way_is_not_taken_away_either(self) -> None:
        client = Delta(LISTENER)
        client.get(collection(LISTENER, sql="1"))
        assert client.get(collection(LISTENER)) is None

    def test_new_listeners_come_one_by_one_and_a_refused_one_keeps_no_other_waiting(self) -> None:
        client = Delta(LISTENER)
        client.get(collection(LISTENER, sql="1"))
        client.ack()
        more = collection(LISTENER, a="bad", b="3", sql="2")
        assert client.get(more) == (["bad"], [])
        assert client.get(more) is None
        client.ask(nonce=client.nonce, error_detail="the port is taken")
        assert client.get(more) == (["3"], [])
        client.ack()
        assert client.get(more) is None
        assert not client.subscription.is_synced(more)
        assert client.get(collection(LISTENER, a="good", b="3", sql="2")) == (["good"], [])

    def test_only_what_is_ready_is_added(self) -> None:
        client = Delta(LISTENER)
        more = collection(LISTENER, a="0", sql="1")
        assert client.subscription.next_response(more, allowed_names={"b"}) is None
        assert client.subscription.next_response(more, allowed_names={"sql"}) is not None

    def test_a_refused_first_listener_makes_room_for_another(self) -> None:
        one, two = collection(LISTENER, sql="1"), collection(LISTENER, sql="2")
        client = Delta(LISTENER)
        client.get(one)
        client.ask(nonce=client.nonce, error_detail="no such filter")
        assert not client.subscription.has_resources
        assert client.get(one) is None
        assert client.get(two) == (["2"], [])

    def test_a_held_cluster_is_sent_anew_when_that_is_asked_for(self) -> None:
        one, two = collection(CLUSTER, tidb="1"), collection(CLUSTER, tidb="2")
        client = Delta(CLUSTER)
        client.get(one)
        assert client.subscription.ack_pending
        client.ack()
        assert not client.subscription.ack_pending
        assert client.subscription.next_response(one, replaces=True) is None
        assert client.subscription.next_response(two, replaces=True) is not None

    def test_the_lack_of_a_listener_is_not_told_so_that_one_may_come_later(self) -> None:
        client = Delta(LISTENER)
        assert client.get(collection(LISTENER)) is None
        assert client.get(collection(LISTENER, sql="1")) == (["1"], [])
