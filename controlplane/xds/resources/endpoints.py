"""Build the endpoints of one cluster from a plan, for Envoys in one zone. No I/O.

The priorities are: nodes of the Envoy's zone if they are preferred, all other nodes, backup nodes. An Envoy
uses the first priority that has a healthy node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2

from controlplane.model.nodes import GroupZone
from controlplane.model.plan import BalancePolicy, EdsHealth, NodePlan, Plan
from controlplane.xds.protobuf_encoding import delimited, serialise, socket_address

# Field numbers of endpoint.v3.ClusterLoadAssignment and LocalityLbEndpoints.
_CLUSTER_NAME, _ENDPOINTS, _LB_ENDPOINTS = 1, 2, 2

_HEALTH_STATUS = {EdsHealth.HEALTHY: 1, EdsHealth.UNHEALTHY: 2, EdsHealth.DRAINING: 3}  # core.v3.HealthStatus

# Overprovisioning factor in percent (Envoy's default: 140). If the healthy fraction of a priority times this
# factor is below 100 %, Envoy sends some clients to the next priority. With this value, it does so only if
# fewer than one node in 10,000 is healthy.
_OVERPROVISIONING = {"overprovisioning_factor": {"value": 1_000_000}}
_POLICY_FIELD = serialise(endpoint_pb2.ClusterLoadAssignment(policy=_OVERPROVISIONING))


def nodes_by_group(plan: Plan) -> dict[str, list[NodePlan]]:
    """Return the nodes that are published to Envoys, by group, ordered by address.

    If two nodes of a group have the same endpoint, only the healthy one (else the first by address) is
    published, because Envoy accepts an endpoint once. This occurs if a new node gets the IP address of an old
    node whose name still exists.
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
    """Return the groups and zones in which Envoys prefer local nodes.

    These zones are not overloaded and have a healthy node of the group that is not a backup.
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
    """Return the serialised `ClusterLoadAssignment` of these nodes.

    `preferred_zone` is empty if Envoys prefer no zone. The message has no TTL, because Envoy 1.40 crashes
    when a TTL expires.
    """
    local: list[bytes] = []
    elsewhere: list[bytes] = []
    backups: list[bytes] = []
    for node in nodes:
        is_local = bool(preferred_zone) and node.zone == preferred_zone and not node.backup
        tier = local if is_local else backups if node.backup else elsewhere
        assert node.endpoint is not None and node.eds_health is not None  # noqa: PT018
        weight = max(1, (is_local and node.local_weight) or node.weight)
        tier.append(delimited(_LB_ENDPOINTS, _lb_endpoint(node.endpoint, node.eds_health, weight)))
    # Priorities must have no gaps. Without nodes, there is one empty priority.
    tiers = [tier for tier in (local, elsewhere, backups) if tier] or [[]]
    localities = [
        delimited(_ENDPOINTS, b"".join(tier) + _priority_field(priority))
        for priority, tier in enumerate(tiers)
    ]
    return b"".join(
        (delimited(_CLUSTER_NAME, cluster), *localities, _POLICY_FIELD if len(tiers) > 1 else b"")
    )


@lru_cache(maxsize=4)
def _priority_field(priority: int) -> bytes:
    return serialise(endpoint_components_pb2.LocalityLbEndpoints(priority=priority))


@lru_cache(maxsize=32_768)  # most nodes do not change from one plan to the next
def _lb_endpoint(endpoint: str, eds_health: EdsHealth, weight: int) -> bytes:
    message = endpoint_components_pb2.LbEndpoint(
        endpoint={"address": socket_address(endpoint)},
        health_status=_HEALTH_STATUS[eds_health],
        load_balancing_weight={"value": weight},
    )
    return serialise(message)
