"""Tests of the xDS resources that are built from settings and plans."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.extensions.filters.listener.proxy_protocol.v3 import proxy_protocol_pb2
from envoy.extensions.filters.network.connection_limit.v3 import connection_limit_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.transport_sockets.proxy_protocol.v3 import upstream_proxy_protocol_pb2
from google.protobuf import any_pb2
from hypothesis import given
from hypothesis import strategies as st
from xds.type.v3 import typed_struct_pb2

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.config.sql import SqlSettings
from controlplane.model.limits import LimitPlan, LimitRule
from controlplane.model.module_switches import NO_OVERRIDES, SwitchOverrides
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, RebalanceState
from controlplane.version import VERSION
from controlplane.xds.protobuf_encoding import delimited, true_field, varint
from controlplane.xds.resources import endpoints as endpoints_of_plans
from controlplane.xds.resources import listeners_and_clusters
from controlplane.xds.resources import live_config as live_configs
from controlplane.xds.resources.endpoints import nodes_by_group
from controlplane.xds.resources.profile import (
    CONTRIB_PROFILE,
    MODULE_FEATURES,
    MODULE_PROFILE,
    PLAIN_PROFILE,
    EnvoyNode,
    EnvoyProfile,
    FilterSetting,
    candidate_profiles,
    module_problem,
)
from sandbox.live_config import parse_live_config

PORT = listeners_and_clusters.GroupListener("", "0.0.0.0:6000")
HEALTHY, UNHEALTHY, DRAINING = 1, 2, 3  # envoy.config.core.v3.HealthStatus


def planned(
    address: str,
    endpoint: str | None,
    eds_health: EdsHealth | None = EdsHealth.HEALTHY,
    weight: int = 100,
    state: State = State.ACTIVE,
) -> NodePlan:
    return NodePlan(Node(address, Source.PD), state, "a reason", 0.0, eds_health, weight, endpoint)


def plan(*nodes: NodePlan) -> Plan:
    return Plan(nodes={node_plan.node.address: node_plan for node_plan in nodes})


def serialised_assignment(plan_: Plan, group: str = "", preferred_zone: str = "") -> bytes:
    return endpoints_of_plans.build_load_assignment(
        nodes_by_group(plan_).get(group, []), "tidb", preferred_zone
    )


def serialised_live_config(plan_: Plan, settings: Settings | None = None, group: str = "") -> bytes:
    nodes = nodes_by_group(plan_).get(group, [])
    rendered = live_configs.render_nodes(plan_, nodes)
    text = live_configs.render_live_config(plan_, rendered, settings or Settings(), group)
    return live_configs.build_extension_config("live", text)


def assignment(*nodes: NodePlan) -> Any:
    return endpoint_pb2.ClusterLoadAssignment.FromString(serialised_assignment(plan(*nodes)))


def endpoints(*nodes: NodePlan) -> list[tuple[str, int, int, int, str, str]]:
    """Return what endpoints and live config say of each node: address, port, health, weight, name, state."""
    (locality,) = assignment(*nodes).endpoints
    rows = []
    live_nodes = parse_live_config(serialised_live_config(plan(*nodes)))["nodes"]
    for lb_endpoint, info in zip(locality.lb_endpoints, live_nodes, strict=True):
        socket_address = lb_endpoint.endpoint.address.socket_address
        assert info["endpoint"] == addresses.join(socket_address.address, socket_address.port_value)
        assert not lb_endpoint.HasField("metadata")
        rows.append(
            (
                socket_address.address,
                socket_address.port_value,
                lb_endpoint.health_status,
                lb_endpoint.load_balancing_weight.value,
                info["address"],
                info["state"],
            )
        )
    return rows


def filters(message: Any) -> list[str]:
    (chain,) = message.filter_chains
    return [network_filter.name.rpartition(".")[2] for network_filter in chain.filters]


def cluster(**backend: Any) -> Any:
    return listeners_and_clusters.build_cluster(
        Settings.model_validate({"backend": backend}), PLAIN_PROFILE, PORT
    )


def listener(settings: Settings, profile: EnvoyProfile) -> Any:
    return listeners_and_clusters.build_listener(
        settings, profile, listeners_and_clusters.group_listeners(settings, "")[0]
    )


def unpacked(kind: Any, packed: Any) -> Any:
    message = kind()
    assert packed.Unpack(message)
    return message


def test_live_config_names_only_switches_that_are_off() -> None:
    def switches(overrides: SwitchOverrides, **module: str) -> dict[str, bool]:
        settings = Settings.model_validate({"module": module})
        text = live_configs.render_live_config(Plan(), "", settings, "", overrides)
        published = json.loads(text)["published"]
        return {
            name: published[name]
            for name in ("offload", "migration", "ready")
            if not published.get(name, True)
        }

    assert switches(NO_OVERRIDES) == {}
    assert switches(NO_OVERRIDES, offload="off", migration="off") == {"offload": False, "migration": False}
    assert switches(SwitchOverrides(offload=True), offload="off", migration="off") == {"migration": False}
    assert switches(SwitchOverrides(migration=False)) == {"migration": False}
    assert switches(SwitchOverrides(ready=False)) == {"ready": False}
    assert switches(SwitchOverrides(ready=True)) == {}


def test_live_config_has_the_login_log_if_it_is_on() -> None:
    def login_log(**values: Any) -> Any:
        settings = Settings.model_validate({"sql": {"login_log": values}})
        published = json.loads(live_configs.render_live_config(Plan(), "", settings, ""))["published"]
        return published.get("login_log")

    assert login_log() is login_log(max_bytes=1, keep=2) is None
    assert login_log(path="/log/logins") == {"path": "/log/logins", "max_bytes": 100 << 20, "keep": 5}
    expected = {"path": "/dev/stdout", "max_bytes": 0, "keep": 0}
    assert login_log(path="/dev/stdout", max_bytes=0, keep=0) == expected


def test_live_config_has_the_statement_log_if_it_is_on() -> None:
    def statement_log(**values: Any) -> Any:
        settings = Settings.model_validate({"statements": {"log": values}})
        published = json.loads(live_configs.render_live_config(Plan(), "", settings, ""))["published"]
        return published.get("statement_log")

    assert statement_log() is statement_log(threshold=0) is None
    defaults = {
        "format": "json",
        "threshold": 0.3,
        "sample": 1.0,
        "errors": False,
        "redact": True,
        "max_bytes": 100 << 20,
        "keep": 5,
    }
    assert statement_log(path="/log/statements") == {"path": "/log/statements"} | defaults
    changed = {"format": "tidb", "threshold": 0.0, "sample": 0.25, "errors": True, "redact": False, "keep": 0}
    assert statement_log(path="/log/s", **changed) == {"path": "/log/s"} | defaults | changed


def test_live_config_has_the_limits_of_the_plan() -> None:
    def limits(*plans: LimitPlan) -> Any:
        plan = Plan(limits={limit.rule.name: limit for limit in plans})
        return json.loads(live_configs.render_live_config(plan, "", Settings(), ""))["published"].get(
            "limits"
        )

    assert limits() == []
    total = LimitPlan(LimitRule("total", max_connections=20), {"b": 8, "a": 12}, unlisted=3, envoys=2)
    rule = LimitRule("etl", "batch", "10.0.0.0/8", max_new_per_second=3.0)
    assert limits(total, LimitPlan(rule, envoys=2)) == [
        {"rule": "etl", "user": "batch", "network": "10.0.0.0/8", "rate_limit": 3.0, "rate": 1.5},
        {"rule": "total", "limit": 20, "quotas": {"a": 12, "b": 8}, "unlisted": 3},
    ]


def test_earlier_modules_get_no_keys_that_they_would_reject() -> None:
    rule = LimitRule("etl", "batch", max_connections=3)
    settings = Settings.model_validate(
        {
            "sql": {"login_log": {"path": "/log/logins"}},
            "statements": {
                "digests": "on",
                "log": {"path": "/log/statements"},
                "rules": [{"name": "none", "block": {}}],
            },
            "end": {"wait": 5},
        }
    )
    text = live_configs.render_live_config(
        Plan(limits={"etl": LimitPlan(rule)}),
        "",
        settings,
        "",
        SwitchOverrides(ready=False, drain=True, migration=False),
        features=(),
    )
    published = json.loads(text)["published"]
    assert published.keys() == {"group", "login_timeout", "idle_timeout", "migration", "nodes"}


def test_publishes_health_weight_and_state_ordered_by_address() -> None:
    rows = endpoints(
        planned("tidb-2:4000", "10.0.0.2:4000", EdsHealth.UNHEALTHY, 0, State.UNHEALTHY),
        planned("tidb-1:4000", "10.0.0.1:4000", weight=7),
        planned("tidb-0:4000", None, None, 0, State.JOINING),
        planned("tidb-3:4000", "10.0.0.3:4001", EdsHealth.DRAINING, 0, State.DRAINED),
        planned("tidb-4:4000", "[fd00::4]:4000"),
        planned("tidb-5:4000", None),
    )
    assert rows == [
        ("10.0.0.1", 4000, HEALTHY, 7, "tidb-1:4000", "active"),
        ("10.0.0.2", 4000, UNHEALTHY, 1, "tidb-2:4000", "unhealthy"),
        ("10.0.0.3", 4001, DRAINING, 1, "tidb-3:4000", "drained"),
        ("fd00::4", 4000, HEALTHY, 100, "tidb-4:4000", "active"),
    ]


def test_live_config_has_terminated_nodes_and_no_defaults() -> None:
    with_version = replace(planned("tidb-0:4000", "10.0.0.1:4000"), version="v8.5.3")
    draining = planned("tidb-1:4000", "10.0.0.2:4000", EdsHealth.DRAINING, 0, State.DRAINING)
    terminating = replace(draining, terminate_sessions=True)
    assert parse_live_config(serialised_live_config(plan(with_version, terminating)))["nodes"] == [
        {"endpoint": "10.0.0.1:4000", "address": "tidb-0:4000", "state": "active", "version": "v8.5.3"},
        {"endpoint": "10.0.0.2:4000", "address": "tidb-1:4000", "state": "draining", "close": True},
    ]


def test_live_config_has_limits_and_nodes_of_one_group() -> None:
    settings = Settings.model_validate({"sql": {"login_timeout": 2.5, "idle_timeout": 90.5}})
    one = planned("a:1", "10.0.0.1:4000")
    other = replace(planned("b:1", "10.0.0.2:4000"), group="olap")
    live_config = parse_live_config(serialised_live_config(plan(one, other), settings, "olap"))
    assert [node["address"] for node in live_config.pop("nodes")] == ["b:1"]
    expected = {"group": "olap", "login_timeout": 2.5, "idle_timeout": 90.5}
    assert {key: live_config[key] for key in expected} == expected


@given(st.text())
def test_live_config_preserves_any_text(text: str) -> None:
    node = replace(planned(text, "10.0.0.1:4000"), version=text)
    (decoded,) = parse_live_config(serialised_live_config(plan(node)))["nodes"]
    assert decoded["address"] == text
    assert decoded.get("version", "") == text


def test_live_config_has_migrations_per_envoy() -> None:
    from_a = {"a:1": {"00000000000000bb": 2, "00000000000000aa": 13}}
    to_b = {"b:1": {"00000000000000bb": 2, "00000000000000aa": 13}}
    rebalance = RebalanceState(1.0, "", 17, 6.0, from_a, to_b)
    plan_ = Plan(
        {"a:1": planned("a:1", "10.0.0.1:4000"), "b:1": planned("b:1", "10.0.0.2:4000")}, "", rebalance
    )
    nodes = parse_live_config(serialised_live_config(plan_))["nodes"]
    assert nodes[0]["moves"] == "17:00000000000000aa=13,00000000000000bb=2"
    assert "moves" not in nodes[1]
    assert nodes[1]["wants"] == "17:00000000000000aa=13,00000000000000bb=2"
    assert "wants" not in nodes[0]
    cancelled = replace(plan_, rebalance=replace(rebalance, outgoing={}, incoming={}))
    assert serialised_live_config(cancelled) == serialised_live_config(
        replace(plan_, rebalance=RebalanceState())
    )
    assert serialised_assignment(plan_) == serialised_assignment(cancelled)


def test_shared_endpoint_belongs_to_healthy_node() -> None:
    gone = planned("tidb-0:4000", "10.0.0.1:4000", EdsHealth.DRAINING, 0, State.GONE)
    new = planned("tidb-1:4000", "10.0.0.1:4000", weight=5)
    assert endpoints(gone, new) == [("10.0.0.1", 4000, HEALTHY, 5, "tidb-1:4000", "active")]
    duplicate = planned("tidb-2:4000", "10.0.0.1:4000", weight=9)
    assert endpoints(duplicate, new) == endpoints(new)


def test_empty_plan_gives_empty_endpoints() -> None:
    assert assignment().cluster_name == "tidb"
    assert endpoints() == []


def test_single_priority_has_no_policy() -> None:
    assert not assignment(planned("tidb-1:4000", "10.0.0.1:4000")).HasField("policy")


def test_cluster_uses_ads_and_balances_by_weight_alone() -> None:
    message = cluster()
    assert message.type == message.EDS
    assert message.eds_cluster_config.eds_config.HasField("ads")
    assert message.eds_cluster_config.eds_config.resource_api_version == 2  # V3
    (policy,) = message.load_balancing_policy.policies
    least = unpacked(least_request_pb2.LeastRequest, policy.typed_extension_config.typed_config)
    assert least.HasField("active_request_bias")
    assert least.active_request_bias.default_value == 0.0
    assert least.active_request_bias.runtime_key
    assert message.common_lb_config.HasField("healthy_panic_threshold")
    assert message.common_lb_config.healthy_panic_threshold.value == 0.0
    assert message.ignore_health_on_host_removal
    assert message.lrs_server.HasField("self")
    assert not message.HasField("transport_socket")


@pytest.mark.parametrize(("setting", "expected"), [(0, 2**32 - 1), (1, 1), (5000, 5000)])
def test_sets_every_circuit_breaker(setting: int, expected: int) -> None:
    (limits,) = cluster(max_connections=setting).circuit_breakers.thresholds
    values = (limits.max_connections, limits.max_pending_requests, limits.max_requests, limits.max_retries)
    assert [limit.value for limit in values] == [expected] * 4


@pytest.mark.parametrize(("seconds", "interval"), [(5.0, 0.5), (0.2, 0.1), (300.0, 0.5)])
def test_one_failed_connect_ejects_for_ejection_time(seconds: float, interval: float) -> None:
    detection = cluster(ejection_time=seconds).outlier_detection
    assert detection.split_external_local_origin_errors
    assert detection.consecutive_local_origin_failure.value == 1
    assert detection.enforcing_consecutive_local_origin_failure.value == 100
    assert detection.max_ejection_percent.value == 99
    assert detection.HasField("always_eject_one_host")
    assert not detection.always_eject_one_host.value
    for name, expected in (
        ("base_ejection_time", seconds),
        ("max_ejection_time", seconds),
        ("interval", interval),
    ):
        assert getattr(detection, name).ToTimedelta().total_seconds() == pytest.approx(expected)


def test_other_failures_do_not_eject() -> None:
    detection = cluster().outlier_detection
    off = (
        "enforcing_consecutive_5xx",
        "enforcing_consecutive_gateway_failure",
        "enforcing_success_rate",
        "enforcing_local_origin_success_rate",
        "enforcing_failure_percentage",
        "enforcing_failure_percentage_local_origin",
    )
    for name in off:
        assert detection.HasField(name), name  # some of these fields default to 100
        assert getattr(detection, name).value == 0, name


def test_sets_connect_timeout_and_keepalive_to_nodes() -> None:
    message = cluster(connect_timeout=0.35, keepalive_idle=61, keepalive_interval=4, keepalive_probes=6)
    assert message.connect_timeout.ToMilliseconds() == 350
    keepalive = message.upstream_connection_options.tcp_keepalive
    assert keepalive.keepalive_time.value == 61
    assert keepalive.keepalive_interval.value == 4
    assert keepalive.keepalive_probes.value == 6


def test_sets_keepalive_to_clients() -> None:
    sql = SqlSettings(keepalive_idle=61, keepalive_interval=4, keepalive_probes=6)
    options = listener(Settings(sql=sql), PLAIN_PROFILE).socket_options
    values = {(option.level, option.name): option.int_value for option in options}
    assert values == {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 61,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 4,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 6,
    }


@pytest.mark.parametrize(("setting", "version"), [("v1", 0), ("v2", 1)])
def test_proxy_protocol_to_nodes_wraps_the_plain_socket(setting: str, version: int) -> None:
    transport = cluster(proxy_protocol=setting).transport_socket
    wrapper = unpacked(upstream_proxy_protocol_pb2.ProxyProtocolUpstreamTransport, transport.typed_config)
    assert wrapper.config.version == version
    assert wrapper.transport_socket.name == "envoy.transport_sockets.raw_buffer"


def test_idle_timeout_is_off_by_default() -> None:
    for seconds in (0.0, 90.5):
        message = listener(Settings(sql=SqlSettings(idle_timeout=seconds)), PLAIN_PROFILE)
        assert message.address.socket_address.address == "0.0.0.0"
        assert message.address.socket_address.port_value == 6000
        assert filters(message) == ["tcp_proxy"]
        proxy = unpacked(tcp_proxy_pb2.TcpProxy, message.filter_chains[0].filters[0].typed_config)
        assert proxy.HasField("idle_timeout")  # without it, the timeout is an hour
        assert proxy.idle_timeout.ToMilliseconds() == seconds * 1000
        assert proxy.cluster == "tidb"
        assert proxy.max_connect_attempts.value == 3
        assert not message.listener_filters


@pytest.mark.parametrize(("listen", "ipv4_compat"), [("[::]:6000", True), ("[::1]:6000", False)])
def test_unspecified_ipv6_address_accepts_ipv4(listen: str, ipv4_compat: bool) -> None:
    message = listener(Settings(sql=SqlSettings(listen=listen)), PLAIN_PROFILE)
    assert message.address.socket_address.ipv4_compat is ipv4_compat


def test_orders_filters_of_each_profile() -> None:
    limited = Settings(sql=SqlSettings(max_connections=9))
    assert filters(listener(Settings(), CONTRIB_PROFILE)) == ["mysql_proxy", "tcp_proxy"]
    assert filters(listener(limited, PLAIN_PROFILE)) == ["connection_limit", "tcp_proxy"]
    message = listener(limited, CONTRIB_PROFILE)
    assert filters(message) == ["connection_limit", "mysql_proxy", "tcp_proxy"]
    limit, contrib, _ = message.filter_chains[0].filters
    assert unpacked(connection_limit_pb2.ConnectionLimit, limit.typed_config).max_connections.value == 9
    config = unpacked(typed_struct_pb2.TypedStruct, contrib.typed_config)
    assert config.type_url.endswith("envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy")
    assert config.value["stat_prefix"] == "sql"


def _proxied(setting: str) -> Settings:
    sql = {"proxy_protocol": setting, "trusted_proxies": ["10.0.0.0/8", "fd00::1"]}
    return Settings(sql=SqlSettings.model_validate(sql))


@pytest.mark.parametrize("profile", [PLAIN_PROFILE, MODULE_PROFILE])
def test_required_proxy_protocol_admits_only_trusted_proxies(profile: EnvoyProfile) -> None:
    message = listener(_proxied("required"), profile)
    reader = unpacked(proxy_protocol_pb2.ProxyProtocol, message.listener_filters[0].typed_config)
    assert not reader.allow_requests_without_proxy_protocol
    ranges = message.filter_chains[0].filter_chain_match.direct_source_prefix_ranges
    assert [(cidr.address_prefix, cidr.prefix_len.value) for cidr in ranges] == [
        ("10.0.0.0", 8),
        ("fd00::1", 128),
    ]


def test_module_with_live_settings_enforces_what_envoy_would_keep() -> None:
    profile = replace(MODULE_PROFILE, features=frozenset(MODULE_FEATURES))
    sql = {"proxy_protocol": "required", "trusted_proxies": ["10.0.0.0/8"], "max_connections": 9}
    backend = {"connect_timeout": 2.5, "max_connections": 7}
    settings = Settings.model_validate({"sql": sql, "backend": backend})
    message = listener(settings, profile)
    assert filters(message) == ["dynamic_modules", "tcp_proxy"]
    assert not message.filter_chains[0].HasField("filter_chain_match")
    reader = unpacked(typed_struct_pb2.TypedStruct, message.listener_filters[0].typed_config)
    assert reader.value["filter_name"] == "proxy_protocol"
    assert reader.value["filter_config"]["value"]["required"] is True
    built = listeners_and_clusters.build_cluster(settings, profile, PORT)
    assert built.connect_timeout.ToSeconds() == 60
    assert built.circuit_breakers.thresholds[0].max_connections.value == 2**32 - 1


def test_optional_proxy_protocol_is_read_by_the_module() -> None:
    message = listener(_proxied("optional"), MODULE_PROFILE)
    config = unpacked(typed_struct_pb2.TypedStruct, message.listener_filters[0].typed_config)
    assert config.value["filter_name"] == "trusted_proxies"
    assert list(config.value["filter_config"]["value"]["networks"]) == ["10.0.0.0/8", "fd00::1/128"]
    assert not message.filter_chains[0].HasField("filter_chain_match")
    assert listeners_and_clusters.build_listeners(_proxied("optional"), PLAIN_PROFILE) == {}


envoy_node = partial(EnvoyNode, "envoy-1", "1.40.0")
COMPATIBLE = envoy_node(module_version="0.1.7")


@pytest.mark.parametrize(
    ("filter_setting", "capabilities", "expected"),
    [
        ("auto", envoy_node(), "none"),
        ("auto", envoy_node(has_contrib_filter=True), "contrib none"),
        ("auto", COMPATIBLE, "module none"),
        ("auto", envoy_node(has_contrib_filter=True, module_version="0.1.0"), "module contrib none"),
        ("auto", envoy_node(has_contrib_filter=True, module_version="0.2.0"), "contrib none"),
        ("auto", envoy_node(module_version="1.1.0"), "none"),
        ("auto", envoy_node(module_version="new"), "none"),
        ("module", envoy_node(), "module none"),
        ("module", envoy_node(has_contrib_filter=True), "module contrib none"),
        ("module", envoy_node(module_version="0.2.0"), "none"),
        ("contrib", COMPATIBLE, "contrib none"),
        ("none", envoy_node(has_contrib_filter=True, module_version="0.1.0"), "none"),
    ],
)
def test_candidate_profiles(
    monkeypatch: pytest.MonkeyPatch,
    filter_setting: FilterSetting,
    capabilities: EnvoyNode,
    expected: str,
) -> None:
    monkeypatch.setattr("controlplane.version.VERSION", "0.1.3")
    assert (
        " ".join(profile.filter for profile in candidate_profiles(filter_setting, capabilities)) == expected
    )


def test_module_problem_names_the_reason() -> None:
    assert "bootstrap --module" in module_problem(envoy_node())
    assert module_problem(envoy_node(module_version="99.0.1")).startswith("its module is version 99.0.1 and")
    assert module_problem(envoy_node(module_version=VERSION)) == ""


@given(st.integers(min_value=0, max_value=2**40), st.binary(max_size=300))
def test_encodes_varints_and_fields_like_protobuf(number: int, payload: bytes) -> None:
    value = 0
    for shift, byte in enumerate(varint(number)):
        value |= (byte & 0x7F) << 7 * shift
    assert value == number
    expected = any_pb2.Any(value=payload).SerializeToString() if payload else b"\x12\x00"
    assert delimited(2, payload) == expected
    assert true_field(3) == b"\x18\x01"
