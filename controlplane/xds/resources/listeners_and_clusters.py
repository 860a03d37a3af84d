"""Build the clusters and listeners of one Envoy profile from the settings. No I/O.

An Envoy that serves all groups has the cluster `tidb` and the listener `sql`, and for each node group the
cluster `tidb-NAME` and the listener `sql-NAME`. An Envoy that serves only one group has only the cluster
`tidb`, with the nodes of that group, and the listener `sql` on `sql.listen`.

Clusters and listeners do not depend on the plan, which is sent as endpoints and live configuration. Only new
Envoys get a changed cluster or listener
(docs/internals/decisions/0001-clusters-are-not-changed-under-an-envoy.md). With Tidevoy's module, most
settings in them are initial values, which the live configuration changes
(docs/internals/decisions/0023-settings-that-apply-to-running-envoys.md).
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, NamedTuple

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.listener.v3 import listener_pb2
from envoy.extensions.filters.listener.proxy_protocol.v3 import proxy_protocol_pb2 as proxy_protocol_in_pb2
from envoy.extensions.filters.network.connection_limit.v3 import connection_limit_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.transport_sockets.proxy_protocol.v3 import upstream_proxy_protocol_pb2
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2
from google.protobuf import any_pb2

from controlplane.config.settings import Settings
from controlplane.config.sql import SqlSettings
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.protobuf_encoding import pack, pack_typed_struct, serialise, socket_address
from controlplane.xds.resource_type import ResourceType
from controlplane.xds.resources import dynamic_module
from controlplane.xds.resources.access_log import build_access_log
from controlplane.xds.resources.profile import CONTRIB_FILTER, EnvoyProfile

LISTENER_NAME = "sql"
LIVE_CONFIG_NAME = "tidevoy.live-config"

# A circuit breaker's maximum. Without a value, Envoy allows 1024 connections and resets further clients.
_UNLIMITED = 2**32 - 1
# The highest `backend.connect_timeout`, in seconds.
_MAX_CONNECT_TIMEOUT = 60.0
# Pause before another connect attempt: a random time up to this. It must not grow with each attempt, because
# Envoy has one backoff for all clients of a listener, and never resets it (`enableRetryTimer` in
# envoyproxy/envoy `source/common/tcp_proxy/tcp_proxy.cc`).
_MAX_RETRY_SECONDS = 0.1

_ADS_CONFIG_SOURCE = {"ads": {}, "resource_api_version": "V3"}

# Linux's numbers, which Envoy passes to the kernel. Accepted sockets inherit the options of the listener.
_SOL_SOCKET, _SO_KEEPALIVE = 1, 9
_IPPROTO_TCP, _TCP_KEEPIDLE, _TCP_KEEPINTVL, _TCP_KEEPCNT = 6, 4, 5, 6


class GroupListener(NamedTuple):
    """One group on an Envoy: the address for its clients, and the names of its cluster and listener."""

    group: str
    listen_address: str
    suffix: str = ""

    @property
    def cluster_name(self) -> str:
        """The name of the cluster and of its endpoints."""
        return CLUSTER_NAME + self.suffix

    @property
    def live_config_name(self) -> str:
        """The name of the module's live configuration."""
        return LIVE_CONFIG_NAME + self.suffix

    @property
    def listener_name(self) -> str:
        """The name of the listener and prefix of its statistics."""
        return LISTENER_NAME + self.suffix


def group_listeners(settings: Settings, group: str) -> list[GroupListener]:
    """Return the groups that an Envoy serves: the given one, or all if `group` is empty.

    The result is empty if the settings have no such group.
    """
    groups = settings.groups
    if group:
        return (
            [GroupListener(group, settings.sql.listen)]
            if any(configured.name == group for configured in groups)
            else []
        )
    return [
        GroupListener("", settings.sql.listen),
        *(GroupListener(configured.name, configured.listen, f"-{configured.name}") for configured in groups),
    ]


def cluster_name_for(listener: str) -> str:
    """Return the name of the cluster that a listener forwards to."""
    return CLUSTER_NAME + listener.removeprefix(LISTENER_NAME)


def is_node_cluster_name(name: str) -> bool:
    """Whether this can be the name of a cluster of nodes, with the current or earlier settings."""
    return name == CLUSTER_NAME or name.startswith(f"{CLUSTER_NAME}-")


def build_clusters(settings: Settings, profile: EnvoyProfile) -> dict[str, bytes]:
    """Return all clusters of a profile by name, each as a serialised `google.protobuf.Any`."""
    return {
        group_listener.cluster_name: serialise(pack(build_cluster(settings, profile, group_listener)))
        for group_listener in group_listeners(settings, profile.group)
    }


def build_listeners(settings: Settings, profile: EnvoyProfile) -> dict[str, bytes]:
    """Return a profile's listeners by name; none if the settings need the module and the profile lacks it."""
    if settings.module_requirement and not profile.has_module:
        return {}
    return {
        group_listener.listener_name: serialise(pack(build_listener(settings, profile, group_listener)))
        for group_listener in group_listeners(settings, profile.group)
    }


