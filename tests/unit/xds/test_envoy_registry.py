"""The Envoys that are or were connected: how long they are known, their problems and their NACKs."""

from __future__ import annotations

from envoy.service.discovery.v3 import discovery_pb2

from controlplane.config.settings import Settings
from controlplane.model.envoys import Nack
from controlplane.model.plan import Plan
from controlplane.xds.envoy_registry import RETENTION_SECONDS, EnvoyRegistry
from controlplane.xds.resource_type import CLUSTER, LISTENER
from controlplane.xds.resources.profile import PLAIN_PROFILE
from controlplane.xds.snapshot_cache import SnapshotCache, build_snapshots
from controlplane.xds.stream import Stream, StreamNack
from controlplane.xds.subscription import SotwSubscription

PUBLISHED = build_snapshots(Plan(), Settings())


def stream(module: str = "") -> Stream:
    request = discovery_pb2.DiscoveryRequest(type_url=CLUSTER.url)
    request.node.id = "envoy-1"
    request.node.user_agent_build_version.version.major_number = 1
    request.node.user_agent_build_version.version.minor_number = 40
    if module:
        request.node.metadata["tidevoy.module"] = module
    return Stream(SotwSubscription, "10.0.0.9:5000", request.SerializeToString(), "auto")


def test_remembers_envoy_for_ten_minutes() -> None:
    now = 1000.0
    events: list[str] = []
    registry = EnvoyRegistry(lambda: now, lambda kind, subject, message: events.append(kind))
    one = stream()
    registry.add_stream(one)
    now += 5000
    (status,) = registry.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen, status.version) == (1000.0, 6000.0, "1.40.0")
    registry.remove_stream(one)
    now += RETENTION_SECONDS
    (status,) = registry.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen) == (None, 6000.0)
    now += 1
    assert registry.statuses(PUBLISHED) == []
    assert events == ["envoy.connected", "envoy.disconnected"]


def test_reports_problem_once() -> None:
    events: list[tuple[str, str]] = []
    registry = EnvoyRegistry(lambda: 0.0, lambda kind, subject, message: events.append((kind, message)))
    one = stream(module="99.0.0")
    registry.add_stream(one)
    for published in (SnapshotCache(), PUBLISHED, PUBLISHED):
        registry.check_problem(one, published)
    (problem,) = [message for kind, message in events if kind == "envoy.problem"]
    assert "99.0.0" in problem
    (status,) = registry.statuses(PUBLISHED)
    assert (status.filter, status.module_version, status.problem) == ("none", "99.0.0", problem)


def test_reports_every_nack_and_what_the_envoy_gets_instead() -> None:
    events: list[tuple[str, str]] = []
    registry = EnvoyRegistry(lambda: 5.0, lambda kind, subject, message: events.append((kind, message)))
    one = stream()
    registry.add_stream(one)
    registry.record_nack(one, StreamNack(CLUSTER, "v1", "no module", PLAIN_PROFILE))
    registry.record_nack(one, StreamNack(LISTENER, "v2", "no port"))
    assert events[1:] == [
        ("envoy.nack", "rejected the cluster of version v1: no module"),
        ("envoy.filter_fallback", "rejected its first cluster, so it gets one with filter: none"),
        ("envoy.nack", "rejected the listener of version v2: no port"),
    ]
    (status,) = registry.statuses(PUBLISHED)
    assert (status.last_nack, status.nacks) == (Nack(5.0, LISTENER.url, "v2", "no port"), 2)


def test_envoy_is_connected_while_one_of_its_streams_is_open() -> None:
    events: list[str] = []
    registry = EnvoyRegistry(lambda: 5.0, lambda kind, subject, message: events.append(kind))
    old, new = stream(), stream("99.0.0")
    registry.add_stream(old)
    registry.add_stream(new)
    (status,) = registry.statuses(PUBLISHED)
    assert (status.streams, status.module_version) == (2, "99.0.0")
    registry.check_problem(old, PUBLISHED)  # only the newest stream counts
    registry.remove_stream(new)
    (status,) = registry.statuses(PUBLISHED)
    assert (status.streams, status.module_version, status.connected_since) == (1, "", 5.0)
    assert events == ["envoy.connected", "envoy.duplicate"]
