"""Build the endpoints of one cluster from a plan, as Envoys of one zone get them. No I/O.

Each node has one priority, and an Envoy uses the first priority with a healthy node: nodes of its own zone,
if it prefers those; all other nodes; backup nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2

from controlplane.model.nodes import GroupZone
from controlplane.model.plan import BalancePolicy, EdsHealth, NodePlan, Plan
from controlplane.xds.any_encoding import serialise, socket_address
from controlplane.xds.protobuf_encoding import delimited

# Field numbers of endpoint.v3.ClusterLoadAssignment and LocalityLbEndpoints.
_CLUSTER_NAME, _ENDPOINTS, _LB_ENDPOINTS = 1, 2, 2

_HEALTH_STATUS = {EdsHealth.HEALTHY: 1, EdsHealth.UNHEALTHY: 2, EdsHealth.DRAINING: 3}  # core.v3.HealthStatus

# Overprovisioning factor in percent (Envoy's default: 140). Envoy sends some clients to the next priority if
# the healthy fraction of a priority's nodes times this factor is below 100 %: here, if fewer than one node in
# ten thousand is healthy.
_OVERPROVISIONING_PERCENT = 1_000_000


def nodes_by_group(plan: Plan) -> dict[str, list[NodePlan]]:
    """Return the nodes that are published to Envoys, by group, ordered by address.

    Two nodes may have the same endpoint (an IP address is reused while the old name still exists), and Envoy
    accepts it only once: a healthy node wins, then the first by address.
    """
    published = [
        node for node in plan.nodes.values() if node.eds_health is not None and node.endpoint is not None
    ]
    by_endpoint: dict[tuple[str, str | None], NodePlan] = {}
    for node in sorted(
        published, key=lambda node: (node.eds_health is not EdsHealth.HEALTHY, node.node.address)
    ):
        by_endpoint.setdefault((node.group, node.endpoint), node)
    groups: dict[str, list[NodePlan]] = {}
    for node in sorted(by_endpoint.values(), key=lambda node: node.node.address):
        groups.setdefault(node.group, []).append(node)
    return groups


def preferred_zones(plan: Plan, balance_policy: BalancePolicy) -> frozenset[GroupZone]:
    """Return the groups and zones whose Envoys prefer local nodes.

    They have a healthy node that is no backup, and are not overloaded. All other Envoys get the same
    endpoints, wherever they are.
    """
    if balance_policy is BalancePolicy.CONNECTION:
        return frozenset()
    populated = {
        (node.group, node.zone)
        for node in plan.nodes.values()
        if node.zone and node.eds_health is EdsHealth.HEALTHY and not node.backup
    }
    return frozenset(populated - plan.overloaded_zones)


def build_load_assignment(nodes: Sequence[NodePlan], cluster: str, preferred_zone: str = "") -> bytes:
    """Return the serialised `ClusterLoadAssignment` of these nodes. `preferred_zone`: empty for none.

    Without a TTL: Envoy 1.40 crashes when one expires.
    """
    local: list[bytes] = []
    elsewhere: list[bytes] = []
    backups: list[bytes] = []
    for node in nodes:
        is_local = bool(preferred_zone) and node.zone == preferred_zone and not node.backup
        tier = local if is_local else backups if node.backup else elsewhere
        tier.append(delimited(_LB_ENDPOINTS, _lb_endpoint_of(node, is_local=is_local)))
    # Priorities must have no gaps; without any node, an empty set is sent.
    tiers = [tier for tier in (local, elsewhere, backups) if tier] or [[]]
    localities = [
        delimited(_ENDPOINTS, b"".join(tier) + _priority_field(priority))
        for priority, tier in enumerate(tiers)
    ]
    return b"".join(
        (delimited(_CLUSTER_NAME, cluster), *localities, _policy_field() if len(tiers) > 1 else b"")
    )


@lru_cache(maxsize=4)
def _priority_field(priority: int) -> bytes:
    return serialise(endpoint_components_pb2.LocalityLbEndpoints(priority=priority))


@lru_cache(maxsize=1)
def _policy_field() -> bytes:
    message = endpoint_pb2.ClusterLoadAssignment()
    message.policy.overprovisioning_factor.value = _OVERPROVISIONING_PERCENT
    return serialise(message)


def _lb_endpoint_of(node: NodePlan, *, is_local: bool) -> bytes:
    assert node.endpoint is not None
    assert node.eds_health is not None
    return _lb_endpoint(
        node.endpoint, node.eds_health, max(1, (is_local and node.local_weight) or node.weight)
    )


@lru_cache(maxsize=32_768)  # most nodes do not change from one plan to the next
def _lb_endpoint(endpoint: str, eds_health: EdsHealth, weight: int) -> bytes:
    message = endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(address=socket_address(endpoint)),
        health_status=_HEALTH_STATUS[eds_health],
    )
    message.load_balancing_weight.value = weight
    return serialise(message)
