"""Tests which nodes are published to the Envoys of a group and a zone, and with which priorities."""

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


def node(name: str, eds_health: EdsHealth = EdsHealth.HEALTHY, **fields: Any) -> NodePlan:
    endpoint = f"10.0.0.{ord(name[0])}:4000"
    plain = NodePlan(Node(name, Source.PD), State.ACTIVE, "", 0.0, eds_health, 7, endpoint)
    return replace(plain, **fields)


def plan(*nodes: NodePlan, overloaded_zones: frozenset[tuple[str, str]] = frozenset()) -> Plan:
    return Plan({node_plan.node.address: node_plan for node_plan in nodes}, overloaded_zones=overloaded_zones)


def assignments(resource_set: ResourceSet) -> dict[str, Any]:
    """Return the `ClusterLoadAssignment` of each cluster."""
    by_cluster = {}
    for name, resource in resource_set.resources.items():
        at = resource.sotw.index(b"ClusterLoadAssignment") + len(b"ClusterLoadAssignment")
        message = endpoint_pb2.ClusterLoadAssignment()
        message.ParseFromString(_value(resource.sotw[at:]))
        assert message.cluster_name == name
        by_cluster[name] = message
    return by_cluster


def _value(rest: bytes) -> bytes:
    """Return the field `value` of a `google.protobuf.Any` without its tag and length."""
    assert rest[0] == 0x12
    at = 1
    while rest[at] & 0x80:
        at += 1
    return rest[at + 1 :]


def tiers(plan_: Plan, zone: str = "", cluster: str = "tidb", **settings: Any) -> list[dict[str, int]]:
    """Return what an Envoy in this zone gets: one dict (address -> weight) per priority."""
    all_settings = Settings.model_validate({**GROUPS.model_dump(exclude_unset=True), **settings})
    message = assignments(
        build_snapshots(plan_, all_settings)[PLAIN_PROFILE.for_group_and_zone("", zone)].resource_sets[
            ENDPOINTS
        ]
    )[cluster]
    assert [locality.priority for locality in message.endpoints] == list(range(len(message.endpoints)))
    assert message.HasField("policy") == (len(message.endpoints) > 1)
    return [
        {
            chr(
                int(endpoint.endpoint.address.socket_address.address.rpartition(".")[2])
            ): endpoint.load_balancing_weight.value
            for endpoint in locality.lb_endpoints
        }
        for locality in message.endpoints
    ]


LOCAL, REMOTE = node("a", zone="a", local_weight=9), node("b", zone="b", local_weight=8)
BACKUP, OLAP = node("c", backup=True, zone="a"), node("d", group="olap", zone="a", local_weight=5)


def test_local_nodes_come_first_and_backup_nodes_last() -> None:
    all_nodes = plan(LOCAL, REMOTE, BACKUP, OLAP)
    assert tiers(all_nodes, "a") == [{"a": 9}, {"b": 7}, {"c": 7}]
    assert tiers(all_nodes, "b") == [{"b": 8}, {"a": 7}, {"c": 7}]
    for zone in ("", "elsewhere"):
        assert tiers(all_nodes, zone) == [{"a": 7, "b": 7}, {"c": 7}]
    assert tiers(all_nodes, "a", "tidb-olap") == [{"d": 5}]
    assert tiers(all_nodes, "b", "tidb-olap") == [{"d": 7}]


def test_overloaded_zone_uses_all_nodes() -> None:
    all_nodes = plan(LOCAL, REMOTE, BACKUP, OLAP, overloaded_zones=frozenset({("", "a")}))
    assert tiers(all_nodes, "a") == tiers(all_nodes, "")
    assert tiers(all_nodes, "a", "tidb-olap") == [{"d": 5}]  # the zone is not overloaded in this group


def test_zone_without_healthy_node_uses_all_nodes() -> None:
    draining = replace(LOCAL, eds_health=EdsHealth.DRAINING, weight=0, local_weight=0)
    assert tiers(plan(draining, REMOTE, BACKUP), "a") == [{"a": 1, "b": 7}, {"c": 7}]
    # If the zone has a healthy node, its draining node has the same priority.
    another = node("e", zone="a", local_weight=3)
    assert tiers(plan(draining, another, REMOTE), "a") == [{"a": 1, "e": 3}, {"b": 7}]


def test_connection_policy_ignores_zones() -> None:
    assert tiers(plan(LOCAL, REMOTE), "a", balance={"policy": "connection"}) == [{"a": 7, "b": 7}]


