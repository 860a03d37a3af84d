"""Build the parts of Tidevoy's module in an Envoy's cluster and listener from the settings. No I/O.

Each part gets its whole configuration, every key and the version of this control plane: the module rejects
unknown keys. Names and keys are those of `filters/module`; the messages around them are Envoy's
(`envoy.extensions.*.dynamic_modules.v3`), which `xds-protos` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.core.v3 import base_pb2
from envoy.config.listener.v3 import listener_components_pb2
from google.protobuf import any_pb2, duration_pb2, wrappers_pb2

from controlplane.config.settings import Settings
from controlplane.version import VERSION
from controlplane.xds.any_encoding import TYPE_URL_PREFIX, pack, pack_typed_struct, serialise
from controlplane.xds.protobuf_encoding import delimited, true_field

# Filter state in which `session` passes the connection's number, through the hash policy of tcp_proxy, to
# `least_sessions`: a load-balancing policy gets nothing of a connection but its hash.
HASH_FILTER_STATE_KEY = "envoy.hashable_string"

# Dynamic metadata in which the module writes what access logs show of a connection.
METADATA_NAMESPACE = "tidevoy"

# The name is enough to find the module because the bootstrap has loaded its file already.
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


def build_session_filter(settings: Settings) -> Any:
    """Build the network filter `session`: it owns and ends the session, and enforces `max_connections`."""
    config = {"max_connections": settings.sql.max_connections}
    part = _pack_extension("filters.network", "DynamicModuleNetworkFilter", "filter", "session", config)
    return listener_components_pb2.Filter(name="envoy.filters.network.dynamic_modules", typed_config=part)


def build_live_config_filter(name: str, source: Any) -> Any:
    """Build the listener filter `live_config`, which gets its configuration from `source` under `name`.

    Its default configuration holds only the version. A module of another version rejects it, and with it the
    whole listener.
    """
    message = listener_components_pb2.ListenerFilter(name=name)
    discovery = message.config_discovery
    discovery.config_source.CopyFrom(source)
    # Zero: no timeout. The listener must not accept clients before the module has the nodes.
    discovery.config_source.initial_fetch_timeout.CopyFrom(duration_pb2.Duration())
    discovery.default_config.CopyFrom(
        _pack_extension("filters.listener", _LISTENER_FILTER, "filter", _LIVE_CONFIG_FILTER, {})
    )
    discovery.type_urls.append(_LISTENER_FILTER_URL)
    return message


def pack_live_config(text: str) -> Any:
    """Return the configuration of that filter as an `Any`; `text` is JSON.

    As a string: Envoy would convert a TypedStruct to JSON and back on its main thread, which takes long with
    thousands of nodes.
    """
    module = b"".join(
        (
            delimited(_NAME, _MODULE_NAME),
            true_field(_DO_NOT_CLOSE),
            delimited(_METRICS_NAMESPACE, _STATS_NAMESPACE),
        )
    )
    config = serialise(pack(wrappers_pb2.StringValue(value=text)))
    parts = (
        delimited(_MODULE_CONFIG, module),
        delimited(_FILTER_NAME, _LIVE_CONFIG_FILTER),
        delimited(_FILTER_CONFIG, config),
    )
    return any_pb2.Any(type_url=_LISTENER_FILTER_URL, value=b"".join(parts))


def build_client_socket(settings: Settings) -> Any:
    """Build the listener's transport socket `client`: the client's side of the protocol, and its TLS."""
    tls = settings.tls.client
    config = {
        "tls": tls.mode,
        "cert": _path_or_empty(tls.cert),
        "key": _path_or_empty(tls.key),
        "client_ca": _path_or_empty(tls.client_ca),
        "compression": settings.sql.compression,
        "rsa_key": _path_or_empty(tls.rsa_key),
    }
    return _build_transport_socket("client", config)


def build_node_socket(settings: Settings) -> Any:
    """Build the cluster's transport socket `node`: the node's side of the protocol, TLS, PROXY headers."""
    tls = settings.tls.backend
    config = {
        "tls": tls.mode,
        "ca": _path_or_empty(tls.ca),
        "verify": tls.verify,
        "cert": _path_or_empty(tls.cert),
        "key": _path_or_empty(tls.key),
        "proxy_protocol": settings.backend.proxy_protocol,
        "allow_cleartext_backend": settings.tls.allow_cleartext_backend,
        "eject_seconds": settings.backend.eject_seconds,
        "sentinels": settings.backend.sentinels,
    }
    return _build_transport_socket("node", config)


def build_least_sessions_policy(settings: Settings, group: str) -> Any:
    """Build the load-balancing policy `least_sessions`: by weight and its own counts, no node twice.

    It is notified of added and removed nodes, so it also starts the migrations within `group`, the cluster's.
    """
    migration = settings.migration
    limits = {
        "group": group,
        "moves_per_second": migration.per_second,
        "moves_at_once": migration.at_once,
        "states_max_bytes": migration.states_max_bytes,
        "states_budget_bytes": migration.states_budget_bytes,
        "connect_attempts": settings.backend.max_connect_attempts,
    }
    policy = cluster_pb2.LoadBalancingPolicy()
    config = policy.policies.add().typed_extension_config
    config.name = "envoy.load_balancing_policies.dynamic_modules"
    config.typed_config.CopyFrom(
        _pack_extension(
            "load_balancing_policies",
            "DynamicModulesLoadBalancerConfig",
            "lb_policy",
            "least_sessions",
            limits,
        )
    )
    return policy


def _build_transport_socket(name: str, config: Mapping[str, Any]) -> Any:
    part = _pack_extension(
        "transport_sockets", "DynamicModuleTransportSocket", "transport_socket", name, config
    )
    return base_pb2.TransportSocket(name="envoy.transport_sockets.dynamic_modules", typed_config=part)


def _pack_extension(
    category: str, message: str, field_prefix: str, name: str, config: Mapping[str, Any]
) -> Any:
    """Build one of Envoy's messages for a part of a module; `field_prefix` is the prefix of its fields."""
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
