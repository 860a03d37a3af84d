"""The xDS resource types that the control plane publishes, and the order in which it sends them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One resource type.

    `wildcard`: a first request without names subscribes to all resources (xDS protocol, "How the client
    specifies what resources to return"). `immutable`: a resource that an Envoy holds is never changed. A
    changed listener ends the sessions on the old one after Envoy's drain time. A changed cluster keeps its
    sessions but drops them from all later load reports, so that a node with sessions would look empty. An
    Envoy without a listener has no sessions, so its cluster may be changed.
    `skips_identical`: Envoy acknowledges such a resource without reading it if it is identical to the last
    one it was sent, even if it rejected that (`FilterConfigSubscription::onConfigUpdate` in envoyproxy/envoy
    source/common/filter/config_discovery_impl.cc).
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

# A resource comes after those that it refers to; removals are sent in reverse order.
PUSH_ORDER = (CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG)
RESOURCE_TYPES_BY_URL = {kind.url: kind for kind in PUSH_ORDER}
