"""Topologies of the nodes in the configuration and of those added through the API. No I/O.

Both lists are always complete and current, so their topologies are complete from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from controlplane.config.settings import StaticNodeSettings
from controlplane.model.intents import AddedNode
from controlplane.model.nodes import Node, Source, Topology


def from_config(nodes: Sequence[StaticNodeSettings]) -> Topology:
    """Return the topology of the `nodes` section of the configuration; validation made addresses unique."""
    return Topology(
        source=Source.STATIC,
        nodes=MappingProxyType(
            {
                node.address: Node(
                    address=node.address,
                    source=Source.STATIC,
                    status_address=node.status_address,
                    labels=MappingProxyType(dict(node.labels)),
                    weight=node.weight,
                )
                for node in nodes
            }
        ),
        is_complete=True,
    )


def from_api(nodes: Mapping[str, AddedNode], default_weight: int) -> Topology:
    """Return the topology of the nodes that operators added; those without a weight get `default_weight`."""
    return Topology(
        source=Source.API,
        nodes=MappingProxyType(
            {
                address: Node(
                    address=address,
                    source=Source.API,
                    status_address=node.status_address,
                    labels=node.labels,
                    weight=default_weight if node.weight is None else node.weight,
                )
                for address, node in nodes.items()
            }
        ),
        is_complete=True,
    )
