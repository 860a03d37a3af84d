"""Which nodes the Envoys of a group and a zone are told of, in which order they may use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.xds.resource_set import ResourceSet
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER
from controlplane.xds.resources.profile import MODULE_PROFILE, PLAIN_PROFILE
from controlplane.xds.snapshot_cache import build_snapshots

GROUPS = Settings.model_validate(
    {"groups": [{"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}}]}
)


def node(name: str, advice: EdsHealth = EdsHealth.HEALTHY, **place: Any) -> NodePlan:
    endpoint = f"10.0.0.{ord(name[0])}:4000"
    plain = NodePlan(Node(name, Source.PD), State.ACTIVE, "", 0.0, advice, 7, endpoint)
    return replace(plain, **place)


def plan(*nodes: NodePlan, full: frozenset[tuple[str, str]] = frozenset()) -> Plan:
    return Plan({each.node.address: each for each in nodes}, overloaded_zones=full)


def assignments(held: ResourceSet) -> dict[str, Any]:
    """The assignments by cluster."""
    found = {}
    for name, resource in held.resources.items():
        at = resource.sotw.index(b"ClusterLoadAssignment") + len(b"ClusterLoadAssignment")
        message = endpoint_pb2.ClusterLoadAssignment()
        message.ParseFromString(_value(resource.sotw[at:]))
        assert message.cluster_name == name
        found[name] = message
    return found


def _value(rest: bytes) -> bytes:
    """What `google.protobuf.Any` carries, without the tag and the length of the field."""
    assert rest[0] == 0x12
    at = 1
    while rest[at] & 0x80:
        at += 1
    return rest[at + 1 :]


def tiers(of: Plan, zone: str = "", cluster: str = "tidb", **settings: Any) -> list[dict[str, int]]:
    """Weight by address, priority for priority, as an Envoy there is told."""
    given = Settings.model_validate({**GROUPS.model_dump(exclude_unset=True), **settings})
    message = assignments(
        build_snapshots(of, given)[PLAIN_PROFILE.for_group_and_zone("", zone)].collections[ENDPOINTS]
    )[cluster]
    assert [each.priority for each in message.endpoints] == list(range(len(message.endpoints)))
    assert message.HasField("policy") == (len(message.endpoints) > 1)
    return [
        {
            chr(
                int(each.endpoint.address.socket_address.address.rpartition(".")[2])
            ): each.load_balancing_weight.value
            for each in told.lb_endpoints
        }
        for told in message.endpoints
    ]


NEAR, FAR = node("a", zone="a", local_weight=9), node("b", zone="b", local_weight=8)
SPARE, OLAP = node("c", backup=True, zone="a"), node("d", group="olap", zone="a", local_weight=5)


def test_nodes_nearby_come_first_with_their_weight_there_and_those_that_stand_in_last() -> None:
    every = plan(NEAR, FAR, SPARE, OLAP)
    assert tiers(every, "a") == [{"a": 9}, {"b": 7}, {"c": 7}]
    assert tiers(every, "b") == [{"b": 8}, {"a": 7}, {"c": 7}]
    for zone in ("", "elsewhere"):
        assert tiers(every, zone) == [{"a": 7, "b": 7}, {"c": 7}]
    assert tiers(every, "a", "tidb-olap") == [{"d": 5}]
    assert tiers(every, "b", "tidb-olap") == [{"d": 7}]


def test_a_full_zone_is_told_as_all_are() -> None:
    every = plan(NEAR, FAR, SPARE, OLAP, full=frozenset({("", "a")}))
    assert tiers(every, "a") == tiers(every, "")
    assert tiers(every, "a", "tidb-olap") == [{"d": 5}]  # which is full in one group is not in another


def test_a_zone_without_a_node_in_service_is_told_as_all_are() -> None:
    down = replace(NEAR, eds_health=EdsHealth.DRAINING, weight=0, local_weight=0)
    assert tiers(plan(down, FAR, SPARE), "a") == [{"a": 1, "b": 7}, {"c": 7}]
    # With another one there, a node that drains stays where its sessions know it to be.
    also = node("e", zone="a", local_weight=3)
    assert tiers(plan(down, also, FAR), "a") == [{"a": 1, "e": 3}, {"b": 7}]


def test_by_connections_alone_nobody_asks_where_a_node_is() -> None:
    assert tiers(plan(NEAR, FAR), "a", balance={"policy": "connection"}) == [{"a": 7, "b": 7}]


def test_where_only_those_that_stand_in_are_left_they_come_first() -> None:
    assert tiers(plan(SPARE), "a") == [{"c": 7}]
    assert tiers(plan(), "a") == [{}]


places = st.tuples(
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["", "olap"]),
    st.booleans(),
    st.sampled_from([EdsHealth.HEALTHY, EdsHealth.UNHEALTHY, EdsHealth.DRAINING, None]),
)


@given(st.lists(places, max_size=8), st.sampled_from(["", "a", "b"]), st.booleans())
def test_each_envoy_is_told_of_each_node_of_a_group_once(
    fleet: list[tuple[str, str, bool, EdsHealth | None]], zone: str, is_full: bool
) -> None:
    nodes = [
        replace(node(chr(97 + number)), zone=there, group=group, backup=backup, eds_health=advice)
        for number, (there, group, backup, advice) in enumerate(fleet)
    ]
    full = frozenset({("", zone)}) if is_full else frozenset()
    for group, cluster in (("", "tidb"), ("olap", "tidb-olap")):
        told = [address for tier in tiers(plan(*nodes, full=full), zone, cluster) for address in tier]
        expected = [n.node.address for n in nodes if n.group == group and n.eds_health is not None]
        assert sorted(told) == expected


# --- what classes share ---


def test_what_does_not_depend_on_the_zone_is_made_once() -> None:
    made = build_snapshots(plan(NEAR, FAR), GROUPS)
    here, there, nowhere = (
        made[PLAIN_PROFILE.for_group_and_zone("", zone)].collections for zone in ("a", "b", "c")
    )
    anywhere = made[PLAIN_PROFILE].collections
    assert here[CLUSTER] is there[CLUSTER] is anywhere[CLUSTER]
    assert here[LISTENER] is anywhere[LISTENER]
    assert nowhere[ENDPOINTS] is anywhere[ENDPOINTS] is made[MODULE_PROFILE].collections[ENDPOINTS]
    assert len({held[ENDPOINTS].version for held in (here, there, anywhere)}) == 3
    assert made[PLAIN_PROFILE.for_group_and_zone("", "c")].version == made[PLAIN_PROFILE].version


def test_an_envoy_of_one_group_has_that_under_the_names_of_the_first() -> None:
    made = build_snapshots(plan(NEAR, OLAP), GROUPS)
    own = made[PLAIN_PROFILE.for_group_and_zone("olap", "")].collections
    assert list(made[PLAIN_PROFILE].collections[CLUSTER].resources) == ["tidb", "tidb-olap"]
    assert list(made[PLAIN_PROFILE].collections[LISTENER].resources) == ["sql", "sql-olap"]
    assert (list(own[CLUSTER].resources), list(own[LISTENER].resources)) == (["tidb"], ["sql"])
    (told,) = assignments(own[ENDPOINTS])["tidb"].endpoints
    assert len(told.lb_endpoints) == 1
    unknown = made[PLAIN_PROFILE.for_group_and_zone("gone", "")]
    assert unknown.missing_group == "gone"
    assert not any(held.resources for held in unknown.collections.values())


def test_a_cluster_of_no_group_leads_nowhere() -> None:
    made = build_snapshots(plan(NEAR), GROUPS)[PLAIN_PROFILE]
    assert made.endpoints({"tidb", "tidb-olap", "of_others"}) is made.collections[ENDPOINTS]
    more = made.endpoints({"tidb", "tidb-gone"})
    assert made.endpoints({"tidb-gone"}) is more  # made once for all Envoys
    assert list(more.resources) == ["tidb", "tidb-gone", "tidb-olap"]
    (told,) = assignments(more)["tidb-gone"].endpoints
    assert not told.lb_endpoints


@pytest.mark.parametrize("name", ["tidb", "tidb-olap"])
def test_an_empty_group_is_told_as_such(name: str) -> None:
    held = build_snapshots(plan(), GROUPS)[PLAIN_PROFILE].collections[ENDPOINTS]
    assert [list(told.lb_endpoints) for told in assignments(held)[name].endpoints] == [[]]
