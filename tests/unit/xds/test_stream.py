"""Tests of one Envoy's stream, of the registry of Envoys, and of the time of the next push."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2

from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.version import VERSION
from controlplane.xds.discovery_request import BadRequest
from controlplane.xds.resource_type import (
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    LIVE_CONFIG,
    RESOURCE_TYPES_BY_URL,
    ResourceType,
)
from controlplane.xds.resources.profile import (
    CONTRIB_FILTER,
    MODULE_PROFILE,
    PLAIN_PROFILE,
    EnvoyProfile,
    FilterSetting,
)
from controlplane.xds.snapshot_cache import SnapshotCache, build_snapshots
from controlplane.xds.stream import Stream, StreamNack
from controlplane.xds.subscription import DeltaSubscription, SotwSubscription
from sandbox.live_config import parse_live_config

NAMES = {ENDPOINTS: "tidb", LIVE_CONFIG: "tidevoy.live-config"}
PUBLISHED = build_snapshots(Plan(), Settings())
TLS_REQUIRED = build_snapshots(Plan(), Settings.model_validate({"tls": {"backend": {"mode": "required"}}}))


def sotw(kind: ResourceType, **fields: Any) -> bytes:
    request = discovery_pb2.DiscoveryRequest(type_url=kind.url)
    error_detail = fields.pop("error_detail", "")
    for name, value in fields.items():
        setattr(request, name, value)
    if error_detail:
        request.error_detail.message = error_detail
    if kind in NAMES:
        request.resource_names.append(NAMES[kind])
    data: bytes = request.SerializeToString()
    return data


def first(
    node_id: str = "envoy-1", *extensions: str, kind: ResourceType = CLUSTER, module: str = ""
) -> bytes:
    request = discovery_pb2.DiscoveryRequest.FromString(sotw(kind))
    request.node.id = node_id
    request.node.user_agent_build_version.version.major_number = 1
    request.node.user_agent_build_version.version.minor_number = 40
    for name in extensions:
        request.node.extensions.add(name=name)
    if module:
        request.node.metadata["tidevoy.module"] = module
    data: bytes = request.SerializeToString()
    return data


def stream(*extensions: str, filter_setting: FilterSetting = "auto", module: str = "") -> Stream:
    return Stream(
        SotwSubscription, "10.0.0.9:5000", first("envoy-1", *extensions, module=module), filter_setting
    )


def types(stream_: Stream, published: SnapshotCache = PUBLISHED) -> list[str]:
    type_urls = []
    while (data := stream_.next_message(published)) is not None:
        type_urls.append(discovery_pb2.DiscoveryResponse.FromString(data).type_url)
    return type_urls


class EnvoySide:
    """The Envoy of a stream. By type, `sent` has the latest response and `has` the acknowledged version."""

    def __init__(self, published: SnapshotCache = PUBLISHED, **build: Any) -> None:
        self.stream = stream(**build)
        self.published = published
        self.sent: dict[ResourceType, Any] = {}
        self.has: dict[ResourceType, str] = {}

    def request(self, kind: ResourceType) -> None:
        self.stream.receive(sotw(kind, version_info=self.has.get(kind, "")))

    def get(self) -> list[str]:
        """Receive all messages that are due and return their types. No message is acknowledged."""
        names = []
        while (data := self.stream.next_message(self.published)) is not None:
            message = discovery_pb2.DiscoveryResponse.FromString(data)
            kind = RESOURCE_TYPES_BY_URL[message.type_url]
            self.sent[kind] = message
            names.append(kind.display_name)
        return names

    def ack(self, kind: ResourceType) -> None:
        self.has[kind] = self.sent[kind].version_info
        self.stream.receive(sotw(kind, version_info=self.has[kind], response_nonce=self.sent[kind].nonce))

    def nack(self, kind: ResourceType) -> StreamNack:
        version = self.has.get(kind, "")
        nack = self.stream.receive(
            sotw(
                kind,
                version_info=version,
                response_nonce=self.sent[kind].nonce,
                error_detail="no such module",
            )
        )
        assert nack is not None
        return nack

    def has_all_of(self, profile: EnvoyProfile) -> bool:
        collections = self.published[profile].resource_sets
        return all(self.has.get(kind) == collections[kind].version for kind in (CLUSTER, LISTENER))


def with_cluster(published: SnapshotCache = PUBLISHED, **build: Any) -> EnvoySide:
    """Return an Envoy that has acknowledged its cluster."""
    envoy = EnvoySide(published, **build)
    assert envoy.get() == ["cluster"]
    envoy.ack(CLUSTER)
    return envoy


def test_sends_clusters_then_endpoints_then_listeners() -> None:
    stream_ = stream()
    stream_.receive(sotw(LISTENER))
    stream_.receive(sotw(ENDPOINTS))
    assert types(stream_) == [CLUSTER.url, ENDPOINTS.url]
    stream_.receive(sotw(CLUSTER, response_nonce="1"))
    assert types(stream_) == [LISTENER.url]


def test_envoy_without_clusters_gets_the_listener_at_once() -> None:
    assert types(Stream(SotwSubscription, "10.0.0.9:5000", first(kind=LISTENER), "auto")) == [LISTENER.url]


def test_delta_stream_sends_endpoints_again_after_another_cluster() -> None:
    def send(kind: ResourceType, **fields: Any) -> bytes:
        data: bytes = discovery_pb2.DeltaDiscoveryRequest(type_url=kind.url, **fields).SerializeToString()
        return data

    node = {"id": "envoy-1", "metadata": {"tidevoy.module": VERSION}}
    stream_ = Stream(DeltaSubscription, "10.0.0.9:5000", send(CLUSTER, node=node), "auto")
    stream_.receive(send(ENDPOINTS, resource_names_subscribe=["tidb"]))
    for _ in range(2):
        messages = iter(lambda: stream_.next_message(PUBLISHED), None)
        cluster, endpoints = map(discovery_pb2.DeltaDiscoveryResponse.FromString, messages)
        assert (cluster.type_url, endpoints.type_url) == (CLUSTER.url, ENDPOINTS.url)
        stream_.receive(send(ENDPOINTS, response_nonce=endpoints.nonce))
        stream_.receive(send(CLUSTER, response_nonce=cluster.nonce, error_detail={"message": "no module"}))


def up_to_date() -> EnvoySide:
    """Return an Envoy with the module that has acknowledged everything."""
    envoy = with_cluster(module=VERSION)
    for kind in (ENDPOINTS, LISTENER, LIVE_CONFIG):
        envoy.request(kind)
        assert envoy.get() == [kind.display_name]
        envoy.ack(kind)
    return envoy


def snapshots_with_draining_node() -> SnapshotCache:
    node = Node("10.0.0.1:4000", Source.STATIC)
    draining = NodePlan(node, State.DRAINING, "", 0.0, EdsHealth.DRAINING, 0, node.address)
    return build_snapshots(Plan({node.address: draining}), Settings())


def test_has_acknowledged_endpoints_with_module_needs_endpoints_and_live_config() -> None:
    envoy = up_to_date()
    assert envoy.stream.has_acknowledged_endpoints(PUBLISHED)
    assert envoy.stream.acked_version(PUBLISHED) == PUBLISHED[MODULE_PROFILE].version
    envoy.published = snapshots_with_draining_node()
    assert not envoy.stream.has_acknowledged_endpoints(envoy.published)
    assert envoy.get() == ["endpoints", "live configuration"]
    envoy.ack(ENDPOINTS)
    assert not envoy.stream.has_acknowledged_endpoints(envoy.published)
    assert envoy.stream.acked_version(envoy.published) == PUBLISHED[MODULE_PROFILE].version
    envoy.ack(LIVE_CONFIG)
    assert envoy.stream.has_acknowledged_endpoints(envoy.published)
    assert envoy.stream.acked_version(envoy.published) == envoy.published[MODULE_PROFILE].version


def test_rejected_live_config_is_reported_without_fallback() -> None:
    envoy = up_to_date()
    envoy.published = snapshots_with_draining_node()
    envoy.get()
    envoy.ack(ENDPOINTS)
    nack = envoy.nack(LIVE_CONFIG)
    assert (nack.resource_type, nack.message, nack.next_profile) == (LIVE_CONFIG, "no such module", None)
    assert envoy.get() == []
    assert not envoy.stream.has_acknowledged_endpoints(envoy.published)
    assert envoy.stream.active_filter(envoy.published) == "module"


def test_reencodes_live_config_that_may_have_been_rejected() -> None:
    """If Envoy gets bytes that it has already rejected, it acknowledges them without reading them."""
    plan = snapshots_with_draining_node()

    def bodies(version_info: str) -> set[bytes]:
        values = set()
        for _ in range(3):  # as if Envoy connected to three control planes
            one = Stream(SotwSubscription, "10.0.0.9:5000", first(module=VERSION), "auto")
            one.receive(sotw(LIVE_CONFIG, version_info=version_info))
            data = one.next_message(plan)
            while data is not None and LIVE_CONFIG.url.encode() not in data:
                data = one.next_message(plan)
            live = discovery_pb2.DiscoveryResponse.FromString(data or b"")
            assert live.version_info == plan[MODULE_PROFILE].resource_sets[LIVE_CONFIG].version
            (resource,) = live.resources
            assert [node["state"] for node in parse_live_config(resource.value)["nodes"]] == ["draining"]
            values.add(resource.value)
        return values

    assert len(bodies("")) == 3
    assert len(bodies("of another plan")) == 3
    assert len(bodies(plan[MODULE_PROFILE].resource_sets[LIVE_CONFIG].version)) == 1


def test_envoy_with_module_gets_node_changes_after_filter_is_off() -> None:
    envoy = up_to_date()
    envoy.stream.set_filter("none")
    envoy.published = snapshots_with_draining_node()
    assert envoy.get() == ["endpoints", "live configuration"]


def test_changed_limits_reach_envoy_with_listener() -> None:
    envoy = up_to_date()
    envoy.published = build_snapshots(Plan(), Settings.model_validate({"sql": {"login_timeout": 3}}))
    assert envoy.get() == ["live configuration"]
    assert envoy.stream.stale_resources(envoy.published) == ()


def test_sends_nothing_before_first_publish() -> None:
    one = stream()
    unpublished = SnapshotCache()
    assert one.next_message(unpublished) is None
    assert (
        one.acked_version(unpublished),
        one.published_version(unpublished),
        one.stale_resources(unpublished),
    ) == (
        "",
        "",
        (),
    )


def test_snapshot_is_acked_when_every_type_is() -> None:
    one = stream()
    one.receive(sotw(ENDPOINTS))
    types(one)
    snapshot = PUBLISHED[PLAIN_PROFILE]
    assert one.acked_version(PUBLISHED) == ""
    for kind in (ENDPOINTS, CLUSTER):
        assert one.acked_version(PUBLISHED) == ""
        version = snapshot.resource_sets[kind].version
        one.receive(sotw(kind, response_nonce="1", version_info=version))
    assert one.acked_version(PUBLISHED) == snapshot.version
    node = Node("10.0.0.1:4000", Source.STATIC)
    served = NodePlan(node, State.ACTIVE, "", 0.0, EdsHealth.HEALTHY, 1, node.address)
    later = build_snapshots(Plan(nodes={node.address: served}), Settings())
    assert one.acked_version(later) == snapshot.version
    assert one.published_version(later) == later[PLAIN_PROFILE].version


def test_has_acknowledged_endpoints_needs_acknowledged_endpoints() -> None:
    one = stream()
    # The Envoy may use endpoints from another control plane.
    assert not one.has_acknowledged_endpoints(SnapshotCache())
    assert one.has_acknowledged_endpoints(PUBLISHED)  # the Envoy has no cluster, so it routes no sessions
    returning = discovery_pb2.DiscoveryRequest.FromString(first("back"))
    returning.version_info = "from before"
    reconnected = Stream(SotwSubscription, "10.9.9.9:1", returning.SerializeToString(), "auto")
    assert not reconnected.has_acknowledged_endpoints(PUBLISHED)


@pytest.mark.parametrize(
    ("filter_setting", "extensions", "expected"),
    [("auto", (), "none"), ("auto", (CONTRIB_FILTER,), "contrib"), ("none", (CONTRIB_FILTER,), "none")],
)
def test_filter_follows_setting_and_extensions(
    filter_setting: FilterSetting, extensions: tuple[str, ...], expected: str
) -> None:
    assert stream(*extensions, filter_setting=filter_setting).active_filter(PUBLISHED) == expected


def test_does_not_retry_rejected_profile() -> None:
    envoy = EnvoySide(filter_setting="contrib")
    envoy.request(LISTENER)
    assert envoy.get() == ["cluster"]
    envoy.ack(CLUSTER)
    assert envoy.get() == ["listener"]
    assert envoy.nack(LISTENER).next_profile == PLAIN_PROFILE
    assert envoy.get() == ["listener"]
    envoy.stream.set_filter("contrib")  # nor does a reload retry the profile
    assert envoy.nack(LISTENER).next_profile is None
    assert envoy.get() == []


@pytest.mark.parametrize("extensions", [(), (CONTRIB_FILTER,)])
def test_rejected_cluster_falls_back_before_any_listener(extensions: tuple[str, ...]) -> None:
    envoy = EnvoySide(module=VERSION)
    envoy.stream = stream(*extensions, module=VERSION)
    assert envoy.get() == ["cluster"]
    nack = envoy.nack(CLUSTER)
    simpler = "contrib" if extensions else "none"
    assert nack.next_profile is not None
    assert (nack.next_profile.filter, nack.message) == (simpler, "no such module")
    envoy.request(LISTENER)
    assert envoy.get() == ["cluster"]
    envoy.ack(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.ack(LISTENER)
    assert envoy.has_all_of(nack.next_profile)
    assert envoy.stream.active_filter(PUBLISHED) == simpler
    assert envoy.stream.problem(PUBLISHED).startswith("it rejected Tidevoy's module")


def test_rejected_listener_also_replaces_cluster() -> None:
    envoy = with_cluster(module=VERSION)
    for kind in (ENDPOINTS, LISTENER):
        envoy.request(kind)
    assert envoy.get() == ["endpoints", "listener"]
    envoy.ack(ENDPOINTS)
    assert envoy.nack(LISTENER).next_profile == PLAIN_PROFILE
    assert envoy.get() == ["cluster"]  # an Envoy without a listener may get a changed cluster
    envoy.request(ENDPOINTS)
    envoy.ack(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.ack(LISTENER)
    assert envoy.has_all_of(PLAIN_PROFILE)


def test_cluster_stays_until_listener_state_is_known() -> None:
    envoy = EnvoySide(module=VERSION)
    envoy.has = {CLUSTER: "from before", LISTENER: "from before"}
    returning = discovery_pb2.DiscoveryRequest.FromString(first(module=VERSION))
    returning.version_info = "from before"
    envoy.stream = Stream(SotwSubscription, "10.9.9.9:1", returning.SerializeToString(), "auto")
    assert envoy.get() == []
    envoy.request(LISTENER)
    assert envoy.get() == []
    assert envoy.stream.stale_resources(PUBLISHED) == ("cluster", "listener")


def test_groups_follow_one_by_one_after_first_listener() -> None:
    group_names = ("a", "b")
    groups = [
        {"name": name, "listen": f"0.0.0.0:{7000 + ord(name)}", "labels": {"use": name}}
        for name in group_names
    ]
    envoy = with_cluster(build_snapshots(Plan(), Settings.model_validate({"groups": groups})), module=VERSION)
    envoy.request(LISTENER)
    received = []
    while kinds := envoy.get():
        for kind in (CLUSTER, LISTENER):
            if kind.display_name in kinds:
                received.append((kind.display_name, len(envoy.sent[kind].resources)))
                envoy.ack(kind)
    assert received == [("listener", 1), ("cluster", 2), ("cluster", 3), ("listener", 2), ("listener", 3)]
    assert envoy.has_all_of(MODULE_PROFILE)
    assert envoy.stream.acked_version(envoy.published) == envoy.published[MODULE_PROFILE].version
    assert envoy.stream.stale_resources(envoy.published) == ()


def test_changed_filter_reaches_only_envoys_without_listener() -> None:
    holder, waiting = with_cluster(module=VERSION), with_cluster(module=VERSION)
    for envoy in (holder, waiting):
        envoy.request(LISTENER)
    assert holder.get() == ["listener"]
    holder.ack(LISTENER)
    for envoy in (holder, waiting):
        envoy.stream.set_filter("none")
    assert (holder.get(), waiting.get()) == ([], ["cluster"])
    assert (holder.stream.active_filter(PUBLISHED), holder.stream.stale_resources(PUBLISHED)) == (
        "module",
        ("cluster", "listener"),
    )
    waiting.ack(CLUSTER)
    assert waiting.get() == ["listener"]
    waiting.ack(LISTENER)
    assert (waiting.stream.active_filter(PUBLISHED), waiting.stream.stale_resources(PUBLISHED)) == (
        "none",
        (),
    )
    assert waiting.has_all_of(PLAIN_PROFILE)


def test_incompatible_module_is_not_used_and_reported() -> None:
    one = stream(CONTRIB_FILTER, module="99.0.0")
    assert one.active_filter(PUBLISHED) == "contrib"
    assert one.problem(PUBLISHED).startswith("its module is version 99.0.0 and this control plane needs ")
    one.set_filter("none")
    assert one.problem(PUBLISHED) == ""  # the setting `none` needs no module
    assert stream(module=VERSION).problem(PUBLISHED) == ""
    assert stream().problem(PUBLISHED) == ""


@pytest.mark.parametrize("build", [{}, {"module": "99.0.0"}, {"module": VERSION}])
def test_required_tls_gives_listener_only_with_module(build: dict[str, str]) -> None:
    envoy = EnvoySide(TLS_REQUIRED, **build)
    envoy.get()
    if build.get("module") == VERSION:
        envoy.nack(CLUSTER)
        envoy.get()
    envoy.ack(CLUSTER)
    envoy.request(LISTENER)
    assert envoy.get() == []
    assert envoy.stream.acked_version(TLS_REQUIRED) == ""
    problem = envoy.stream.problem(TLS_REQUIRED)
    assert problem.startswith("it gets no listener, because tls.backend.mode is set to required and it")
    envoy.published = PUBLISHED  # TLS is no longer required
    if build.get("module") == VERSION:
        assert envoy.get() == ["cluster"]  # the rejected cluster has changed, so it is retried
        envoy.nack(CLUSTER)
        # The cluster is sent again, because Envoy may have applied a part of the rejected one.
        assert envoy.get() == ["cluster", "listener"]
    else:
        assert envoy.get() == ["listener"]
    envoy.ack(LISTENER)
    assert envoy.has_all_of(PLAIN_PROFILE)
    assert "listener" not in envoy.stream.problem(PUBLISHED)


def test_reload_that_changes_rejected_listener_retries_module() -> None:
    tls = {"client": {"mode": "required", "cert": "/wrong.pem", "key": "/k.pem"}}
    envoy = with_cluster(build_snapshots(Plan(), Settings.model_validate({"tls": tls})), module=VERSION)
    envoy.request(LISTENER)
    envoy.get()
    assert envoy.nack(LISTENER).next_profile == PLAIN_PROFILE
    assert envoy.get() == ["cluster"]
    envoy.ack(CLUSTER)
    assert envoy.get() == []
    assert "no listener" in envoy.stream.problem(envoy.published)
    tls["client"]["cert"] = "/right.pem"
    envoy.published = build_snapshots(Plan(), Settings.model_validate({"tls": tls}))
    assert envoy.get() == ["cluster"]
    envoy.ack(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.ack(LISTENER)
    assert envoy.has_all_of(MODULE_PROFILE)
    assert envoy.stream.problem(envoy.published) == ""


def test_required_tls_is_served_with_module() -> None:
    envoy = with_cluster(TLS_REQUIRED, module=VERSION)
    envoy.request(LISTENER)
    assert envoy.get() == ["listener"]
    envoy.ack(LISTENER)
    assert envoy.has_all_of(MODULE_PROFILE)
    assert (envoy.stream.active_filter(TLS_REQUIRED), envoy.stream.problem(TLS_REQUIRED)) == ("module", "")


@pytest.mark.parametrize("module", ["", VERSION])
def test_reports_envoy_with_listener_from_before_required_tls(module: str) -> None:
    envoy = with_cluster(module=module)
    envoy.request(LISTENER)
    envoy.get()
    envoy.ack(LISTENER)
    envoy.published = TLS_REQUIRED
    assert envoy.get() == []
    problem = envoy.stream.problem(TLS_REQUIRED)
    assert problem.startswith("it still runs older settings, although tls.backend.mode is set")
    assert ("--module" in problem) == (module == "")
    assert envoy.stream.active_filter(PUBLISHED) == ("module" if module else "none")


@pytest.mark.parametrize("variant", [SotwSubscription, DeltaSubscription])
def test_rejects_stream_without_node_id(variant: Any) -> None:
    for data in (b"", first("")):
        with pytest.raises(BadRequest, match=r"node\.id|DeltaDiscoveryRequest"):
            Stream(variant, "10.0.0.9:5000", data, "auto")
