"""Tests that equal content has the same version in any process, and that profiles share resources."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2

from controlplane.config.settings import Settings
from controlplane.model.capture import Capture
from controlplane.model.module_switches import SwitchOverrides
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.xds.resource_set import build_resource_set, make_resource, structures_of
from controlplane.xds.resource_type import CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG, PUSH_ORDER
from controlplane.xds.resources.profile import (
    CAPTURE_FEATURE,
    CONTRIB_PROFILE,
    MODULE_FEATURES,
    MODULE_PROFILE,
    PLAIN_PROFILE,
)
from controlplane.xds.snapshot_cache import StaticResources, build_snapshots


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


def test_versions_do_not_depend_on_process_or_order() -> None:
    version = build_snapshots(plan(3, 4), Settings())[CONTRIB_PROFILE].version
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", _PRINT_VERSION],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        )
        assert process.stdout.strip() == version


def test_changes_only_the_version_of_the_changed_type() -> None:
    settings = Settings()
    original = build_snapshots(plan(3, 4), settings)[PLAIN_PROFILE]
    cases = {
        ENDPOINTS: build_snapshots(plan(3, 5), settings)[PLAIN_PROFILE],
        CLUSTER: build_snapshots(plan(3, 4), Settings.model_validate({"backend": {"connect_timeout": 2}}))[
            PLAIN_PROFILE
        ],
        LISTENER: build_snapshots(plan(3, 4), settings)[CONTRIB_PROFILE],
    }
    for changed, other in cases.items():
        assert other.version != original.version
        for kind in PUSH_ORDER:
            is_same = other.resource_sets[kind].version == original.resource_sets[kind].version
            assert is_same is (kind is not changed), (changed, kind)


def test_reasons_and_times_do_not_change_snapshots() -> None:
    first = plan(3)
    (node,) = first.nodes.values()
    other = NodePlan(
        node.node, node.state, "another reason", 9.0, node.eds_health, node.weight, node.endpoint, 7.0
    )
    snapshots = build_snapshots(Plan(nodes={other.node.address: other}), Settings())
    assert build_snapshots(first, Settings())[PLAIN_PROFILE] == snapshots[PLAIN_PROFILE]


def test_profiles_share_common_resources() -> None:
    snapshots = build_snapshots(plan(3), Settings())
    module, contrib, plain = (
        snapshots[profile].resource_sets for profile in (MODULE_PROFILE, CONTRIB_PROFILE, PLAIN_PROFILE)
    )
    assert module[ENDPOINTS] is contrib[ENDPOINTS] is plain[ENDPOINTS]
    assert contrib[CLUSTER] == plain[CLUSTER] != module[CLUSTER]


def test_resource_set_body_is_response_without_nonce() -> None:
    bodies = {
        name: any_pb2.Any(type_url=name, value=name.encode()).SerializeToString() for name in ("b", "a", "c")
    }
    collection = build_resource_set(CLUSTER, starmap(make_resource, bodies.items()))
    whole = discovery_pb2.DiscoveryResponse.FromString(collection.sotw_body(None))
    assert (whole.version_info, whole.type_url) == (collection.version, CLUSTER.url)
    assert [resource.type_url for resource in whole.resources] == ["a", "b", "c"]
    assert collection.sotw_body(frozenset(bodies)) is collection.body
    part = discovery_pb2.DiscoveryResponse.FromString(collection.sotw_body(frozenset({"c", "x"})))
    assert [resource.type_url for resource in part.resources] == ["c"]


def test_delta_entry_has_name_version_and_resource() -> None:
    body = any_pb2.Any(type_url="t", value=b"v").SerializeToString()
    entry = make_resource("a", body)
    (parsed,) = discovery_pb2.DeltaDiscoveryResponse.FromString(entry.delta).resources
    assert (parsed.name, parsed.version, parsed.resource.value) == ("a", entry.version, b"v")
    changed = make_resource("a", body + b"\x12\x01w")
    assert changed.version != entry.version


def test_only_envoys_with_other_switches_get_another_live_config() -> None:
    overrides = {"one": SwitchOverrides(offload=False), "two": SwitchOverrides(offload=False)}
    snapshots = build_snapshots(replace(plan(3), switch_overrides=overrides), Settings())
    profiles = {
        envoy: snapshots.profile_of(MODULE_PROFILE, envoy) for envoy in ("one", "two", "other", "another")
    }
    assert profiles["other"] is profiles["another"] is MODULE_PROFILE
    assert profiles["one"] == profiles["two"] != MODULE_PROFILE
    overridden, other = snapshots[profiles["one"]], snapshots[MODULE_PROFILE]
    assert snapshots[profiles["two"]] is overridden
    assert overridden.version != other.version
    for kind in PUSH_ORDER:
        is_same = overridden.resource_sets[kind] is other.resource_sets[kind]
        assert is_same is (kind is not LIVE_CONFIG), kind


def test_only_modules_that_capture_get_the_capture_each_with_its_id() -> None:
    capture = Capture("one", 1.0, 1795818422.125, ("e1", "e2"), ("app",), ("g",))
    settings = Settings.model_validate({"capture": {"directory": "/captures", "max_bytes": 5}})
    snapshots = build_snapshots(replace(plan(3), capture=capture), settings)
    able = replace(MODULE_PROFILE, features=frozenset(MODULE_FEATURES))
    older = replace(able, features=able.features - {CAPTURE_FEATURE})
    assert snapshots.profile_of(able, "e3") is able
    assert snapshots.profile_of(older, "e1") is older
    resource_sets = {e: snapshots[snapshots.profile_of(able, e)].resource_sets for e in ("e1", "e2", "e3")}
    expected = (
        b'"capture": {"name": "one", "directory": "/captures", "until": 1795818422.125, "users": ["app"],'
        b' "groups": ["g"], "max_bytes": 5, "envoy": "%s"}'
    )
    for envoy in ("e1", "e2"):
        assert expected % envoy.encode() in resource_sets[envoy][LIVE_CONFIG].body
    assert b'"capture"' not in resource_sets["e3"][LIVE_CONFIG].body
    for kind in set(PUSH_ORDER) - {LIVE_CONFIG}:
        assert resource_sets["e1"][kind] is resource_sets["e2"][kind] is resource_sets["e3"][kind]
    off = build_snapshots(replace(plan(3), capture=capture), Settings())
    assert b'"capture"' not in off[off.profile_of(able, "e1")].resource_sets[LIVE_CONFIG].body


def listener_structures(static_resources: StaticResources) -> frozenset[str]:
    _, listeners = static_resources.for_profile(CONTRIB_PROFILE)
    return structures_of(listeners.versions.values())


def test_changed_settings_are_those_since_an_envoy_got_its_listeners() -> None:
    def with_changes(before: StaticResources, **sql: Any) -> StaticResources:
        settings = before.settings.model_copy(update={"sql": before.settings.sql.model_copy(update=sql)})
        return StaticResources(settings, previous=before)

    at_first = StaticResources(Settings())
    logged = with_changes(at_first, access_log=Path("/var/log/sessions"))
    unchanged = with_changes(logged)
    latest = with_changes(unchanged, idle_timeout=9.0)
    assert latest.changed_settings(CONTRIB_PROFILE, listener_structures(at_first)) == (
        "sql.access_log",
        "sql.idle_timeout",
    )
    assert latest.changed_settings(CONTRIB_PROFILE, listener_structures(logged)) == ("sql.idle_timeout",)
    assert latest.changed_settings(CONTRIB_PROFILE, frozenset({"of an unknown build"})) == ()
    # An Envoy that applies `sql.idle_timeout` while it runs needs no restart for it.
    live = replace(MODULE_PROFILE, features=frozenset(MODULE_FEATURES))
    structures = structures_of(at_first.for_profile(live)[1].versions.values())
    assert latest.changed_settings(live, structures) == ("sql.access_log",)
    for number in range(1000):
        latest = with_changes(latest, idle_timeout=10.0 + number)
    assert latest.changed_settings(CONTRIB_PROFILE, listener_structures(at_first)) == ()
