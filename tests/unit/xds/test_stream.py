"""One Envoy's stream and the fleet's memory of it: order, fallback, versions, names."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.discovery.v3 import discovery_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.version import VERSION
from controlplane.xds.debounce import MAX_DELAY_SECONDS, QUIET_SECONDS, next_push_at
from controlplane.xds.discovery_request import BadRequest
from controlplane.xds.envoy_registry import RETENTION_SECONDS, EnvoyRegistry
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
from controlplane.xds.stream import DELTA, SOTW, Stream, StreamNack
from sandbox.live_config import read

NAMES = {ENDPOINTS: "tidb", LIVE_CONFIG: "tidevoy.live-config"}
PUBLISHED = build_snapshots(Plan(), Settings())
DEMANDING = build_snapshots(Plan(), Settings.model_validate({"tls": {"backend": {"mode": "required"}}}))


def sotw(kind: ResourceType, **fields: Any) -> bytes:
    request = discovery_pb2.DiscoveryRequest(type_url=kind.url)
    refusal = fields.pop("refusal", "")
    for name, value in fields.items():
        setattr(request, name, value)
    if refusal:
        request.error_detail.message = refusal
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


def stream(*extensions: str, wanted: FilterSetting = "auto", module: str = "") -> Stream:
    return Stream(SOTW, "10.0.0.9:5000", first("envoy-1", *extensions, module=module), wanted)


def types(of: Stream, published: SnapshotCache = PUBLISHED) -> list[str]:
    found = []
    while (data := of.next_message(published)) is not None:
        found.append(discovery_pb2.DiscoveryResponse.FromString(data).type_url)
    return found


class EnvoySide:
    """The Envoy of a stream: takes or refuses what it is sent, and keeps what it took."""

    def __init__(self, published: SnapshotCache = PUBLISHED, **build: Any) -> None:
        self.stream = stream(**build)
        self.published = published
        self.sent: dict[ResourceType, Any] = {}
        self.has: dict[ResourceType, str] = {}

    def ask(self, kind: ResourceType) -> None:
        self.stream.receive(sotw(kind, version_info=self.has.get(kind, "")))

    def get(self) -> list[str]:
        """The types of the next messages; each stays unanswered."""
        nouns = []
        while (data := self.stream.next_message(self.published)) is not None:
            message = discovery_pb2.DiscoveryResponse.FromString(data)
            kind = RESOURCE_TYPES_BY_URL[message.type_url]
            self.sent[kind] = message
            nouns.append(kind.display_name)
        return nouns

    def take(self, kind: ResourceType) -> None:
        self.has[kind] = self.sent[kind].version_info
        self.stream.receive(sotw(kind, version_info=self.has[kind], response_nonce=self.sent[kind].nonce))

    def refuse(self, kind: ResourceType) -> StreamNack:
        version = self.has.get(kind, "")
        refusal = self.stream.receive(
            sotw(kind, version_info=version, response_nonce=self.sent[kind].nonce, refusal="no such module")
        )
        assert refusal is not None
        return refusal

    def has_all_of(self, envoy_class: EnvoyProfile) -> bool:
        collections = self.published[envoy_class].collections
        return all(self.has.get(kind) == collections[kind].version for kind in (CLUSTER, LISTENER))


def with_cluster(published: SnapshotCache = PUBLISHED, **build: Any) -> EnvoySide:
    """An Envoy that has taken its cluster."""
    envoy = EnvoySide(published, **build)
    assert envoy.get() == ["cluster"]
    envoy.take(CLUSTER)
    return envoy


def test_clusters_come_before_endpoints_and_those_before_listeners() -> None:
    one = stream()
    one.receive(sotw(LISTENER))
    one.receive(sotw(ENDPOINTS))
    assert types(one) == [CLUSTER.url, ENDPOINTS.url]
    one.receive(sotw(CLUSTER, response_nonce="1"))
    assert types(one) == [LISTENER.url]


def up_to_date() -> EnvoySide:
    """An Envoy with the module that has taken everything."""
    envoy = with_cluster(module=VERSION)
    for kind in (ENDPOINTS, LISTENER, LIVE_CONFIG):
        envoy.ask(kind)
        assert envoy.get() == [kind.display_name]
        envoy.take(kind)
    return envoy


def drained() -> SnapshotCache:
    node = Node("10.0.0.1:4000", Source.STATIC)
    left = NodePlan(node, State.DRAINING, "", 0.0, EdsHealth.DRAINING, 0, node.address)
    return build_snapshots(Plan({node.address: left}), Settings())


def test_an_envoy_with_the_module_follows_when_it_has_taken_endpoints_and_live_configuration() -> None:
    envoy = up_to_date()
    assert envoy.stream.eds_acked(PUBLISHED)
    assert envoy.stream.acked_version(PUBLISHED) == PUBLISHED[MODULE_PROFILE].version
    envoy.published = drained()
    assert not envoy.stream.eds_acked(envoy.published)
    assert envoy.get() == ["endpoints", "live configuration"]
    envoy.take(ENDPOINTS)
    assert not envoy.stream.eds_acked(envoy.published)
    assert envoy.stream.acked_version(envoy.published) == PUBLISHED[MODULE_PROFILE].version
    envoy.take(LIVE_CONFIG)
    assert envoy.stream.eds_acked(envoy.published)
    assert envoy.stream.acked_version(envoy.published) == envoy.published[MODULE_PROFILE].version


def test_a_refused_live_configuration_is_reported_and_changes_neither_class_nor_listener() -> None:
    envoy = up_to_date()
    envoy.published = drained()
    envoy.get()
    envoy.take(ENDPOINTS)
    refusal = envoy.refuse(LIVE_CONFIG)
    assert (refusal.kind, refusal.message, refusal.fallback) == (LIVE_CONFIG, "no such module", None)
    assert envoy.get() == []
    assert not envoy.stream.eds_acked(envoy.published)
    assert envoy.stream.active_filter(envoy.published) == "module"


def test_a_live_configuration_that_may_have_been_refused_before_is_not_sent_as_the_same_bytes() -> None:
    """Envoy would acknowledge those without reading them."""
    plan = drained()

    def bodies(version_info: str) -> set[bytes]:
        found = set()
        for _ in range(3):  # streams of control planes that know nothing of each other
            one = Stream(SOTW, "10.0.0.9:5000", first(module=VERSION), "auto")
            one.receive(sotw(LIVE_CONFIG, version_info=version_info))
            data = one.next_message(plan)
            while data is not None and LIVE_CONFIG.url.encode() not in data:
                data = one.next_message(plan)
            live = discovery_pb2.DiscoveryResponse.FromString(data or b"")
            assert live.version_info == plan[MODULE_PROFILE].collections[LIVE_CONFIG].version
            (resource,) = live.resources
            assert [each["state"] for each in read(resource.value)["nodes"]] == ["draining"]
            found.add(resource.value)
        return found

    assert len(bodies("")) == 3
    assert len(bodies("of another plan")) == 3
    assert len(bodies(plan[MODULE_PROFILE].collections[LIVE_CONFIG].version)) == 1


def test_an_envoy_that_still_has_the_module_gets_changes_of_nodes_after_the_filter_was_switched_off() -> None:
    envoy = up_to_date()
    envoy.stream.set_filter("none")
    envoy.published = drained()
    assert envoy.get() == ["endpoints", "live configuration"]


def test_changed_limits_reach_an_envoy_that_has_its_listener() -> None:
    envoy = up_to_date()
    envoy.published = build_snapshots(Plan(), Settings.model_validate({"sql": {"login_timeout": 3}}))
    assert envoy.get() == ["live configuration"]
    assert envoy.stream.stale_resources(envoy.published) == ()


def test_nothing_is_said_before_something_was_published() -> None:
    one = stream()
    nothing = SnapshotCache()
    assert one.next_message(nothing) is None
    assert (one.acked_version(nothing), one.published_version(nothing), one.stale_resources(nothing)) == (
        "",
        "",
        (),
    )


def test_a_snapshot_is_acknowledged_when_every_type_is() -> None:
    one = stream()
    one.receive(sotw(ENDPOINTS))
    types(one)
    snapshot = PUBLISHED[PLAIN_PROFILE]
    assert one.acked_version(PUBLISHED) == ""
    for kind in (ENDPOINTS, CLUSTER):
        assert one.acked_version(PUBLISHED) == ""
        version = snapshot.collections[kind].version
        one.receive(sotw(kind, response_nonce="1", version_info=version))
    assert one.acked_version(PUBLISHED) == snapshot.version
    node = Node("10.0.0.1:4000", Source.STATIC)
    served = NodePlan(node, State.ACTIVE, "", 0.0, EdsHealth.HEALTHY, 1, node.address)
    later = build_snapshots(Plan(nodes={node.address: served}), Settings())
    assert one.acked_version(later) == snapshot.version
    assert one.published_version(later) == later[PLAIN_PROFILE].version


def test_an_envoy_follows_when_it_has_acknowledged_the_endpoints() -> None:
    one = stream()
    assert not one.eds_acked(SnapshotCache())  # it may route by what another control plane told it
    assert one.eds_acked(PUBLISHED)  # it has no cluster, so no session goes anywhere
    returning = discovery_pb2.DiscoveryRequest.FromString(first("back"))
    returning.version_info = "from before"
    back = Stream(SOTW, "10.9.9.9:1", returning.SerializeToString(), "auto")
    assert not back.eds_acked(PUBLISHED)


@pytest.mark.parametrize(
    ("wanted", "extensions", "expected"),
    [("auto", (), "none"), ("auto", (CONTRIB_FILTER,), "contrib"), ("none", (CONTRIB_FILTER,), "none")],
)
def test_the_filter_follows_what_the_envoy_has(
    wanted: FilterSetting, extensions: tuple[str, ...], expected: str
) -> None:
    assert stream(*extensions, wanted=wanted).active_filter(PUBLISHED) == expected


def test_what_was_refused_is_not_tried_again() -> None:
    envoy = EnvoySide(wanted="contrib")
    envoy.ask(LISTENER)
    assert envoy.get() == ["cluster"]
    envoy.take(CLUSTER)
    assert envoy.get() == ["listener"]
    assert envoy.refuse(LISTENER).fallback == PLAIN_PROFILE
    assert envoy.get() == ["listener"]
    envoy.stream.set_filter("contrib")  # nor does a reload bring it back
    assert envoy.refuse(LISTENER).fallback is None
    assert envoy.get() == []


@pytest.mark.parametrize("extensions", [(), (CONTRIB_FILTER,)])
def test_a_refused_cluster_falls_back_before_any_listener(extensions: tuple[str, ...]) -> None:
    envoy = EnvoySide(module=VERSION)
    envoy.stream = stream(*extensions, module=VERSION)
    assert envoy.get() == ["cluster"]
    refusal = envoy.refuse(CLUSTER)
    simpler = "contrib" if extensions else "none"
    assert refusal.fallback is not None
    assert (refusal.fallback.filter, refusal.message) == (simpler, "no such module")
    envoy.ask(LISTENER)
    assert envoy.get() == ["cluster"]
    envoy.take(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.take(LISTENER)
    assert envoy.has_all_of(refusal.fallback)
    assert envoy.stream.active_filter(PUBLISHED) == simpler
    assert envoy.stream.problem(PUBLISHED).startswith("it refused Tidevoy's module")


def test_a_refused_listener_takes_the_cluster_of_its_class_with_it() -> None:
    envoy = with_cluster(module=VERSION)
    for kind in (ENDPOINTS, LISTENER):
        envoy.ask(kind)
    assert envoy.get() == ["endpoints", "listener"]
    envoy.take(ENDPOINTS)
    assert envoy.refuse(LISTENER).fallback == PLAIN_PROFILE
    assert envoy.get() == ["cluster"]  # no session is on the one that it has
    envoy.ask(ENDPOINTS)
    envoy.take(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.take(LISTENER)
    assert envoy.has_all_of(PLAIN_PROFILE)


def test_a_cluster_is_not_changed_before_it_is_known_that_there_is_no_listener() -> None:
    envoy = EnvoySide(module=VERSION)
    envoy.has = {CLUSTER: "from before", LISTENER: "from before"}
    returning = discovery_pb2.DiscoveryRequest.FromString(first(module=VERSION))
    returning.version_info = "from before"
    envoy.stream = Stream(SOTW, "10.9.9.9:1", returning.SerializeToString(), "auto")
    assert envoy.get() == []
    envoy.ask(LISTENER)
    assert envoy.get() == []
    assert envoy.stream.stale_resources(PUBLISHED) == ("cluster", "listener")


def test_groups_come_one_by_one_when_the_first_listener_is_held_each_after_its_cluster() -> None:
    names = ("a", "b")
    groups = [{"name": n, "listen": f"0.0.0.0:{7000 + ord(n)}", "labels": {"use": n}} for n in names]
    envoy = with_cluster(build_snapshots(Plan(), Settings.model_validate({"groups": groups})), module=VERSION)
    envoy.ask(LISTENER)
    told = []
    while nouns := envoy.get():
        for kind in (CLUSTER, LISTENER):
            if kind.display_name in nouns:
                told.append((kind.display_name, len(envoy.sent[kind].resources)))
                envoy.take(kind)
    assert told == [("listener", 1), ("cluster", 2), ("cluster", 3), ("listener", 2), ("listener", 3)]
    assert envoy.has_all_of(MODULE_PROFILE)
    assert envoy.stream.acked_version(envoy.published) == envoy.published[MODULE_PROFILE].version
    assert envoy.stream.stale_resources(envoy.published) == ()


def test_another_filter_reaches_only_who_has_no_listener() -> None:
    holder, waiting = with_cluster(module=VERSION), with_cluster(module=VERSION)
    for envoy in (holder, waiting):
        envoy.ask(LISTENER)
    assert holder.get() == ["listener"]
    holder.take(LISTENER)
    for envoy in (holder, waiting):
        envoy.stream.set_filter("none")
    assert (holder.get(), waiting.get()) == ([], ["cluster"])
    assert (holder.stream.active_filter(PUBLISHED), holder.stream.stale_resources(PUBLISHED)) == (
        "module",
        ("cluster", "listener"),
    )
    waiting.take(CLUSTER)
    assert waiting.get() == ["listener"]
    waiting.take(LISTENER)
    assert (waiting.stream.active_filter(PUBLISHED), waiting.stream.stale_resources(PUBLISHED)) == (
        "none",
        (),
    )
    assert waiting.has_all_of(PLAIN_PROFILE)


def test_a_module_that_does_not_fit_is_not_used_and_told() -> None:
    one = stream(CONTRIB_FILTER, module="99.0.0")
    assert one.active_filter(PUBLISHED) == "contrib"
    assert one.problem(PUBLISHED).startswith("its module is version 99.0.0 and this control plane needs ")
    one.set_filter("none")
    assert one.problem(PUBLISHED) == ""  # nobody wants it
    assert stream(module=VERSION).problem(PUBLISHED) == ""
    assert stream().problem(PUBLISHED) == ""


@pytest.mark.parametrize("build", [{}, {"module": "99.0.0"}, {"module": VERSION}])
def test_where_tls_is_demanded_only_the_module_gets_a_listener(build: dict[str, str]) -> None:
    envoy = EnvoySide(DEMANDING, **build)
    envoy.get()
    if build.get("module") == VERSION:
        envoy.refuse(CLUSTER)
        envoy.get()
    envoy.take(CLUSTER)
    envoy.ask(LISTENER)
    assert envoy.get() == []
    assert envoy.stream.acked_version(DEMANDING) == ""
    problem = envoy.stream.problem(DEMANDING)
    assert problem.startswith("it gets no listener, because tls.backend.mode is set to required and it")
    envoy.published = PUBLISHED  # the demand is taken back
    if build.get("module") == VERSION:
        assert envoy.get() == ["cluster"]  # the module's is another now, so it gets a chance
        envoy.refuse(CLUSTER)
        assert envoy.get() == ["cluster", "listener"]  # it may have taken a part of what it refused
    else:
        assert envoy.get() == ["listener"]
    envoy.take(LISTENER)
    assert envoy.has_all_of(PLAIN_PROFILE)
    assert "listener" not in envoy.stream.problem(PUBLISHED)


def test_a_reload_that_changes_what_was_refused_makes_the_module_possible_again() -> None:
    tls = {"client": {"mode": "required", "cert": "/wrong.pem", "key": "/k.pem"}}
    envoy = with_cluster(build_snapshots(Plan(), Settings.model_validate({"tls": tls})), module=VERSION)
    envoy.ask(LISTENER)
    envoy.get()
    assert envoy.refuse(LISTENER).fallback == PLAIN_PROFILE
    assert envoy.get() == ["cluster"]
    envoy.take(CLUSTER)
    assert envoy.get() == []
    assert "no listener" in envoy.stream.problem(envoy.published)
    tls["client"]["cert"] = "/right.pem"
    envoy.published = build_snapshots(Plan(), Settings.model_validate({"tls": tls}))
    assert envoy.get() == ["cluster"]
    envoy.take(CLUSTER)
    assert envoy.get() == ["listener"]
    envoy.take(LISTENER)
    assert envoy.has_all_of(MODULE_PROFILE)
    assert envoy.stream.problem(envoy.published) == ""


def test_where_tls_is_demanded_the_module_serves() -> None:
    envoy = with_cluster(DEMANDING, module=VERSION)
    envoy.ask(LISTENER)
    assert envoy.get() == ["listener"]
    envoy.take(LISTENER)
    assert envoy.has_all_of(MODULE_PROFILE)
    assert (envoy.stream.active_filter(DEMANDING), envoy.stream.problem(DEMANDING)) == ("module", "")


@pytest.mark.parametrize("module", ["", VERSION])
def test_an_envoy_that_serves_without_a_later_demand_is_told_of(module: str) -> None:
    envoy = with_cluster(module=module)
    envoy.ask(LISTENER)
    envoy.get()
    envoy.take(LISTENER)
    envoy.published = DEMANDING
    assert envoy.get() == []
    problem = envoy.stream.problem(DEMANDING)
    assert problem.startswith("it serves on with older settings, although tls.backend.mode is set")
    assert ("--module" in problem) == (module == "")
    assert envoy.stream.active_filter(PUBLISHED) == ("module" if module else "none")


@pytest.mark.parametrize("dialect", [SOTW, DELTA])
def test_a_stream_needs_a_name(dialect: Any) -> None:
    for data in (b"", first("")):
        with pytest.raises(BadRequest, match=r"node\.id|DeltaDiscoveryRequest"):
            Stream(dialect, "10.0.0.9:5000", data, "auto")


def test_an_envoy_is_remembered_for_ten_minutes() -> None:
    now = 1000.0
    events: list[str] = []
    fleet = EnvoyRegistry(lambda: now, lambda kind, subject, message: events.append(kind))
    one = stream()
    fleet.add_stream(one)
    now += 5000
    (status,) = fleet.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen, status.version) == (1000.0, 6000.0, "1.40.0")
    fleet.remove_stream(one)
    now += RETENTION_SECONDS
    (status,) = fleet.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen) == (None, 6000.0)
    now += 1
    assert fleet.statuses(PUBLISHED) == []
    assert events == ["envoy.connected", "envoy.disconnected"]


def test_a_problem_is_told_once() -> None:
    told: list[tuple[str, str]] = []
    fleet = EnvoyRegistry(lambda: 0.0, lambda kind, subject, message: told.append((kind, message)))
    one = stream(module="99.0.0")
    fleet.add_stream(one)
    for published in (SnapshotCache(), PUBLISHED, PUBLISHED):
        fleet.check_problem(one, published)
    (problem,) = [message for kind, message in told if kind == "envoy.problem"]
    assert "99.0.0" in problem
    (status,) = fleet.statuses(PUBLISHED)
    assert (status.filter, status.module_version, status.problem) == ("none", "99.0.0", problem)


@pytest.mark.parametrize(
    ("last_push", "first_change", "latest", "expected"),
    [
        (float("-inf"), 5.0, 5.0, 5.0),  # the first of all
        (4.0, 5.0, 5.0, 5.0),  # after a quiet time
        (5.0, 5.005, 5.005, 5.025),
        (5.0, 5.005, 5.020, 5.040),
        (5.0, 5.005, 5.200, 5.205),  # a burst without end
    ],
)
def test_when_changes_are_pushed(
    last_push: float, first_change: float, latest: float, expected: float
) -> None:
    assert next_push_at(last_push, first_change, latest) == pytest.approx(expected)


@given(st.lists(st.floats(min_value=0, max_value=0.3), min_size=1, max_size=200))
def test_no_change_waits_longer_than_the_limit(gaps: list[float]) -> None:
    now, last_push, first_change, at = 0.0, float("-inf"), None, float("inf")
    for gap in gaps:
        now += gap
        if first_change is not None and at <= now:
            assert at - first_change <= MAX_DELAY_SECONDS + 1e-9
            assert at - last_push >= QUIET_SECONDS - 1e-9
            last_push, first_change = at, None
        first_change = now if first_change is None else first_change
        at = next_push_at(last_push, first_change, now)
