"""Build the parts of Tidevoy's module in an Envoy's cluster and listener from the settings. No I/O.

Each part gets all keys of its configuration and the version of this control plane; the module rejects unknown
keys. `filters/module` defines the names and keys. Envoy defines the messages around them
(`envoy.extensions.*.dynamic_modules.v3`), which `xds-protos` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, wrappers_pb2

from controlplane.config.settings import Settings
from controlplane.config.sql import BackendSettings, SqlSettings
from controlplane.version import VERSION
from controlplane.xds.protobuf_encoding import (
    TYPE_URL_PREFIX,
    delimited,
    pack,
    pack_typed_struct,
    serialise,
    true_field,
)

# The filter `session` stores a connection's number in this filter state. tcp_proxy's hash policy passes it to
# the load-balancing policy `least_sessions`, which gets nothing else about the connection.
HASH_FILTER_STATE_KEY = "envoy.hashable_string"

# The module writes the fields of the access log into this dynamic metadata of the connection.
METADATA_NAMESPACE = "tidevoy"

# The name is enough to find the module, because the bootstrap has already loaded its file.
_MODULE_NAME = _STATS_NAMESPACE = "tidevoy"
_DYNAMIC_MODULE_CONFIG = {"name": _MODULE_NAME, "do_not_close": True, "metrics_namespace": _STATS_NAMESPACE}

_LISTENER_FILTER = "DynamicModuleListenerFilter"
_LISTENER_FILTER_URL = (
    f"{TYPE_URL_PREFIX}envoy.extensions.filters.listener.dynamic_modules.v3.{_LISTENER_FILTER}"
)
_LIVE_CONFIG_FILTER = "live_config"
# Field numbers of DynamicModuleListenerFilter and DynamicModuleConfig.
_MODULE_CONFIG, _FILTER_NAME, _FILTER_CONFIG = 1, 2, 3
_NAME, _DO_NOT_CLOSE, _METRICS_NAMESPACE = 1, 3, 5


def live_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that the module applies while Envoy runs, for the live configuration."""
    sql, backend, migration = settings.sql, settings.backend, settings.migration
    return {
        "max_connections": sql.max_connections,
        "login_limits": _login_limits(settings),
        "proxy_rules": _proxy_rules(sql),
        "client": _client_socket(settings),
        "client_keepalive": _keepalive(sql),
        "node": _node_socket(settings),
        "node_keepalive": _keepalive(backend),
        "connect_timeout": backend.connect_timeout,
        "connect_attempts": backend.max_connect_attempts,
        "max_node_connections": backend.max_connections,
        "migration_limits": {
            "per_second": migration.max_per_second,
            "concurrent": migration.max_concurrent,
            "state_bytes": migration.max_state_bytes,
            "total_state_bytes": migration.max_total_state_bytes,
        },
    }


def build_session_filter(settings: Settings) -> dict[str, Any]:
    """Build the network filter `session`, which owns and ends sessions and enforces limits of clients."""
    config = {
        "max_connections": settings.sql.max_connections,
        "login_limits": _login_limits(settings),
        # Without an access log, nothing reads what the module writes into the connection's metadata.
        "access_log": settings.sql.access_log is not None,
    }
    part = _pack_extension("filters.network", "DynamicModuleNetworkFilter", "filter", "session", config)
    return {"name": "envoy.filters.network.dynamic_modules", "typed_config": part}


