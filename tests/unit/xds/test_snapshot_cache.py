"""Versions name content: the same in every process, another when anything differs, and shared as bytes."""

from __future__ import annotations

import subprocess
import sys

from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2

from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.xds.resource_set import resource_set_from_bodies
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, PUSH_ORDER
from controlplane.xds.resources.profile import CONTRIB_PROFILE, MODULE_PROFILE, PLAIN_PROFILE
from controlplane.xds.snapshot_cache import build_snapshots


def plan(*weights: int) -> Plan:
    nodes = {}
    for index, weight in enumerate(weights):
        address = f"tidb-{index}:4000"
        node = Node(address, Source.PD)
        nodes[address] = NodePlan(
            node, State.ACTIVE, "", 0.0, EdsHealth.HEALTHY, weight, f"10.0.0.{index + 1}:4000"
        )
    return Plan(nodes=nodes)


_PRINT_VERSION = """
from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.xds.resources.profile import CONTRIB_PROFILE
from controlplane.xds.snapshot_cache import build_snapshots
nodes = {
    name: NodePlan(Node(name, Source.PD), State.ACTIVE, "", 0.0, EdsHealth.HEALTHY, weight, endpoint)
    for name, weight, endpoint in (
        ("tidb-1:4000", 4, "10.0.0.2:4000"),
        ("tidb-0:4000", 3, "10.0.0.1:4000"),
    )
}
print(build_snapshots(Plan(nodes=nodes), Settings())[CONTRIB_PROFILE].version)
"""


def test_versions_are_the_same_in_any_process_and_order() -> None:
    here = build_snapshots(plan(3, 4), Settings())[CONTRIB_PROFILE].version
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", _PRINT_VERSION],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        )
        assert there.stdout.strip() == here


def test_only_what_differs_gets_another_version() -> None:
    settings = Settings()
    base = build_snapshots(plan(3, 4), settings)[PLAIN_PROFILE]
    cases = {
        ENDPOINTS: build_snapshots(plan(3, 5), settings)[PLAIN_PROFILE],
        CLUSTER: build_snapshots(plan(3, 4), Settings.model_validate({"backend": {"connect_timeout": 2}}))[
            PLAIN_PROFILE
        ],
        LISTENER: build_snapshots(plan(3, 4), settings)[CONTRIB_PROFILE],
    }
    for changed, other in cases.items():
        assert other.version != base.version
        for kind in PUSH_ORDER:
            same = other.collections[kind].version == base.collections[kind].version
            assert same is (kind is not changed), (changed, kind)


def test_reasons_and_times_are_not_published() -> None:
    first = plan(3)
    (node,) = first.nodes.values()
    other = NodePlan(
        node.node, node.state, "told otherwise", 9.0, node.eds_health, node.weight, node.endpoint, 7.0
    )
    told = build_snapshots(Plan(nodes={other.node.address: other}), Settings())
    assert build_snapshots(first, Settings())[PLAIN_PROFILE] == told[PLAIN_PROFILE]


def test_classes_share_what_does_not_depend_on_them() -> None:
    made = build_snapshots(plan(3), Settings())
    module, contrib, plain = (
        made[each].collections for each in (MODULE_PROFILE, CONTRIB_PROFILE, PLAIN_PROFILE)
    )
    assert module[ENDPOINTS] is contrib[ENDPOINTS] is plain[ENDPOINTS]
    assert contrib[CLUSTER] == plain[CLUSTER] != module[CLUSTER]


def test_a_collection_is_a_response_but_for_its_nonce() -> None:
    bodies = {
        name: any_pb2.Any(type_url=name, value=name.encode()).SerializeToString() for name in ("b", "a", "c")
    }
    collection = resource_set_from_bodies(CLUSTER, bodies)
    whole = discovery_pb2.DiscoveryResponse.FromString(collection.sotw_body(None))
    assert (whole.version_info, whole.type_url) == (collection.version, CLUSTER.url)
    assert [each.type_url for each in whole.resources] == ["a", "b", "c"]
    assert collection.sotw_body(frozenset(bodies)) is collection.body
    part = discovery_pb2.DiscoveryResponse.FromString(collection.sotw_body(frozenset({"c", "x"})))
    assert [each.type_url for each in part.resources] == ["c"]


def test_a_delta_entry_holds_name_version_and_resource() -> None:
    body = any_pb2.Any(type_url="t", value=b"v").SerializeToString()
    (entry,) = resource_set_from_bodies(CLUSTER, {"a": body}).resources.values()
    (parsed,) = discovery_pb2.DeltaDiscoveryResponse.FromString(entry.delta).resources
    assert (parsed.name, parsed.version, parsed.resource.value) == ("a", entry.version, b"v")
    (changed,) = resource_set_from_bodies(CLUSTER, {"a": body + b"\x12\x01w"}).resources.values()
    assert changed.version != entry.version
