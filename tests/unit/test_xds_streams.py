"""One Envoy's stream and the fleet's memory of it: order, fallback, versions, names."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from envoy.service.discovery.v3 import discovery_pb2
from hypothesis import given
from hypothesis import strategies as st

from controlplane.config import Settings
from controlplane.model import Advice, Node, NodePlan, Plan, Source, State
from controlplane.publish.bootstrap import ControlPlaneTls, render
from controlplane.publish.debounce import GATHER, LATEST, due
from controlplane.publish.envoy_class import CONTRIB_FILTER, PLAIN
from controlplane.publish.fleet import MEMORY, Fleet
from controlplane.publish.request import BadRequest
from controlplane.publish.resource_type import CLUSTER, ENDPOINTS, LISTENER, ResourceType
from controlplane.publish.snapshot import snapshots
from controlplane.publish.streams import DELTA, SOTW, Filter, Stream

PUBLISHED = snapshots(Plan(), Settings())


def sotw(kind: ResourceType, **fields: Any) -> bytes:
    request = discovery_pb2.DiscoveryRequest(type_url=kind.url)
    refusal = fields.pop("refusal", "")
    for name, value in fields.items():
        setattr(request, name, value)
    if refusal:
        request.error_detail.message = refusal
    if kind is ENDPOINTS:
        request.resource_names.append("tidb")
    data: bytes = request.SerializeToString()
    return data


def first(node_id: str = "envoy-1", *extensions: str, kind: ResourceType = CLUSTER) -> bytes:
    request = discovery_pb2.DiscoveryRequest.FromString(sotw(kind))
    request.node.id = node_id
    request.node.user_agent_build_version.version.major_number = 1
    request.node.user_agent_build_version.version.minor_number = 40
    for name in extensions:
        request.node.extensions.add(name=name)
    data: bytes = request.SerializeToString()
    return data


def stream(*extensions: str, wanted: Filter = "auto") -> Stream:
    return Stream(SOTW, "10.0.0.9:5000", first("envoy-1", *extensions), wanted)


def types(of: Stream) -> list[str]:
    found = []
    while (data := of.next(PUBLISHED)) is not None:
        found.append(discovery_pb2.DiscoveryResponse.FromString(data).type_url)
    return found


def test_clusters_come_before_endpoints_and_those_before_listeners() -> None:
    one = stream()
    one.feed(sotw(LISTENER))
    one.feed(sotw(ENDPOINTS))
    assert types(one) == [CLUSTER.url, ENDPOINTS.url, LISTENER.url]


def test_nothing_is_said_before_something_was_published() -> None:
    one = stream()
    assert one.next({}) is None
    assert (one.acked_version({}), one.published_version({}), one.outdated({})) == ("", "", ())


def test_a_snapshot_is_acknowledged_when_every_type_is() -> None:
    one = stream()
    one.feed(sotw(ENDPOINTS))
    types(one)
    snapshot = PUBLISHED[PLAIN]
    assert one.acked_version(PUBLISHED) == ""
    for kind in (ENDPOINTS, CLUSTER):
        assert one.acked_version(PUBLISHED) == ""
        version = snapshot.collections[kind].version
        one.feed(sotw(kind, response_nonce="1", version_info=version))
    assert one.acked_version(PUBLISHED) == snapshot.version
    node = Node("10.0.0.1:4000", Source.STATIC)
    served = NodePlan(node, State.ACTIVE, "", 0.0, Advice.HEALTHY, 1, node.address)
    later = snapshots(Plan(nodes={node.address: served}), Settings())
    assert one.acked_version(later) == snapshot.version
    assert one.published_version(later) == later[PLAIN].version


def test_an_envoy_follows_when_it_has_acknowledged_the_endpoints() -> None:
    one = stream()
    assert not one.endpoints_acked({})  # it may route by what another control plane told it
    assert one.endpoints_acked(PUBLISHED)  # it has no cluster, so no session goes anywhere
    returning = discovery_pb2.DiscoveryRequest.FromString(first("back"))
    returning.version_info = "from before"
    back = Stream(SOTW, "10.9.9.9:1", returning.SerializeToString(), "auto")
    assert not back.endpoints_acked(PUBLISHED)


@pytest.mark.parametrize(
    ("wanted", "extensions", "expected"),
    [("auto", (), "none"), ("auto", (CONTRIB_FILTER,), "contrib"), ("none", (CONTRIB_FILTER,), "none")],
)
def test_the_filter_follows_what_the_envoy_has(
    wanted: Filter, extensions: tuple[str, ...], expected: str
) -> None:
    assert stream(*extensions, wanted=wanted).filter(PUBLISHED) == expected


def test_only_a_refused_first_listener_falls_back_and_once() -> None:
    one = stream(CONTRIB_FILTER)
    one.feed(sotw(LISTENER))
    types(one)
    clusters = one.feed(sotw(CLUSTER, response_nonce="1", refusal="no"))
    assert clusters is not None
    assert clusters.fell_back_to is None
    refusal = one.feed(sotw(LISTENER, response_nonce="1", refusal="no such\n  filter"))
    assert refusal is not None
    assert (refusal.fell_back_to, refusal.message) == (PLAIN, "no such filter")
    assert types(one) == [LISTENER.url]
    one.choose("auto")  # a reload does not bring back what it refused
    again = one.feed(sotw(LISTENER, response_nonce="2", refusal="no"))
    assert again is not None
    assert again.fell_back_to is None
    assert types(one) == []


def test_another_filter_reaches_only_who_has_no_listener() -> None:
    holder, waiting = stream(CONTRIB_FILTER), stream(CONTRIB_FILTER)
    holder.feed(sotw(LISTENER))
    types(holder)
    sent = discovery_pb2.DiscoveryRequest(type_url=LISTENER.url, response_nonce="1")
    holder.feed(sent.SerializeToString())
    for each in (holder, waiting):
        each.choose("none")
    assert (holder.filter(PUBLISHED), holder.outdated(PUBLISHED)) == ("contrib", ("listener",))
    assert (waiting.filter(PUBLISHED), waiting.outdated(PUBLISHED)) == ("none", ())


@pytest.mark.parametrize("dialect", [SOTW, DELTA])
def test_a_stream_needs_a_name(dialect: Any) -> None:
    for data in (b"", first("")):
        with pytest.raises(BadRequest, match=r"node\.id|DeltaDiscoveryRequest"):
            Stream(dialect, "10.0.0.9:5000", data, "auto")


def test_an_envoy_is_remembered_for_ten_minutes() -> None:
    now = 1000.0
    events: list[str] = []
    fleet = Fleet(lambda: now, lambda kind, subject, message: events.append(kind))
    one = stream()
    fleet.join(one)
    now += 5000
    (status,) = fleet.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen, status.version) == (1000.0, 6000.0, "1.40.0")
    fleet.leave(one)
    now += MEMORY
    (status,) = fleet.statuses(PUBLISHED)
    assert (status.connected_since, status.last_seen) == (None, 6000.0)
    now += 1
    assert fleet.statuses(PUBLISHED) == []
    assert events == ["envoy.connected", "envoy.disconnected"]


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
    assert due(last_push, first_change, latest) == pytest.approx(expected)


@given(st.lists(st.floats(min_value=0, max_value=0.3), min_size=1, max_size=200))
def test_no_change_waits_longer_than_the_limit(gaps: list[float]) -> None:
    now, last_push, first_change, at = 0.0, float("-inf"), None, float("inf")
    for gap in gaps:
        now += gap
        if first_change is not None and at <= now:
            assert at - first_change <= LATEST + 1e-9
            assert at - last_push >= GATHER - 1e-9
            last_push, first_change = at, None
        first_change = now if first_change is None else first_change
        at = due(last_push, first_change, now)


def test_a_bootstrap_says_where_and_how() -> None:
    settings = Settings.model_validate({"overload": {"max_connections": 77, "max_heap_bytes": 100_000_000}})
    tls = ControlPlaneTls("/ca.pem", "plane.test", "/cert.pem", "/key.pem")
    text = render(
        settings,
        control_planes=["plane-0.test:18000", "[fd00::1]:18001"],
        node_id="a: \"b\" 'c' #d",
        admin="127.0.0.1:0",
        tls=tls,
        delta=True,
    )
    parsed = yaml.safe_load(text)
    assert parsed["node"] == {"id": "a: \"b\" 'c' #d", "cluster": "tidevoy"}
    assert parsed["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 0}
    ads = parsed["dynamic_resources"]["ads_config"]
    assert (ads["api_type"], ads["set_node_on_first_message_only"]) == ("DELTA_GRPC", True)
    (cluster,) = parsed["static_resources"]["clusters"]
    assert cluster["type"] == "STRICT_DNS"
    planes = [each["endpoint"]["address"]["socket_address"] for each in _endpoints(cluster)]
    assert planes == [
        {"address": "plane-0.test", "port_value": 18000},
        {"address": "fd00::1", "port_value": 18001},
    ]
    assert cluster["transport_socket"]["typed_config"]["sni"] == "plane.test"
    heap, connections = parsed["overload_manager"]["resource_monitors"]
    assert heap["typed_config"]["max_heap_size_bytes"] == 100_000_000
    assert connections["typed_config"]["max_active_downstream_connections"] == 77


def test_a_plain_bootstrap_leaves_out_what_is_not_asked_for() -> None:
    parsed = yaml.safe_load(render(Settings(), control_planes=["10.0.0.1:18000"], node_id=None))
    assert parsed["node"] == {"cluster": "tidevoy"}
    assert parsed["dynamic_resources"]["ads_config"]["api_type"] == "GRPC"
    (cluster,) = parsed["static_resources"]["clusters"]
    assert cluster["type"] == "STATIC"
    assert "transport_socket" not in cluster
    assert parsed["admin"]["address"]["socket_address"]["port_value"] == 9901


@pytest.mark.parametrize("planes", [[], ["nowhere"], ["host:99999"], ["a b:1"]])
def test_a_bootstrap_needs_addresses(planes: list[str]) -> None:
    with pytest.raises(ValueError, match=r"address|port|host"):
        render(Settings(), control_planes=planes, node_id="x")


def _endpoints(cluster: Any) -> Any:
    return cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
