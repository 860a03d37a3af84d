"""From a plan and settings to the xDS resources of one class of Envoy. Pure.

Three resources, whatever the plan: the cluster `tidb`, its endpoints, and the listener `sql`. What changes
while Envoys run travels in the endpoints; a changed cluster or listener reaches new Envoys only
(docs/decisions/0001-clusters-are-not-changed-under-an-envoy.md).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from envoy.config.core.v3 import (
    address_pb2,
    base_pb2,
    config_source_pb2,
    proxy_protocol_pb2,
    socket_option_pb2,
)
from envoy.config.endpoint.v3 import endpoint_components_pb2
from envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from envoy.extensions.filters.listener.proxy_protocol.v3 import proxy_protocol_pb2 as proxy_protocol_in_pb2
from envoy.extensions.filters.network.connection_limit.v3 import connection_limit_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.load_balancing_policies.least_request.v3 import least_request_pb2
from envoy.extensions.transport_sockets.proxy_protocol.v3 import upstream_proxy_protocol_pb2
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2
from google.protobuf import any_pb2, duration_pb2

from controlplane import address as addresses
from controlplane.config import Settings
from controlplane.config_sql import Sql
from controlplane.model import Advice, NodePlan, Plan, Rebalance
from controlplane.publish import module
from controlplane.publish.access_log import access_log
from controlplane.publish.envoy_class import CONTRIB, CONTRIB_FILTER, MODULE, EnvoyClass
from controlplane.publish.packed import pack, pack_unknown, serialise
from controlplane.publish.resource_type import CLUSTER, ENDPOINTS, LISTENER, ResourceType
from controlplane.publish.wire import delimited

CLUSTER_NAME = "tidb"
LISTENER_NAME = "sql"
METADATA_NAMESPACE = "tidevoy"

# The most that the field holds. Left out it would be 1024 connections, and Envoy resets clients beyond that.
_NO_LIMIT = 2**32 - 1
# Seconds between two attempts to connect for one client: at random up to this, then up to twice as much.
_RETRY_PAUSE = 0.025

# Field numbers of endpoint.v3.ClusterLoadAssignment and LocalityLbEndpoints.
_CLUSTER_NAME, _ENDPOINTS, _LB_ENDPOINTS = 1, 2, 2

_HEALTH = {Advice.HEALTHY: 1, Advice.UNHEALTHY: 2, Advice.DRAINING: 3}  # core.v3.HealthStatus

# Linux's numbers; Envoy applies them as they are. Accepted sockets inherit them from the listening one.
_SOL_SOCKET, _SO_KEEPALIVE = 1, 9
_IPPROTO_TCP, _TCP_KEEPIDLE, _TCP_KEEPINTVL, _TCP_KEEPCNT = 6, 4, 5, 6


def clusters(settings: Settings, envoy_class: EnvoyClass) -> dict[str, bytes]:
    """All clusters of one class: name -> serialised `google.protobuf.Any`; equal settings, equal bytes."""
    return {CLUSTER_NAME: _packed(CLUSTER, serialise(cluster(settings, envoy_class)))}


def assignments(plan: Plan) -> dict[str, bytes]:
    """The endpoints of all clusters, by cluster."""
    return {CLUSTER_NAME: _packed(ENDPOINTS, assignment(plan))}


def listeners(settings: Settings, envoy_class: EnvoyClass) -> dict[str, bytes]:
    """All listeners of one class of Envoy; none when it would carry in clear text what needs TLS."""
    if settings.tls.demand and envoy_class != MODULE:
        return {}
    return {LISTENER_NAME: _packed(LISTENER, serialise(listener(settings, envoy_class)))}


def _packed(kind: ResourceType, message: bytes) -> bytes:
    return serialise(any_pb2.Any(type_url=kind.url, value=message))


def _duration(seconds: float) -> Any:
    return duration_pb2.Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9) // 1000 * 1000)


def _socket_address(address: str) -> Any:
    host, port = addresses.split(address)
    return address_pb2.Address(
        # `[::]` stands for every address of the machine, so also for those of IPv4.
        socket_address=address_pb2.SocketAddress(address=host, port_value=port, ipv4_compat=host == "::")
    )


# --- cluster -----------------------------------------------------------------------------------------------


def cluster(settings: Settings, envoy_class: EnvoyClass) -> Any:
    """`envoy.config.cluster.v3.Cluster`: how an Envoy picks a node and connects to it."""
    backend = settings.backend
    message = cluster_pb2.Cluster(
        name=CLUSTER_NAME,
        type=cluster_pb2.Cluster.EDS,
        eds_cluster_config=cluster_pb2.Cluster.EdsClusterConfig(eds_config=_ads()),
        connect_timeout=_duration(backend.connect_timeout),
        load_balancing_policy=module.least_sessions(settings) if envoy_class == MODULE else _least_request(),
        outlier_detection=_outlier_detection(backend.eject_seconds),
        circuit_breakers=_circuit_breakers(backend.max_connections or _NO_LIMIT),
        # Without it a removed node that passes an active check would still be chosen.
        ignore_health_on_host_removal=True,
        lrs_server=config_source_pb2.ConfigSource(
            self=config_source_pb2.SelfConfigSource(), resource_api_version=config_source_pb2.V3
        ),
    )
    # Zero, not absent: when no node is healthy Envoy would otherwise use those that we keep clients from.
    message.common_lb_config.healthy_panic_threshold.value = 0.0
    # Zero: Envoy would otherwise hold back changes of health and weight for up to a second, so that an
    # acknowledged drain, or an ejected node, still got connections.
    message.common_lb_config.update_merge_window.CopyFrom(_duration(0))
    keepalive = message.upstream_connection_options.tcp_keepalive
    keepalive.keepalive_probes.value = backend.keepalive_probes
    keepalive.keepalive_time.value = backend.keepalive_idle
    keepalive.keepalive_interval.value = backend.keepalive_interval
    if envoy_class == MODULE:
        message.transport_socket.CopyFrom(module.node_socket(settings))
        # The connection to a node begins with what belongs to one client, so no other may get it.
        message.connection_pool_per_downstream_connection = True
    elif backend.proxy_protocol != "off":
        message.transport_socket.CopyFrom(_proxy_protocol_out(backend.proxy_protocol))
    return message


def _ads() -> Any:
    return config_source_pb2.ConfigSource(
        ads=config_source_pb2.AggregatedConfigSource(), resource_api_version=config_source_pb2.V3
    )


def _least_request() -> Any:
    policy = least_request_pb2.LeastRequest()
    # Bias 0: an Envoy does not divide the weights by its own connections, which we counted in already.
    policy.active_request_bias.default_value = 0.0
    policy.active_request_bias.runtime_key = "tidevoy.active_request_bias"
    message = cluster_pb2.LoadBalancingPolicy()
    config = message.policies.add().typed_extension_config
    config.name = "envoy.load_balancing_policies.least_request"
    config.typed_config.CopyFrom(pack(policy))
    return message


def _outlier_detection(eject_seconds: float) -> Any:
    """One failed connect takes a node out for `eject_seconds`, on this Envoy; nothing else ever does."""
    message = outlier_detection_pb2.OutlierDetection(
        split_external_local_origin_errors=True,
        # How often Envoy looks whether an ejection is over.
        interval=_duration(min(0.5, eject_seconds / 2)),
        base_ejection_time=_duration(eject_seconds),
        max_ejection_time=_duration(eject_seconds),
    )
    message.max_ejection_percent.value = 100
    message.consecutive_local_origin_failure.value = 1
    message.enforcing_consecutive_local_origin_failure.value = 100
    for off in (
        message.enforcing_consecutive_5xx,
        message.enforcing_consecutive_gateway_failure,
        message.enforcing_success_rate,
        message.enforcing_local_origin_success_rate,
        message.enforcing_failure_percentage,
        message.enforcing_failure_percentage_local_origin,
    ):
        off.value = 0
        off.SetInParent()
    return message


def _circuit_breakers(most: int) -> Any:
    message = circuit_breaker_pb2.CircuitBreakers()
    limits = message.thresholds.add()
    for limit in (
        limits.max_connections,
        limits.max_pending_requests,
        limits.max_requests,
        limits.max_retries,
    ):
        limit.value = most
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


# --- endpoints ---------------------------------------------------------------------------------------------


def assignment(plan: Plan) -> bytes:
    """Serialised `ClusterLoadAssignment`: every node that Envoys are told of, in the order of addresses.

    No time to live: Envoy 1.40 crashes when one runs out. Two nodes may stand on one endpoint (an IP is used
    again while the old name lives on), and an Envoy takes it once: the one in service goes first, then the
    first by address.
    """
    told = [node for node in plan.nodes.values() if node.advice is not None and node.endpoint is not None]
    by_endpoint: dict[str, NodePlan] = {}
    for node in sorted(told, key=lambda node: (node.advice is not Advice.HEALTHY, node.node.address)):
        by_endpoint.setdefault(node.endpoint or "", node)
    chosen = sorted(by_endpoint.values(), key=lambda node: node.node.address)
    group = b"".join(delimited(_LB_ENDPOINTS, _lb_endpoint_of(node, plan.rebalance)) for node in chosen)
    return delimited(_CLUSTER_NAME, CLUSTER_NAME) + delimited(_ENDPOINTS, group)


def _lb_endpoint_of(node: NodePlan, rebalance: Rebalance) -> bytes:
    assert node.endpoint is not None
    assert node.advice is not None
    return _lb_endpoint(
        node.endpoint,
        node.advice,
        max(1, node.weight),
        node.node.address,
        node.state.value,
        node.version,
        node.closing,
        _moves(node.node.address, rebalance),
        node.node.address in rebalance.wants,
    )


def _moves(address: str, rebalance: Rebalance) -> str:
    """`ROUND:INSTANCE=COUNT,...`: how many sessions each Envoy is to move from the node; empty: none."""
    asked = rebalance.moves.get(address)
    if not asked:
        return ""
    return f"{rebalance.round}:" + ",".join(f"{envoy}={count}" for envoy, count in sorted(asked.items()))


@lru_cache(maxsize=16_384)  # most nodes are the same from one plan to the next
def _lb_endpoint(
    endpoint: str,
    advice: Advice,
    weight: int,
    address: str,
    state: str,
    version: str,
    closing: bool,
    moves: str,
    wants: bool,
) -> bytes:
    message = endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(address=_socket_address(endpoint)),
        health_status=_HEALTH[advice],
    )
    message.load_balancing_weight.value = weight
    # EDS health reads the same for DRAINING and UNHEALTHY inside an Envoy, so the state travels by name. What
    # is not known, or not so, has no key.
    told = message.metadata.filter_metadata[METADATA_NAMESPACE].fields
    told["address"].string_value = address
    told["state"].string_value = state
    if version:
        told["version"].string_value = version
    if closing:
        told["close"].string_value = "1"
    if moves:
        told["moves"].string_value = moves
    if wants:
        told["wants"].string_value = "1"
    return serialise(message)


# --- listener ----------------------------------------------------------------------------------------------


def listener(settings: Settings, envoy_class: EnvoyClass) -> Any:
    """`envoy.config.listener.v3.Listener`: the port for SQL clients."""
    sql = settings.sql
    most = sql.max_connections
    chain = listener_components_pb2.FilterChain(filters=[_tcp_proxy(settings, envoy_class)])
    if envoy_class == MODULE:
        chain.transport_socket.CopyFrom(module.client_socket(settings))
        chain.filters.insert(0, module.session_filter(settings))
        # The module answers who is one too many; Envoy only closes, so its limit stands above, as a guard.
        most += math.ceil(most / 10)
    elif envoy_class == CONTRIB:
        chain.filters.insert(0, _contrib_filter())
    if most:
        chain.filters.insert(0, _connection_limit(most))
    return listener_pb2.Listener(
        name=LISTENER_NAME,
        stat_prefix=LISTENER_NAME,
        address=_socket_address(sql.listen),
        socket_options=_keepalive(sql),
        listener_filters=_proxy_protocol_in(sql),
        filter_chains=[chain],
    )


def _tcp_proxy(settings: Settings, envoy_class: EnvoyClass) -> Any:
    proxy = tcp_proxy_pb2.TcpProxy(stat_prefix=LISTENER_NAME, cluster=CLUSTER_NAME)
    idle_timeout = settings.sql.idle_timeout
    if envoy_class == MODULE:
        # The module ends idle sessions; Envoy's timer would also end one that waits for a long query.
        idle_timeout = 0.0
        proxy.hash_policy.add().filter_state.key = module.HASHED_STATE
    proxy.idle_timeout.CopyFrom(_duration(idle_timeout))  # 0 is "never"; left out it would be an hour
    proxy.max_connect_attempts.value = settings.backend.max_connect_attempts
    if settings.sql.access_log is not None:
        told = METADATA_NAMESPACE if envoy_class == MODULE else ""
        proxy.access_log.append(access_log(settings.sql.access_log, told))
    # A worker learns of an ejection only through the main thread. Without a pause its next attempts come
    # first, and may well go to the same dead node, which has the fewest connections of all.
    proxy.backoff_options.base_interval.CopyFrom(_duration(_RETRY_PAUSE))
    proxy.backoff_options.max_interval.CopyFrom(_duration(4 * _RETRY_PAUSE))
    return listener_components_pb2.Filter(name="envoy.filters.network.tcp_proxy", typed_config=pack(proxy))


def _connection_limit(most: int) -> Any:
    limit = connection_limit_pb2.ConnectionLimit(stat_prefix=LISTENER_NAME)
    limit.max_connections.value = most
    return listener_components_pb2.Filter(
        name="envoy.filters.network.connection_limit", typed_config=pack(limit)
    )


def _contrib_filter() -> Any:
    config = pack_unknown(
        "envoy.extensions.filters.network.mysql_proxy.v3.MySQLProxy", {"stat_prefix": LISTENER_NAME}
    )
    return listener_components_pb2.Filter(name=CONTRIB_FILTER, typed_config=config)


def _keepalive(sql: Sql) -> list[Any]:
    # `Listener.tcp_keepalive` would say the same, but `xds-protos` does not have it yet.
    wanted = (
        ("keepalive", _SOL_SOCKET, _SO_KEEPALIVE, 1),
        ("keepalive idle", _IPPROTO_TCP, _TCP_KEEPIDLE, sql.keepalive_idle),
        ("keepalive interval", _IPPROTO_TCP, _TCP_KEEPINTVL, sql.keepalive_interval),
        ("keepalive probes", _IPPROTO_TCP, _TCP_KEEPCNT, sql.keepalive_probes),
    )
    return [
        socket_option_pb2.SocketOption(description=text, level=level, name=name, int_value=value)
        for text, level, name, value in wanted
    ]


def _proxy_protocol_in(sql: Sql) -> list[Any]:
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