def test_backup_nodes_come_first_without_other_nodes() -> None:
    assert tiers(plan(BACKUP), "a") == [{"c": 7}]
    assert tiers(plan(), "a") == [{}]


placements = st.tuples(
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["", "olap"]),
    st.booleans(),
    st.sampled_from([EdsHealth.HEALTHY, EdsHealth.UNHEALTHY, EdsHealth.DRAINING, None]),
)


@given(st.lists(placements, max_size=8), st.sampled_from(["", "a", "b"]), st.booleans())
def test_publishes_each_node_of_a_group_once(
    fleet: list[tuple[str, str, bool, EdsHealth | None]], zone: str, is_overloaded: bool
) -> None:
    nodes = [
        replace(node(chr(97 + number)), zone=node_zone, group=group, backup=backup, eds_health=eds_health)
        for number, (node_zone, group, backup, eds_health) in enumerate(fleet)
    ]
    overloaded_zones = frozenset({("", zone)}) if is_overloaded else frozenset()
    for group, cluster in (("", "tidb"), ("olap", "tidb-olap")):
        published = [
            address
            for tier in tiers(plan(*nodes, overloaded_zones=overloaded_zones), zone, cluster)
            for address in tier
        ]
        expected = [
            node_plan.node.address
            for node_plan in nodes
            if node_plan.group == group and node_plan.eds_health is not None
        ]
        assert sorted(published) == expected


# --- resources that several profiles share ---


def test_zones_share_clusters_and_listeners() -> None:
    snapshots = build_snapshots(plan(LOCAL, REMOTE), GROUPS)
    in_a, in_b, in_c = (
        snapshots[PLAIN_PROFILE.for_group_and_zone("", zone)].resource_sets for zone in ("a", "b", "c")
    )
    without_zone = snapshots[PLAIN_PROFILE].resource_sets
    assert in_a[CLUSTER] is in_b[CLUSTER] is without_zone[CLUSTER]
    assert in_a[LISTENER] is without_zone[LISTENER]
    assert in_c[ENDPOINTS] is without_zone[ENDPOINTS] is snapshots[MODULE_PROFILE].resource_sets[ENDPOINTS]
    assert len({collections[ENDPOINTS].version for collections in (in_a, in_b, without_zone)}) == 3
    assert snapshots[PLAIN_PROFILE.for_group_and_zone("", "c")].version == snapshots[PLAIN_PROFILE].version


def test_envoy_of_one_group_uses_default_names() -> None:
    snapshots = build_snapshots(plan(LOCAL, OLAP), GROUPS)
    of_olap = snapshots[PLAIN_PROFILE.for_group_and_zone("olap", "")].resource_sets
    assert list(snapshots[PLAIN_PROFILE].resource_sets[CLUSTER].resources) == ["tidb", "tidb-olap"]
    assert list(snapshots[PLAIN_PROFILE].resource_sets[LISTENER].resources) == ["sql", "sql-olap"]
    assert (list(of_olap[CLUSTER].resources), list(of_olap[LISTENER].resources)) == (["tidb"], ["sql"])
    (locality,) = assignments(of_olap[ENDPOINTS])["tidb"].endpoints
    assert len(locality.lb_endpoints) == 1
    unknown = snapshots[PLAIN_PROFILE.for_group_and_zone("gone", "")]
    assert unknown.missing_group == "gone"
    assert not any(resource_set.resources for resource_set in unknown.resource_sets.values())


def test_cluster_of_removed_group_has_no_endpoints() -> None:
    snapshots = build_snapshots(plan(LOCAL), GROUPS)[PLAIN_PROFILE]
    assert snapshots.endpoints({"tidb", "tidb-olap", "of_others"}) is snapshots.resource_sets[ENDPOINTS]
    extended = snapshots.endpoints({"tidb", "tidb-gone"})
    assert snapshots.endpoints({"tidb-gone"}) is extended  # built once for all Envoys
    assert list(extended.resources) == ["tidb", "tidb-gone", "tidb-olap"]
    (locality,) = assignments(extended)["tidb-gone"].endpoints
    assert not locality.lb_endpoints


@pytest.mark.parametrize("name", ["tidb", "tidb-olap"])
def test_empty_group_gets_empty_endpoints(name: str) -> None:
    endpoints = build_snapshots(plan(), GROUPS)[PLAIN_PROFILE].resource_sets[ENDPOINTS]
    assert [list(locality.lb_endpoints) for locality in assignments(endpoints)[name].endpoints] == [[]]
