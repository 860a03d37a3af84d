"""The xDS resource types that the control plane publishes, and the order in which it sends them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One resource type.

    With `wildcard`, a first request without names subscribes to all resources (xDS protocol, "How the client
    specifies what resources to return").
    With `immutable`, Tidevoy never changes a resource that an Envoy has. If a listener changed, Envoy would
    end the listener's sessions after the drain time. If a cluster changed, load reports would lack sessions
    from before the change, so a node with sessions would look empty. Only an Envoy without a listener may get
    a changed cluster, because it has no sessions.
    With `skips_identical`, Envoy acknowledges a resource without reading it if the previous one had the same
    bytes, even if Envoy rejected the previous one (`FilterConfigSubscription::onConfigUpdate` in
    envoyproxy/envoy source/common/filter/config_discovery_impl.cc).
    """

    display_name: str
    url: str
    wildcard: bool = False
    immutable: bool = False
    skips_identical: bool = False


CLUSTER = ResourceType(
    "cluster", "type.googleapis.com/envoy.config.cluster.v3.Cluster", wildcard=True, immutable=True
)
ENDPOINTS = ResourceType("endpoints", "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment")
LISTENER = ResourceType(
    "listener", "type.googleapis.com/envoy.config.listener.v3.Listener", wildcard=True, immutable=True
)

LIVE_CONFIG = ResourceType(
    "live configuration",
    "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
    skips_identical=True,
)

# A resource is sent after the resources that it refers to. Removals are sent in reverse order.
PUSH_ORDER = (CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG)
RESOURCE_TYPES_BY_URL = {resource_type.url: resource_type for resource_type in PUSH_ORDER}
