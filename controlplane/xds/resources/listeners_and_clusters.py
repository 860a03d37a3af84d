"""Build the clusters and listeners of one Envoy profile from the settings. No I/O.

Whatever the plan: the cluster `tidb` and the listener `sql`, and for each group `tidb-NAME` and `sql-NAME`.
What changes while Envoys run is sent in the endpoints and in the module's live configuration; a changed
cluster or listener reaches new Envoys only
(docs/internals/decisions/0001-clusters-are-not-changed-under-an-envoy.md).

An Envoy that serves one group alone has it on `sql.listen`, as `tidb` and `sql`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from envoy.config.core.v3 import (
    base_pb2,
    config_source_pb2,
    proxy_protocol_pb2,
    socket_option_pb2,
)
from envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from envoy.extensions.filters.listener.proxy_protocol.v3 import proxy_protocol_pb2 as proxy_protocol_in_pb2
from envoy.extensions.filters.network.connection_limit.v3 import connection_limit_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.transport_sockets.proxy_protocol.v3 import upstream_proxy_protocol_pb2
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2
from google.protobuf import any_pb2, duration_pb2

from controlplane.config.settings import Settings
from controlplane.config.sql import SqlSettings
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.any_encoding import pack, pack_typed_struct, serialise, socket_address
from controlplane.xds.resource_type import CLUSTER, LISTENER, ResourceType
from controlplane.xds.resources import dynamic_module
from controlplane.xds.resources.access_log import build_access_log
from controlplane.xds.resources.profile import CONTRIB_FILTER, EnvoyProfile

LISTENER_NAME = "sql"
LIVE_CONFIG_NAME = "tidevoy.live-config"

# The maximum of the field. Without a value the limit is 1024 connections; Envoy resets clients beyond that.
_UNLIMITED = 2**32 - 1
# With the module, which has its own limit: more nodes than a client has to try to find one that is not full.
_MAX_MODULE_ATTEMPTS = 20
# Backoff between two connect attempts for one client: random up to this, then up to twice as much.
_RETRY_SECONDS = 0.025

# Linux's numbers; Envoy applies them as they are. Accepted sockets inherit them from the listening one.
_SOL_SOCKET, _SO_KEEPALIVE = 1, 9
_IPPROTO_TCP, _TCP_KEEPIDLE, _TCP_KEEPINTVL, _TCP_KEEPCNT = 6, 4, 5, 6


class GroupListener(NamedTuple):
    """One group on an Envoy: the address for its clients, and the names of its cluster and listener."""

    group: str
    listen_address: str
    suffix: str = ""

    @property
    def cluster_name(self) -> str:
        """Name of the cluster and of its endpoints."""
        return CLUSTER_NAME + self.suffix

    @property
    def live_config_name(self) -> str:
        """Name of the module's live configuration."""
        return LIVE_CONFIG_NAME + self.suffix

    @property
    def listener_name(self) -> str:
        """Name of the listener and prefix of its statistics."""
        return LISTENER_NAME + self.suffix


