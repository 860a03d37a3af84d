"""Discovery requests as an Envoy sends them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2

from controlplane.model.nodes import EMPTY_MAP
from controlplane.xds.resource_type import ResourceType


def sotw_request(
    kind: ResourceType, version: str, nonce: str, names: Collection[str], error_detail: str = ""
) -> Any:
    """Build a state-of-the-world request. With `error_detail`, the request is a NACK."""
    return discovery_pb2.DiscoveryRequest(
        type_url=kind.url,
        version_info=version,
        response_nonce=nonce,
        resource_names=names,
        error_detail={"message": error_detail} if error_detail else None,
    )


def delta_request(
    kind: ResourceType,
    nonce: str = "",
    subscribe: Collection[str] = (),
    unsubscribe: Collection[str] = (),
    initial_versions: Mapping[str, str] = EMPTY_MAP,
    error_detail: str = "",
) -> Any:
    """Build an incremental request. With `error_detail`, the request is a NACK."""
    return discovery_pb2.DeltaDiscoveryRequest(
        type_url=kind.url,
        response_nonce=nonce,
        resource_names_subscribe=subscribe,
        resource_names_unsubscribe=unsubscribe,
        initial_resource_versions=dict(initial_versions),
        error_detail={"message": error_detail} if error_detail else None,
    )
