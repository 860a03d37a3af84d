"""Bootstraps of an Envoy with the module, and changes of its nodes at run time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane import address as addresses
from controlplane.version import VERSION
from controlplane.xds.bootstrap import module_path

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_MODULE = {"name": "tidevoy", "do_not_close": True, "metrics_namespace": "tidevoy"}
_LIVE_CONFIG = "tidevoy.live-config"
CLIENT_DEFAULTS: Mapping[str, Any] = {
    "tls": "disabled",
    "cert": "",
    "key": "",
    "client_ca": "",
    "crl": "",
    "min_version": "TLSv1.2",
    "compression": "off",
    "rsa_key": "",
}
NODE_DEFAULTS: Mapping[str, Any] = {
    "tls": "disabled",
    "ca": "",
    "verify": "none",
    "crl": "",
    "min_version": "TLSv1.2",
    "cert": "",
    "key": "",
    "proxy_protocol": "off",
    "allow_cleartext_backend": False,
    "eject_seconds": 5.0,
    "sentinels": False,
}
LOGIN_LIMITS: dict[str, Any] = {
    "max_logins": 0,
    "max_logins_per_address": 0,
    "max_bytes": 0,
    "max_bytes_per_address": 0,
    "max_decryptions_per_second": 0,
    "max_decryptions_per_second_per_address": 0,
    "shared_addresses": [],
}
"""No limits."""
SESSION_DEFAULTS: Mapping[str, Any] = {
    "max_connections": 0,
    "login_limits": LOGIN_LIMITS,
    "access_log": False,
}
SWITCHED_OFF = frozenset(os.environ.get("TIDEVOY_SWITCHED_OFF", "").split(",")) - {""}
"""Parts of the module that are off unless a test says otherwise: `offload`, `migration`."""
LIVE_DEFAULTS: Mapping[str, Any] = {
    "group": "",
    "login_timeout": 20,
    "idle_timeout": 0,
    "wait_for_node": 0,
    **dict.fromkeys(SWITCHED_OFF, False),
}
POLICY_DEFAULTS: Mapping[str, Any] = {
    "group": "",
    "moves_per_second": 500,
    "moves_at_once": 64,
    "states_max_bytes": 4 << 20,
    "states_budget_bytes": 256 << 20,
    "connect_attempts": 20,
}


@dataclass(frozen=True)
class Host:
    """A node as Envoy sees it. `name`: its name in the control plane, by default its endpoint."""

    endpoint: str
    name: str = ""
    weight: int = 1
    state: str = "active"
    terminate_sessions: bool = False
    outgoing: str = ""
    incoming: str = ""
    version: str = ""
    priority: int = 0


@dataclass(frozen=True)
class ModuleConfig:
    """Settings of the module and of Envoy. Mappings contain only what differs from the defaults.

    Times are in seconds.
    """

    client: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)
    live_settings: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    trusted_proxies: Sequence[str] = ()
    version: str = VERSION
    connect_attempts: int = 3
    connect_timeout: float = 10.0
    listen: str = "127.0.0.1"
    port: int = 0
    module: Path | None = None
    per_connection_pools: bool = True
    endpoints: Path | None = None
    """A file with the endpoints, for tests that change nodes by `publish_nodes` (see `live_config_file`)."""


def require_module() -> Path:
    """Return the module's file. Fails the test if it is not built."""
    module = module_path.find_module()
    if module is None:
        pytest.fail("libtidevoy.so is not built; run: make filters/target/release/libtidevoy.so")
    return module


def require_supervisor() -> Path:
    """Return the supervisor of an Envoy. `make` builds it with the module."""
    return require_module().with_name("tidevoy-envoy")