def to_any(resource_type: ResourceType, message: bytes) -> bytes:
    """Wrap a serialised message into a serialised `google.protobuf.Any`."""
    return serialise(any_pb2.Any(type_url=resource_type.url, value=message))


# Below, protobuf turns nested dicts into messages. A wrapper such as `UInt32Value` is `{"value": ...}`, so
# that zero differs from no value.

# --- cluster -----------------------------------------------------------------------------------------------


def build_cluster(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    """Build the `envoy.config.cluster.v3.Cluster`: how an Envoy picks a node and connects to it."""
    backend = settings.backend
    if profile.has_module:
        by_filter: dict[str, Any] = {
            "load_balancing_policy": dynamic_module.build_least_sessions_policy(
                settings, group_listener.group
            ),
            "transport_socket": dynamic_module.build_node_socket(settings),
            # The first bytes on a connection to a node belong to one client, so no other client may use it.
            "connection_pool_per_downstream_connection": True,
        }
    else:
        by_filter = {
            "load_balancing_policy": _LEAST_REQUEST_POLICY,
            "outlier_detection": _outlier_detection(backend.ejection_time),  # the module ejects nodes itself
            "transport_socket": _proxy_protocol_out(backend.proxy_protocol),
        }
    # With live settings, the module enforces these two.
    is_live = profile.gets_settings_live
    connect_timeout = _MAX_CONNECT_TIMEOUT if is_live else backend.connect_timeout
    limit = {"value": _UNLIMITED if is_live else backend.max_connections or _UNLIMITED}
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), limit)
    return cluster_pb2.Cluster(
        name=group_listener.cluster_name,
        type="EDS",
        eds_cluster_config={"eds_config": _ADS_CONFIG_SOURCE},
        connect_timeout=timedelta(seconds=connect_timeout),
        circuit_breakers={"thresholds": [limits]},
        # Otherwise, Envoy would still choose a removed node that passes an active check.
        ignore_health_on_host_removal=True,
        lrs_server={"self": {}, "resource_api_version": "V3"},
        common_lb_config={
            # Without a value, Envoy would route to draining and failing nodes if no node is healthy.
            "healthy_panic_threshold": {"value": 0.0},
            # Without a value, Envoy delays changes of health and weight by up to a second. A draining or
            # ejected node would still get connections after the ACK.
            "update_merge_window": timedelta(0),
        },
        upstream_connection_options={
            "tcp_keepalive": {
                "keepalive_probes": {"value": backend.keepalive_probes},
                "keepalive_time": {"value": backend.keepalive_idle},
                "keepalive_interval": {"value": backend.keepalive_interval},
            }
        },
        **by_filter,
    )


_LEAST_REQUEST_POLICY = {
    "policies": [
        {
            "typed_extension_config": {
                "name": "envoy.load_balancing_policies.least_request",
                "typed_config": pack(
                    least_request_pb2.LeastRequest(
                        # With bias 0, Envoy does not divide the weights by its own connections, because
                        # the weights already consider them.
                        active_request_bias={
                            "default_value": 0.0,
                            "runtime_key": "tidevoy.active_request_bias",
                        }
                    )
                ),
            }
        }
    ]
}


def _outlier_detection(ejection_time: float) -> dict[str, Any]:
    """Return the settings that eject a node for `ejection_time` after one failed connect only.

    The last node is never ejected, because at most `max_ejection_percent` of all hosts may be ejected
    (`DetectorImpl::ejectHost` in envoyproxy/envoy source/common/upstream/outlier_detection_impl.cc). Nodes
    that are out of service count among all hosts.
    """
    disabled = ("consecutive_5xx", "consecutive_gateway_failure", "success_rate", "failure_percentage")
    local_disabled = ("local_origin_success_rate", "failure_percentage_local_origin")
    return {
        "split_external_local_origin_errors": True,
        # How often Envoy checks whether an ejection is over.
        "interval": timedelta(seconds=min(0.5, ejection_time / 2)),
        "base_ejection_time": timedelta(seconds=ejection_time),
        "max_ejection_time": timedelta(seconds=ejection_time),
        "max_ejection_percent": {"value": 99},
        "always_eject_one_host": {"value": False},
        "consecutive_local_origin_failure": {"value": 1},
        "enforcing_consecutive_local_origin_failure": {"value": 100},
        **{f"enforcing_{cause}": {"value": 0} for cause in (*disabled, *local_disabled)},
    }


def _proxy_protocol_out(version: str) -> dict[str, Any] | None:
    if version == "off":
        return None
    raw_buffer = {
        "name": "envoy.transport_sockets.raw_buffer",
        "typed_config": pack(raw_buffer_pb2.RawBuffer()),
    }
    transport = upstream_proxy_protocol_pb2.ProxyProtocolUpstreamTransport(
        config={"version": version.upper()}, transport_socket=raw_buffer
    )
    return {"name": "envoy.transport_sockets.upstream_proxy_protocol", "typed_config": pack(transport)}


# --- listener ----------------------------------------------------------------------------------------------