def group_listeners(settings: Settings, group: str) -> list[GroupListener]:
    """Return the groups that an Envoy serves: the given one, or all if `group` is empty.

    Empty if the settings have no such group.
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
    """Whether this can be the name of a cluster of nodes, under the current or earlier settings."""
    return name == CLUSTER_NAME or name.startswith(f"{CLUSTER_NAME}-")


def build_clusters(settings: Settings, profile: EnvoyProfile) -> dict[str, bytes]:
    """Return all clusters of a profile, name -> serialised `google.protobuf.Any`; deterministic."""
    return {
        group_listener.cluster_name: to_any(
            CLUSTER, serialise(build_cluster(settings, profile, group_listener))
        )
        for group_listener in group_listeners(settings, profile.group)
    }


def build_listeners(settings: Settings, profile: EnvoyProfile) -> dict[str, bytes]:
    """Return all listeners of a profile; none if TLS is required and the profile cannot provide it."""
    if settings.tls.tls_requirement and not profile.has_module:
        return {}
    return {
        group_listener.listener_name: to_any(
            LISTENER, serialise(build_listener(settings, profile, group_listener))
        )
        for group_listener in group_listeners(settings, profile.group)
    }


def to_any(kind: ResourceType, message: bytes) -> bytes:
    """Wrap a serialised message into a serialised `google.protobuf.Any`."""
    return serialise(any_pb2.Any(type_url=kind.url, value=message))


def _duration(seconds: float) -> Any:
    return duration_pb2.Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9) // 1000 * 1000)


# --- cluster -----------------------------------------------------------------------------------------------


def build_cluster(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    """Build the `envoy.config.cluster.v3.Cluster`: how an Envoy picks a node and connects to it."""
    backend = settings.backend
    message = cluster_pb2.Cluster(
        name=group_listener.cluster_name,
        type=cluster_pb2.Cluster.EDS,
        eds_cluster_config=cluster_pb2.Cluster.EdsClusterConfig(eds_config=_ads_config_source()),
        connect_timeout=_duration(backend.connect_timeout),
        load_balancing_policy=_build_balancing_policy(settings, profile, group_listener),
        circuit_breakers=_circuit_breakers(backend.max_connections or _UNLIMITED),
        # Without it a removed node that passes an active check would still be chosen.
        ignore_health_on_host_removal=True,
        lrs_server=config_source_pb2.ConfigSource(
            self=config_source_pb2.SelfConfigSource(), resource_api_version=config_source_pb2.V3
        ),
    )
    # Zero, not absent: with no healthy node Envoy would otherwise route to nodes that take no new clients.
    message.common_lb_config.healthy_panic_threshold.value = 0.0
    # Zero: Envoy would otherwise delay changes of health and weight for up to a second, so that a node
    # with an acknowledged drain, or an ejected node, still got connections.
    message.common_lb_config.update_merge_window.CopyFrom(_duration(0))
    keepalive = message.upstream_connection_options.tcp_keepalive
    keepalive.keepalive_probes.value = backend.keepalive_probes
    keepalive.keepalive_time.value = backend.keepalive_idle
    keepalive.keepalive_interval.value = backend.keepalive_interval
    if profile.has_module:
        message.transport_socket.CopyFrom(dynamic_module.build_node_socket(settings))
        # The first bytes on a connection to a node belong to one client, so no other client may get it.
        message.connection_pool_per_downstream_connection = True
        return message  # the module ejects nodes itself
    message.outlier_detection.CopyFrom(_outlier_detection(backend.eject_seconds))
    if backend.proxy_protocol != "off":
        message.transport_socket.CopyFrom(_proxy_protocol_out(backend.proxy_protocol))
    return message


def _ads_config_source() -> Any:
    return config_source_pb2.ConfigSource(
        ads=config_source_pb2.AggregatedConfigSource(), resource_api_version=config_source_pb2.V3
    )


def _build_balancing_policy(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    return (
        dynamic_module.build_least_sessions_policy(settings, group_listener.group)
        if profile.has_module
        else _build_least_request_policy()
    )


def _build_least_request_policy() -> Any:
    policy = least_request_pb2.LeastRequest()
    # Bias 0: an Envoy must not divide the weights by its own connections; the weights include them already.
    policy.active_request_bias.default_value = 0.0
    policy.active_request_bias.runtime_key = "tidevoy.active_request_bias"
    message = cluster_pb2.LoadBalancingPolicy()
    config = message.policies.add().typed_extension_config
    config.name = "envoy.load_balancing_policies.least_request"
    config.typed_config.CopyFrom(pack(policy))
    return message


def _outlier_detection(eject_seconds: float) -> Any:
    """Eject a node on this Envoy for `eject_seconds` after one failed connect, and for no other reason.

    The last node is never ejected: Envoy ejects a host only if the ejected ones, including this one, are at
    most `max_ejection_percent` of all (`DetectorImpl::ejectHost` in envoyproxy/envoy
    source/common/upstream/outlier_detection_impl.cc). Nodes that are out of service count among all.
    """
    message = outlier_detection_pb2.OutlierDetection(
        split_external_local_origin_errors=True,
        # How often Envoy checks whether an ejection is over.
        interval=_duration(min(0.5, eject_seconds / 2)),
        base_ejection_time=_duration(eject_seconds),
        max_ejection_time=_duration(eject_seconds),
    )
    message.max_ejection_percent.value = 99
    message.always_eject_one_host.value = False
    message.always_eject_one_host.SetInParent()
    message.consecutive_local_origin_failure.value = 1
    message.enforcing_consecutive_local_origin_failure.value = 100
    for disabled in (
        message.enforcing_consecutive_5xx,
        message.enforcing_consecutive_gateway_failure,
        message.enforcing_success_rate,
        message.enforcing_local_origin_success_rate,
        message.enforcing_failure_percentage,
        message.enforcing_failure_percentage_local_origin,
    ):
        disabled.value = 0
        disabled.SetInParent()
    return message


def _circuit_breakers(max_connections: int) -> Any:
    message = circuit_breaker_pb2.CircuitBreakers()
    limits = message.thresholds.add()
    for limit in (
        limits.max_connections,
        limits.max_pending_requests,
        limits.max_requests,
        limits.max_retries,
    ):
        limit.value = max_connections
    return message


def _proxy_protocol_out(version: str) -> Any:
    versions = proxy_protocol_pb2.ProxyProtocolConfig
    return base_pb2.TransportSocket(
        name="envoy.transport_sockets.upstream_proxy_protocol",
        typed_config=pack(
            upstream_proxy_protocol_pb2.ProxyProtocolUpstreamTransport(
                config=versions(version=versions.V1 if version == "v1" else versions.V2),
                transport_socket=base_pb2.TransportSocket(
                    name="envoy.transport_sockets.raw_buffer", typed_config=pack(raw_buffer_pb2.RawBuffer())
                ),
            )
        ),
    )


# --- listener ----------------------------------------------------------------------------------------------


def build_listener(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    """Build the `envoy.config.listener.v3.Listener`: a port for SQL clients."""
    sql = settings.sql
    connection_limit = sql.max_connections
    chain = listener_components_pb2.FilterChain(filters=[_tcp_proxy(settings, profile, group_listener)])
    listener_filters = _proxy_protocol_in(sql)
    if profile.has_module:
        chain.transport_socket.CopyFrom(dynamic_module.build_client_socket(settings))
        chain.filters.insert(0, dynamic_module.build_session_filter(settings))
        listener_filters.append(
            dynamic_module.build_live_config_filter(group_listener.live_config_name, _ads_config_source())
        )
        # Over the limit the module answers with an error. Envoy only closes, so its limit is a higher guard.
        connection_limit += math.ceil(connection_limit / 10)
    elif profile.filter == "contrib":
        chain.filters.insert(0, _contrib_filter(group_listener))
    if connection_limit:
        chain.filters.insert(0, _connection_limit(connection_limit, group_listener))
    return listener_pb2.Listener(
        name=group_listener.listener_name,
        stat_prefix=group_listener.listener_name,
        address=socket_address(group_listener.listen_address),
        socket_options=_keepalive_options(sql),
        listener_filters=listener_filters,
        filter_chains=[chain],
    )


def _tcp_proxy(settings: Settings, profile: EnvoyProfile, group_listener: GroupListener) -> Any:
    proxy = tcp_proxy_pb2.TcpProxy(
        stat_prefix=group_listener.listener_name, cluster=group_listener.cluster_name
    )
    idle_timeout = settings.sql.idle_timeout
    if profile.has_module:
        # The module ends idle sessions; Envoy's timer would also end one that waits for a long query.
        idle_timeout = 0.0
        proxy.hash_policy.add().filter_state.key = dynamic_module.HASH_FILTER_STATE_KEY
    proxy.idle_timeout.CopyFrom(_duration(idle_timeout))  # 0 is "never"; left out it would be an hour
    # The module counts failed attempts itself, since those at full nodes are free.
    attempts = _MAX_MODULE_ATTEMPTS if profile.has_module else settings.backend.max_connect_attempts
    proxy.max_connect_attempts.value = attempts
    if settings.sql.access_log is not None:
        module_namespace = dynamic_module.METADATA_NAMESPACE if profile.has_module else ""
        proxy.access_log.append(build_access_log(settings.sql.access_log, module_namespace))
    if not profile.has_module:
        # A worker gets an ejection through the main thread. Without a backoff its next attempts come first,
        # and probably go to the same dead node, which has the fewest connections.
        proxy.backoff_options.base_interval.CopyFrom(_duration(_RETRY_SECONDS))
        proxy.backoff_options.max_interval.CopyFrom(_duration(4 * _RETRY_SECONDS))
    return listener_components_pb2.Filter(name="envoy.filters.network.tcp_proxy", typed_config=pack(proxy))


def _connection_limit(max_connections: int, group_listener: GroupListener) -> Any:
    limit = connection_limit_pb2.ConnectionLimit(stat_prefix=group_listener.listener_name)
    limit.max_connections.value = max_connections
    return listener_components_pb2.Filter(
        name="envoy.filters.network.connection_limit", typed_config=pack(limit)
    )


def _contrib_filter(group_listener: GroupListener) -> Any:
    config = pack_typed_struct(
        "envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy",
        {"stat_prefix": group_listener.listener_name},
    )
    return listener_components_pb2.Filter(name=CONTRIB_FILTER, typed_config=config)


def _keepalive_options(sql: SqlSettings) -> list[Any]:
    # `Listener.tcp_keepalive` would do the same, but `xds-protos` does not have it yet.
    options = (
        ("keepalive", _SOL_SOCKET, _SO_KEEPALIVE, 1),
        ("keepalive idle", _IPPROTO_TCP, _TCP_KEEPIDLE, sql.keepalive_idle),
        ("keepalive interval", _IPPROTO_TCP, _TCP_KEEPINTVL, sql.keepalive_interval),
        ("keepalive probes", _IPPROTO_TCP, _TCP_KEEPCNT, sql.keepalive_probes),
    )
    return [
        socket_option_pb2.SocketOption(description=text, level=level, name=name, int_value=value)
        for text, level, name, value in options
    ]


def _proxy_protocol_in(sql: SqlSettings) -> list[Any]:
    if sql.proxy_protocol == "off":
        return []
    reader = proxy_protocol_in_pb2.ProxyProtocol(
        allow_requests_without_proxy_protocol=sql.proxy_protocol == "optional"
    )
    return [
        listener_components_pb2.ListenerFilter(
            name="envoy.filters.listener.proxy_protocol", typed_config=pack(reader)
        )
    ]
