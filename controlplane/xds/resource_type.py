"""The kinds of xDS resources that we publish, and the order in which an Envoy may be given them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One kind of resource.

    `wildcard`: a first request that names nothing asks for all of them (xDS protocol, "How the client
    specifies what resources to return"). `sticky`: a resource that an Envoy holds is never changed under it.
    A changed listener ends the sessions on the old one after Envoy's drain time. A changed cluster keeps its
    sessions but drops them from all load reports to come, so that a node with sessions would look empty. An
    Envoy without a listener has no sessions: the cluster of such a one may be changed.
    `compared`: Envoy acknowledges such a resource without reading it when it is identical to the last one it
    was sent, even if it refused that (`FilterConfigSubscription::onConfigUpdate` in envoyproxy/envoy
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

# What refers to something comes after it; removals go the other way round.
PUSH_ORDER = (CLUSTER, ENDPOINTS, LISTENER, LIVE_CONFIG)
RESOURCE_TYPES_BY_URL = {kind.url: kind for kind in PUSH_ORDER}
