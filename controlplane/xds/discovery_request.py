"""Parse the discovery requests that an Envoy sends on its stream.

An Envoy's first message holds about 60 kB of extension names; nothing here keeps the message itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf.message import DecodeError

from controlplane.errors import TidevoyError
from controlplane.model.nodes import EMPTY_MAP
from controlplane.xds.resources.profile import (
    CONTRIB_FILTER,
    GROUP_METADATA_KEY,
    MODULE_METADATA_KEY,
    EnvoyCapabilities,
)

_MAX_ERROR_CHARS = 2_000  # an Envoy's error text is cut to this length


class BadRequest(TidevoyError):
    """A message on an xDS stream is malformed or incomplete."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"invalid xDS message: {problem}")


@dataclass(frozen=True, slots=True)
class EnvoyNode:
    """The `node` field of an Envoy's first message."""

    id: str
    version: str
    capabilities: EnvoyCapabilities
    group: str = ""  # the only group that it serves; empty: all
    zone: str = ""  # its location; empty: unknown


@dataclass(frozen=True, slots=True)
class SotwRequest:
    """State of the world: `names` is the full subscription; with `error_detail` the request is a NACK."""

    type_url: str
    version: str = ""
    nonce: str = ""
    names: frozenset[str] = frozenset()
    error_detail: str = ""
    envoy_node: EnvoyNode | None = None


@dataclass(frozen=True, slots=True)
class DeltaRequest:
    """Incremental: names to add and remove; `initial_versions` is name -> held version after a reconnect."""

    type_url: str
    nonce: str = ""
    subscribe: frozenset[str] = frozenset()
    unsubscribe: frozenset[str] = frozenset()
    initial_versions: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAP)
    error_detail: str = ""
    envoy_node: EnvoyNode | None = None


def parse_sotw(data: bytes) -> SotwRequest:
    """Parse a serialised `discovery.v3.DiscoveryRequest`. Raises BadRequest."""
    message = _decode(discovery_pb2.DiscoveryRequest, data)
    return SotwRequest(
        message.type_url,
        message.version_info,
        message.response_nonce,
        frozenset(message.resource_names),
        _error_text(message),
        _parse_envoy_node(message, data),
    )


def parse_delta(data: bytes) -> DeltaRequest:
    """Parse a serialised `discovery.v3.DeltaDiscoveryRequest`. Raises BadRequest."""
    message = _decode(discovery_pb2.DeltaDiscoveryRequest, data)
    return DeltaRequest(
        message.type_url,
        message.response_nonce,
        frozenset(message.resource_names_subscribe),
        frozenset(message.resource_names_unsubscribe),
        dict(message.initial_resource_versions),
        _error_text(message),
        _parse_envoy_node(message, data),
    )


def _decode(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadRequest(f"it is not a {kind.DESCRIPTOR.full_name} ({error})") from None


def _error_text(message: Any) -> str:
    if not message.HasField("error_detail"):
        return ""
    detail = message.error_detail
    # One line; protobuf varies the white space of its texts on purpose.
    return " ".join(detail.message.split())[:_MAX_ERROR_CHARS] or f"no text, code {detail.code}"


def _parse_envoy_node(message: Any, data: bytes) -> EnvoyNode | None:
    if not message.HasField("node"):
        return None
    node = message.node
    build_version = node.user_agent_build_version.version
    version = f"{build_version.major_number}.{build_version.minor_number}.{build_version.patch}"
    return EnvoyNode(
        node.id,
        version if node.HasField("user_agent_build_version") else node.user_agent_version,
        EnvoyCapabilities(
            # Iterating over 516 extensions costs five times as much as parsing the message.
            CONTRIB_FILTER.encode() in data
            and any(extension.name == CONTRIB_FILTER for extension in node.extensions),
            node.metadata.fields[MODULE_METADATA_KEY].string_value,
        ),
        node.metadata.fields[GROUP_METADATA_KEY].string_value,
        node.locality.zone,
    )