def bootstrap(hosts: Sequence[Host], config: ModuleConfig) -> dict[str, Any]:
    """Build a whole bootstrap: one listener, one cluster, the admin port."""

    def module_part(
        kind: str, message: str, field_name: str, name: str, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        return _extension(kind, message, field_name, name, {"version": config.version, **settings})

    def socket(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        typed_config = module_part(
            "transport_sockets", "DynamicModuleTransportSocket", "transport_socket", name, settings
        )
        return {"name": name, "typed_config": typed_config}

    session = module_part(
        "filters.network",
        "DynamicModuleNetworkFilter",
        "filter",
        "session",
        {**SESSION_DEFAULTS, **config.session},
    )
    policy = module_part(
        *("load_balancing_policies", "DynamicModulesLoadBalancerConfig", "lb_policy", "least_sessions"),
        {**POLICY_DEFAULTS, **config.policy},
    )
    tcp_proxy = {
        "@type": f"{_EXTENSIONS}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "sql",
        "cluster": "tidb",
        "idle_timeout": "0s",
        "max_connect_attempts": config.connect_attempts,
        "backoff_options": {"base_interval": "0.02s", "max_interval": "0.02s"},
        "hash_policy": [{"filter_state": {"key": "envoy.hashable_string"}}],
    }
    listener = {
        "name": "sql",
        "address": _socket_address(config.listen, config.port),
        "listener_filters": [*_trusted_proxies(config), _live_config(hosts, config)],
        "filter_chains": [
            {
                "filters": [
                    {"name": "session", "typed_config": session},
                    {"name": "tcp_proxy", "typed_config": tcp_proxy},
                ],
                "transport_socket": socket("client", {**CLIENT_DEFAULTS, **config.client}),
            }
        ],
    }
    limits = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    cluster = {
        "name": "tidb",
        "connect_timeout": f"{config.connect_timeout}s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "connection_pool_per_downstream_connection": config.per_connection_pools,
        "circuit_breakers": {"thresholds": [limits]},
        "transport_socket": socket("node", {**NODE_DEFAULTS, **config.node}),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "least_sessions", "typed_config": policy}}]
        },
        **_endpoint_source(hosts, config.endpoints),
    }
    telemetry = module_part(
        "bootstrap", "DynamicModuleBootstrapExtension", "extension", "telemetry", config.telemetry
    )
    telemetry["dynamic_module_config"] = _MODULE | {
        "module": {"local": {"filename": str(config.module or require_module())}}
    }
    return {
        "node": {"id": "test", "cluster": "tidevoy"},
        "admin": {"address": _socket_address("127.0.0.1", 0)},
        "bootstrap_extensions": [{"name": "tidevoy", "typed_config": telemetry}],
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _extension(
    kind: str, message: str, field_name: str, name: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "@type": f"{_EXTENSIONS}.{kind}.dynamic_modules.v3.{message}",
        "dynamic_module_config": _MODULE,
        f"{field_name}_name": name,
        f"{field_name}_config": {"@type": "type.googleapis.com/google.protobuf.Struct", "value": config},
    }


def _trusted_proxies(config: ModuleConfig) -> list[dict[str, Any]]:
    if not config.trusted_proxies:
        return []
    settings = {"version": config.version, "networks": list(config.trusted_proxies)}
    message = "DynamicModuleListenerFilter"
    extension = _extension("filters.listener", message, "filter", "trusted_proxies", settings)
    return [{"name": "trusted_proxies", "typed_config": extension}]


def _live_config(hosts: Sequence[Host], config: ModuleConfig) -> dict[str, Any]:
    extension = _live_config_extension(hosts, {**LIVE_DEFAULTS, **config.live_settings}, config.version)
    if config.endpoints is None:
        return {"name": _LIVE_CONFIG, "typed_config": extension}
    write_live_config(config.endpoints, hosts, config.live_settings, version=config.version)
    source = {
        "path_config_source": {"path": str(live_config_file(config.endpoints))},
        "resource_api_version": "V3",
    }
    return {
        "name": _LIVE_CONFIG,
        "config_discovery": {"config_source": source, "type_urls": [extension["@type"]]},
    }


def _live_config_extension(
    hosts: Sequence[Host], live_settings: Mapping[str, Any], version: str
) -> dict[str, Any]:
    nodes = [_node_info(host) for host in hosts]
    config = {"version": version, "published": {**live_settings, "nodes": nodes}}
    message = "DynamicModuleListenerFilter"
    return _extension("filters.listener", message, "filter", "live_config", config)


def live_config_file(endpoints: Path) -> Path:
    """Return the file with the live configuration for these endpoints."""
    return endpoints.with_name(f"{endpoints.name}.live")


def write_live_config(
    endpoints: Path,
    hosts: Sequence[Host],
    live_settings: Mapping[str, Any] | None = None,
    *,
    version: str = VERSION,
) -> None:
    """Change only the live configuration."""
    config = _live_config_extension(hosts, {**LIVE_DEFAULTS, **(live_settings or {})}, version)
    type_url = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    _replace_resource(
        live_config_file(endpoints), {"@type": type_url, "name": _LIVE_CONFIG, "typed_config": config}
    )


def _replace_resource(file: Path, resource: Mapping[str, Any]) -> None:
    new_file = file.with_suffix(".new")
    new_file.write_text(json.dumps({"resources": [resource]}))
    new_file.rename(file)  # Envoy watches for files that are moved into place.


def _endpoint_source(hosts: Sequence[Host], endpoints: Path | None) -> dict[str, Any]:
    if endpoints is None:
        return {"type": "STATIC", "load_assignment": _assignment(hosts)}
    write_endpoints(endpoints, hosts)
    source = {"path_config_source": {"path": str(endpoints)}, "resource_api_version": "V3"}
    return {"type": "EDS", "eds_cluster_config": {"eds_config": source}}


def publish_nodes(
    endpoints: Path,
    hosts: Sequence[Host],
    group: str = "",
    live_settings: Mapping[str, Any] | None = None,
) -> None:
    """Change the nodes of a group, in the endpoints and in the live configuration."""
    write_endpoints(endpoints, hosts, f"tidb-{group}" if group else "tidb")
    write_live_config(endpoints, hosts, {**(live_settings or {}), "group": group})


def write_endpoints(endpoints: Path, hosts: Sequence[Host], cluster: str = "tidb") -> None:
    """Change only the endpoints."""
    type_url = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    _replace_resource(endpoints, {"@type": type_url, **_assignment(hosts, cluster)})


def _assignment(hosts: Sequence[Host], cluster: str = "tidb") -> dict[str, Any]:
    priorities = range(max((host.priority for host in hosts), default=0) + 1)
    return {
        "cluster_name": cluster,
        "endpoints": [
            {
                "priority": priority,
                "lb_endpoints": [_endpoint(host) for host in hosts if host.priority == priority],
            }
            for priority in priorities
        ],
    }


def _endpoint(host: Host) -> dict[str, Any]:
    health = {"draining": "DRAINING", "unhealthy": "UNHEALTHY"}.get(host.state, "HEALTHY")
    return {
        "health_status": health,
        "endpoint": {"address": _socket_address(*addresses.split(host.endpoint))},
        "load_balancing_weight": host.weight,
    }


def _node_info(host: Host) -> dict[str, Any]:
    info: dict[str, Any] = {
        "endpoint": host.endpoint,
        "address": host.name or host.endpoint,
        "state": host.state,
    }
    info |= {"close": True} if host.terminate_sessions else {}
    info |= {"moves": host.outgoing} if host.outgoing else {}
    info |= {"wants": host.incoming} if host.incoming else {}
    info |= {"version": host.version} if host.version else {}
    return info


def _socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