def build_live_config_filter(name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Build the listener filter `live_config`, which gets its configuration from `source` under `name`.

    The default configuration has only the version. A module of another version rejects it, so that Envoy
    rejects the whole listener.
    """
    # Zero means no timeout: the listener must not accept clients before the module has the nodes.
    source = {**source, "initial_fetch_timeout": timedelta(0)}
    default = _pack_extension("filters.listener", _LISTENER_FILTER, "filter", _LIVE_CONFIG_FILTER, {})
    discovery = {"config_source": source, "default_config": default, "type_urls": [_LISTENER_FILTER_URL]}
    return {"name": name, "config_discovery": discovery}


def build_proxy_protocol_filter(sql: SqlSettings) -> dict[str, Any]:
    """Build the listener filter `proxy_protocol`, which reads PROXY headers, as the live settings say."""
    part = _pack_extension(
        "filters.listener", _LISTENER_FILTER, "filter", "proxy_protocol", _proxy_rules(sql)
    )
    return {"name": "envoy.filters.listener.dynamic_modules", "typed_config": part}


def build_trusted_proxies_filter(networks: Sequence[str]) -> dict[str, Any]:
    """Build the listener filter `trusted_proxies`, which reads PROXY headers from these networks."""
    config = {"networks": list(networks)}
    part = _pack_extension("filters.listener", _LISTENER_FILTER, "filter", "trusted_proxies", config)
    return {"name": "envoy.filters.listener.dynamic_modules", "typed_config": part}


def pack_live_config(text: str) -> Any:
    """Return the configuration of the filter `live_config` as an `Any`; `text` is JSON.

    The text is sent as a string, because Envoy would convert a TypedStruct to JSON on its main thread, which
    takes long with thousands of nodes.
    """
    module = (
        delimited(_NAME, _MODULE_NAME)
        + true_field(_DO_NOT_CLOSE)
        + delimited(_METRICS_NAMESPACE, _STATS_NAMESPACE)
    )
    value = (
        delimited(_MODULE_CONFIG, module)
        + delimited(_FILTER_NAME, _LIVE_CONFIG_FILTER)
        + delimited(_FILTER_CONFIG, serialise(pack(wrappers_pb2.StringValue(value=text))))
    )
    return any_pb2.Any(type_url=_LISTENER_FILTER_URL, value=value)


def build_client_socket(settings: Settings) -> dict[str, Any]:
    """Build the listener's transport socket `client`: MySQL protocol and TLS with clients."""
    return _build_transport_socket("client", _client_socket(settings))


def build_node_socket(settings: Settings) -> dict[str, Any]:
    """Build the cluster's transport socket `node`: MySQL protocol, TLS and PROXY headers with nodes."""
    return _build_transport_socket("node", _node_socket(settings))


def build_least_sessions_policy(settings: Settings, group: str) -> dict[str, Any]:
    """Build the load-balancing policy `least_sessions`.

    It picks nodes by weight and its own session counts, and each node at most once per connection. It also
    starts migrations in the cluster's `group`, because Envoy notifies it of added and removed nodes.
    """
    migration = settings.migration
    limits = {
        "group": group,
        "moves_per_second": migration.max_per_second,
        "moves_at_once": migration.max_concurrent,
        "states_max_bytes": migration.max_state_bytes,
        "states_budget_bytes": migration.max_total_state_bytes,
        "connect_attempts": settings.backend.max_connect_attempts,
    }
    part = _pack_extension(
        "load_balancing_policies", "DynamicModulesLoadBalancerConfig", "lb_policy", "least_sessions", limits
    )
    config = {"name": "envoy.load_balancing_policies.dynamic_modules", "typed_config": part}
    return {"policies": [{"typed_extension_config": config}]}


def _login_limits(settings: Settings) -> dict[str, Any]:
    limits = settings.sql.login_limits
    return {
        "max_logins": limits.max_logins,
        "max_logins_per_address": limits.max_logins_per_address,
        "max_bytes": limits.max_bytes,
        "max_bytes_per_address": limits.max_bytes_per_address,
        "max_decryptions_per_second": limits.max_decryptions_per_second,
        "max_decryptions_per_second_per_address": limits.max_decryptions_per_second_per_address,
        "shared_addresses": list(limits.shared_addresses),
    }


def _proxy_rules(sql: SqlSettings) -> dict[str, Any]:
    networks = [] if sql.proxy_protocol == "off" else list(sql.trusted_proxies)
    return {"networks": networks, "required": sql.proxy_protocol == "required"}


def _client_socket(settings: Settings) -> dict[str, Any]:
    tls = settings.tls.client
    return {
        "tls": tls.mode,
        "cert": _path_or_empty(tls.cert),
        "key": _path_or_empty(tls.key),
        "client_ca": _path_or_empty(tls.client_ca),
        "crl": _path_or_empty(tls.crl),
        "min_version": tls.min_version,
        "compression": settings.sql.compression,
        "rsa_key": _path_or_empty(tls.rsa_key),
    }


def _node_socket(settings: Settings) -> dict[str, Any]:
    tls = settings.tls.backend
    return {
        "tls": tls.mode,
        "ca": _path_or_empty(tls.ca),
        "verify": tls.verify,
        "crl": _path_or_empty(tls.crl),
        "min_version": tls.min_version,
        "cert": _path_or_empty(tls.cert),
        "key": _path_or_empty(tls.key),
        "proxy_protocol": settings.backend.proxy_protocol,
        "allow_cleartext_backend": settings.tls.allow_cleartext_backend,
        "eject_seconds": settings.backend.ejection_time,
        "sentinels": settings.backend.health_connections,
    }


def _keepalive(side: SqlSettings | BackendSettings) -> dict[str, int]:
    return {
        "idle": side.keepalive_idle,
        "interval": side.keepalive_interval,
        "probes": side.keepalive_probes,
    }


def _build_transport_socket(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    part = _pack_extension(
        "transport_sockets", "DynamicModuleTransportSocket", "transport_socket", name, config
    )
    return {"name": "envoy.transport_sockets.dynamic_modules", "typed_config": part}


def _pack_extension(
    category: str, message: str, field_prefix: str, name: str, config: Mapping[str, Any]
) -> Any:
    """Build Envoy's message for one part of the module; `field_prefix` is the prefix of its fields."""
    return pack_typed_struct(
        f"envoy.extensions.{category}.dynamic_modules.v3.{message}",
        {
            "dynamic_module_config": _DYNAMIC_MODULE_CONFIG,
            f"{field_prefix}_name": name,
            f"{field_prefix}_config": {
                "@type": f"{TYPE_URL_PREFIX}google.protobuf.Struct",
                "value": {"version": VERSION, **config},
            },
        },
    )


def _path_or_empty(file: Path | None) -> str:
    return "" if file is None else str(file)