def build_listener(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    """Build the `envoy.config.listener.v3.Listener`: a port for SQL clients."""
    sql = settings.sql
    is_live = profile.gets_settings_live
    # With live settings, only the module enforces the limit.
    connection_limit = 0 if is_live else sql.max_connections
    filters = [_tcp_proxy(settings, profile, group_listener)]
    chain: dict[str, Any] = {"filters": filters}
    listener_filters = (
        [dynamic_module.build_proxy_protocol_filter(sql)] if is_live else _proxy_protocol_filters(sql)
    )
    if sql.proxy_protocol == "required" and not is_live:
        # Envoy disconnects other clients, and counts them in `no_filter_chain_match`.
        networks = (network.partition("/") for network in sql.trusted_proxies)
        ranges = [{"address_prefix": ip, "prefix_len": {"value": int(bits)}} for ip, _, bits in networks]
        chain["filter_chain_match"] = {"direct_source_prefix_ranges": ranges}
    if profile.has_module:
        chain["transport_socket"] = dynamic_module.build_client_socket(settings)
        filters.insert(0, dynamic_module.build_session_filter(settings))
        listener_filters.append(
            dynamic_module.build_live_config_filter(group_listener.live_config_name, _ADS_CONFIG_SOURCE)
        )
        # At its limit, the module sends an error. Envoy sends none, so Envoy's limit is higher.
        connection_limit += math.ceil(connection_limit / 10)
    elif profile.filter == "contrib":
        mysql_proxy = "envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy"
        config = pack_typed_struct(mysql_proxy, {"stat_prefix": group_listener.listener_name})
        filters.insert(0, {"name": CONTRIB_FILTER, "typed_config": config})
    if connection_limit:
        limit = connection_limit_pb2.ConnectionLimit(
            stat_prefix=group_listener.listener_name, max_connections={"value": connection_limit}
        )
        filters.insert(0, {"name": "envoy.filters.network.connection_limit", "typed_config": pack(limit)})
    return listener_pb2.Listener(
        name=group_listener.listener_name,
        stat_prefix=group_listener.listener_name,
        address=socket_address(group_listener.listen_address),
        socket_options=_keepalive_options(sql),
        listener_filters=listener_filters,
        filter_chains=[chain],
    )


def _tcp_proxy(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> dict[str, Any]:
    if profile.has_module:
        by_filter: dict[str, Any] = {
            "hash_policy": [{"filter_state": {"key": dynamic_module.HASH_FILTER_STATE_KEY}}],
            # 0 means never; without a value, it would be an hour. The module ends idle sessions, because
            # Envoy's timer would also end a session that waits for a long query.
            "idle_timeout": timedelta(0),
            # The module enforces `backend.max_connect_attempts` and `sql.wait_for_node`.
            "max_connect_attempts": {"value": _UNLIMITED},
        }
    else:
        by_filter = {
            "idle_timeout": timedelta(seconds=settings.sql.idle_timeout),
            "max_connect_attempts": {"value": settings.backend.max_connect_attempts},
        }
    if settings.sql.access_log is not None:
        module_namespace = dynamic_module.METADATA_NAMESPACE if profile.has_module else ""
        by_filter["access_log"] = [build_access_log(settings.sql.access_log, module_namespace)]
    # Without the module, a worker learns of an ejection through the main thread. Without a pause, the worker
    # would retry before that, and probably at the same dead node, because it has the fewest connections.
    pause = timedelta(seconds=_MAX_RETRY_SECONDS)
    proxy = tcp_proxy_pb2.TcpProxy(
        stat_prefix=group_listener.listener_name,
        cluster=group_listener.cluster_name,
        backoff_options={"base_interval": pause, "max_interval": pause},
        **by_filter,
    )
    return {"name": "envoy.filters.network.tcp_proxy", "typed_config": pack(proxy)}


def _keepalive_options(sql: SqlSettings) -> list[dict[str, Any]]:
    # `Listener.tcp_keepalive` would do the same, but `xds-protos` does not have it yet.
    options = (
        ("keepalive", _SOL_SOCKET, _SO_KEEPALIVE, 1),
        ("keepalive idle", _IPPROTO_TCP, _TCP_KEEPIDLE, sql.keepalive_idle),
        ("keepalive interval", _IPPROTO_TCP, _TCP_KEEPINTVL, sql.keepalive_interval),
        ("keepalive probes", _IPPROTO_TCP, _TCP_KEEPCNT, sql.keepalive_probes),
    )
    return [
        {"description": text, "level": level, "name": name, "int_value": value}
        for text, level, name, value in options
    ]


def _proxy_protocol_filters(sql: SqlSettings) -> list[dict[str, Any]]:
    if sql.proxy_protocol == "off":
        return []
    if sql.proxy_protocol == "optional":
        return [dynamic_module.build_trusted_proxies_filter(sql.trusted_proxies)]
    reader = pack(proxy_protocol_in_pb2.ProxyProtocol())
    return [{"name": "envoy.filters.listener.proxy_protocol", "typed_config": reader}]
