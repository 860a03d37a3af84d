"""Builds the topologies of the nodes from the configuration and the API; both are always complete. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from controlplane.config.settings import StaticNodeSettings
from controlplane.model.intents import AddedNode
from controlplane.model.nodes import Node, Source, Topology


def from_config(nodes: Sequence[StaticNodeSettings]) -> Topology:
    """Return the topology of the configured `nodes`. Settings validation guarantees unique addresses."""
    return _topology(Source.STATIC, ((node.address, node, node.weight) for node in nodes))


def from_api(nodes: Mapping[str, AddedNode], default_weight: int) -> Topology:
    """Return the topology of the nodes that operators added. Nodes without a weight get `default_weight`."""
    weighted = (
        (address, node, default_weight if node.weight is None else node.weight)
        for address, node in nodes.items()
    )
    return _topology(Source.API, weighted)


def _topology(source: Source, nodes: Iterable[tuple[str, StaticNodeSettings | AddedNode, int]]) -> Topology:
    by_address = {
        address: Node(address, source, node.status_address, labels=dict(node.labels), weight=weight)
        for address, node, weight in nodes
    }
    return Topology(source=source, nodes=MappingProxyType(by_address), is_complete=True)
