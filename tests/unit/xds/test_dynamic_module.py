"""Tests that cluster and listener have exactly the expected parts of Tidevoy's module, with all keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from envoy.extensions.access_loggers.file.v3 import file_pb2
from envoy.extensions.filters.network.connection_limit.v3 import connection_limit_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from google.protobuf import json_format
from xds.type.v3 import typed_struct_pb2

from controlplane.config.settings import Settings
from controlplane.version import VERSION
from controlplane.xds.resources import listeners_and_clusters
from controlplane.xds.resources.profile import CONTRIB_PROFILE, MODULE_PROFILE, PLAIN_PROFILE, EnvoyProfile
from tests.support.module.bootstrap import CLIENT_DEFAULTS

MODULE_CONFIG = {"name": "tidevoy", "do_not_close": True, "metrics_namespace": "tidevoy"}
PORT = listeners_and_clusters.GroupListener("", "0.0.0.0:6000")
TLS = {
    "client": {
        "mode": "required",
        "cert": "/tls/client.pem",
        "key": "/tls/client.key",
        "client_ca": "/tls/clients.pem",
        "crl": "/tls/clients.crl",
        "min_version": "TLSv1.3",
        "rsa_key": "/tls/rsa.key",
    },
    "backend": {
        "mode": "preferred",
        "ca": "/tls/nodes.pem",
        "verify": "ca",
        "crl": "/tls/nodes.crl",
        "min_version": "TLSv1.3",
        "cert": "/tls/node.pem",
        "key": "/tls/node.key",
    },
    "allow_cleartext_backend": True,
}


def settings(**sections: Any) -> Settings:
    return Settings.model_validate(sections)


def listener_of(settings_: Settings, profile: EnvoyProfile) -> Any:
    return listeners_and_clusters.build_listener(settings_, profile, PORT)


def parts(settings_: Settings) -> dict[str, Any]:
    """Return the message type, configuration field and configuration of each part of the module, by name."""
    listener, cluster = (
        listener_of(settings_, MODULE_PROFILE),
        listeners_and_clusters.build_cluster(settings_, MODULE_PROFILE, PORT),
    )
    (chain,) = listener.filter_chains
    (policy,) = cluster.load_balancing_policy.policies
    (live,) = [listener_filter.config_discovery for listener_filter in listener.listener_filters]
    filters = [live.default_config, *(network_filter.typed_config for network_filter in chain.filters)]
    by_name = {}
    for packed in (
        *filters,
        chain.transport_socket.typed_config,
        cluster.transport_socket.typed_config,
        policy.typed_extension_config.typed_config,
    ):
        message = typed_struct_pb2.TypedStruct()
        if packed.Unpack(message):
            value = json_format.MessageToDict(message.value)
            assert value.pop("dynamic_module_config") == MODULE_CONFIG
            (name,) = [value.pop(key) for key in list(value) if key.endswith("_name")]
            (key, config) = value.popitem()
            assert not value
            assert config["@type"] == "type.googleapis.com/google.protobuf.Struct"
            kind = message.type_url.removeprefix("type.googleapis.com/envoy.extensions.")
            by_name[name] = (kind, key, config["value"])
    return by_name


DEFAULT_LOGIN_LIMITS = {
    "max_logins": 50_000,
    "max_logins_per_address": 10_000,
    "max_bytes": 64 << 20,
    "max_bytes_per_address": 16 << 20,
    "max_decryptions_per_second": 1_000,
    "max_decryptions_per_second_per_address": 200,
    "shared_addresses": [],
}
LOGIN_LIMITS = {
    "max_logins": 7,
    "max_logins_per_address": 6,
    "max_bytes": 70_000,
    "max_bytes_per_address": 60_000,
    "max_decryptions_per_second": 2.5,
    "max_decryptions_per_second_per_address": 1.5,
    "shared_addresses": ["10.0.0.0/8"],
}


def test_default_settings_send_all_keys() -> None:
    assert parts(settings()) == {
        "session": (
            "filters.network.dynamic_modules.v3.DynamicModuleNetworkFilter",
            "filter_config",
            {
                "version": VERSION,
                "max_connections": 0,
                "login_limits": DEFAULT_LOGIN_LIMITS,
                "access_log": False,
            },
        ),
        "live_config": (
            "filters.listener.dynamic_modules.v3.DynamicModuleListenerFilter",
            "filter_config",
            {"version": VERSION},
        ),
        "client": (
            "transport_sockets.dynamic_modules.v3.DynamicModuleTransportSocket",
            "transport_socket_config",
            {"version": VERSION, **CLIENT_DEFAULTS},
        ),
        "node": (
            "transport_sockets.dynamic_modules.v3.DynamicModuleTransportSocket",
            "transport_socket_config",
            {
                "version": VERSION,
                "tls": "disabled",
                "ca": "",
                "verify": "full",
                "crl": "",
                "min_version": "TLSv1.2",
                "cert": "",
                "key": "",
                "proxy_protocol": "off",
                "allow_cleartext_backend": False,
                "eject_seconds": 5.0,
                "sentinels": True,
            },
        ),
        "least_sessions": (
            "load_balancing_policies.dynamic_modules.v3.DynamicModulesLoadBalancerConfig",
            "lb_policy_config",
            {
                "version": VERSION,
                "group": "",
                "moves_per_second": 500.0,
                "moves_at_once": 64,
                "states_max_bytes": 4_194_304,
                "states_budget_bytes": 268_435_456,
                "connect_attempts": 3,
            },
        ),
    }


def test_sends_every_module_setting() -> None:
    settings_ = settings(
        tls=TLS,
        sql={
            "max_connections": 9,
            "compression": "passthrough",
            "login_limits": LOGIN_LIMITS,
            "access_log": "/log/sessions.log",
        },
        backend={
            "proxy_protocol": "v2",
            "ejection_time": 7.5,
            "health_connections": False,
            "max_connect_attempts": 5,
        },
        migration={
            "max_per_second": 12.5,
            "max_concurrent": 3,
            "max_state_bytes": 70_000,
            "max_total_state_bytes": 280_000,
        },
    )
    configs = {name: config for name, (_, _, config) in parts(settings_).items()}
    assert configs == {
        "session": {
            "version": VERSION,
            "max_connections": 9,
            "login_limits": LOGIN_LIMITS,
            "access_log": True,
        },
        "live_config": {"version": VERSION},
        "client": {
            "version": VERSION,
            "tls": "required",
            "cert": "/tls/client.pem",
            "key": "/tls/client.key",
            "client_ca": "/tls/clients.pem",
            "crl": "/tls/clients.crl",
            "min_version": "TLSv1.3",
            "compression": "passthrough",
            "rsa_key": "/tls/rsa.key",
        },
        "node": {
            "version": VERSION,
            "tls": "preferred",
            "ca": "/tls/nodes.pem",
            "verify": "ca",
            "crl": "/tls/nodes.crl",
            "min_version": "TLSv1.3",
            "cert": "/tls/node.pem",
            "key": "/tls/node.key",
            "proxy_protocol": "v2",
            "allow_cleartext_backend": True,
            "eject_seconds": 7.5,
            "sentinels": False,
        },
        "least_sessions": {
            "version": VERSION,
            "group": "",
            "moves_per_second": 12.5,
            "moves_at_once": 3,
            "states_max_bytes": 70_000,
            "states_budget_bytes": 280_000,
            "connect_attempts": 5,
        },
    }


def test_runtime_limits_do_not_change_listener() -> None:
    settings_ = settings(sql={"login_timeout": 2.5, "idle_timeout": 90.5})
    assert listener_of(settings_, MODULE_PROFILE) == listener_of(settings(), MODULE_PROFILE)
    (live,) = listener_of(settings_, MODULE_PROFILE).listener_filters
    assert live.name == "tidevoy.live-config"
    source = live.config_discovery.config_source
    assert source.WhichOneof("config_source_specifier") == "ads"
    # 0 is no timeout: the listener opens only after the first live configuration.
    assert source.HasField("initial_fetch_timeout")
    assert source.initial_fetch_timeout.ToMilliseconds() == 0
    assert not live.config_discovery.apply_default_config_without_warming
    assert not any(
        built.listener_filters
        for built in map(partial(listener_of, settings_), (CONTRIB_PROFILE, PLAIN_PROFILE))
    )


def test_module_controls_idle_timeout_and_connect_attempts() -> None:
    settings_ = settings(sql={"idle_timeout": 90}, backend={"max_connect_attempts": 7})
    (chain,) = listener_of(settings_, MODULE_PROFILE).filter_chains
    session, last = chain.filters
    assert session.name == "envoy.filters.network.dynamic_modules"
    proxy = tcp_proxy_pb2.TcpProxy()
    assert last.typed_config.Unpack(proxy)
    assert proxy.HasField("idle_timeout")  # without it, the timeout is an hour
    assert proxy.idle_timeout.ToMilliseconds() == 0
    assert [policy.filter_state.key for policy in proxy.hash_policy] == ["envoy.hashable_string"]
    assert proxy.max_connect_attempts.value == 2**32 - 1  # the module enforces the setting


def access_log_fields(profile: EnvoyProfile, **sql: Any) -> dict[str, Any]:
    """Return the fields of each access log, by the path of its file; empty without an access log."""
    (chain,) = listener_of(settings(sql=sql), profile).filter_chains
    proxy = tcp_proxy_pb2.TcpProxy()
    assert chain.filters[-1].typed_config.Unpack(proxy)
    by_path: dict[str, Any] = {}
    for logger in proxy.access_log:
        log = file_pb2.FileAccessLog()
        assert logger.typed_config.Unpack(log)
        by_path[log.path] = json_format.MessageToDict(log.log_format.json_format)
    return by_path


def test_access_log_takes_migrations_and_bytes_from_module() -> None:
    assert access_log_fields(MODULE_PROFILE) == access_log_fields(PLAIN_PROFILE) == {}
    ((path, fields),) = access_log_fields(MODULE_PROFILE, access_log="/dev/stdout").items()
    assert path == "/dev/stdout"
    module_keys = {key for key, value in fields.items() if value == f"%DYNAMIC_METADATA(tidevoy:{key})%"}
    assert module_keys == {"node", "moves", "bytes_from_client", "bytes_to_client"}
    for profile in (CONTRIB_PROFILE, PLAIN_PROFILE):
        ((_, others),) = access_log_fields(profile, access_log="/dev/stdout").items()
        assert fields.keys() - others.keys() == {"node", "moves"}
        assert (others["bytes_from_client"], others["bytes_to_client"]) == (
            "%BYTES_RECEIVED%",
            "%BYTES_SENT%",
        )


@pytest.mark.parametrize(("setting", "guard"), [(1, 2), (10, 11), (1000, 1100), (1005, 1106)])
def test_envoy_connection_limit_is_above_module_limit(setting: int, guard: int) -> None:
    (chain,) = listener_of(settings(sql={"max_connections": setting}), MODULE_PROFILE).filter_chains
    limit = connection_limit_pb2.ConnectionLimit()
    assert chain.filters[0].typed_config.Unpack(limit)
    assert limit.max_connections.value == guard


def test_cluster_differs_only_in_module_parts() -> None:
    settings_ = settings(backend={"proxy_protocol": "v2", "ejection_time": 3, "connect_timeout": 2})
    with_module, others = (
        listeners_and_clusters.build_cluster(settings_, profile, PORT)
        for profile in (MODULE_PROFILE, PLAIN_PROFILE)
    )
    assert others.transport_socket.name == "envoy.transport_sockets.upstream_proxy_protocol"
    for message in (with_module, others):
        message.ClearField("transport_socket")
        message.ClearField("load_balancing_policy")
    assert with_module.connection_pool_per_downstream_connection
    with_module.connection_pool_per_downstream_connection = False
    assert others.HasField("outlier_detection")
    others.ClearField("outlier_detection")  # the module ejects nodes itself
    assert with_module == others
    assert listeners_and_clusters.build_clusters(
        settings_, CONTRIB_PROFILE
    ) == listeners_and_clusters.build_clusters(settings_, PLAIN_PROFILE)


@pytest.mark.parametrize(
    ("tls", "is_served"),
    [
        ({}, True),
        ({"client": {"mode": "optional", "cert": "/c", "key": "/k"}}, True),
        ({"backend": {"mode": "preferred"}}, True),
        ({"client": {"mode": "required", "cert": "/c", "key": "/k"}}, False),
        ({"backend": {"mode": "required"}}, False),
    ],
)
def test_required_tls_without_module_gets_no_listener(tls: dict[str, Any], is_served: bool) -> None:
    settings_ = settings(tls=tls)
    assert list(listeners_and_clusters.build_listeners(settings_, MODULE_PROFILE)) == ["sql"]
    for profile in (CONTRIB_PROFILE, PLAIN_PROFILE):
        assert list(listeners_and_clusters.build_listeners(settings_, profile)) == (
            ["sql"] if is_served else []
        )
