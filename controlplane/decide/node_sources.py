"""Several sources and the operators' wishes, merged into one list of nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, Source
from controlplane.model.plan import Plan


def merged_nodes(facts: Facts, intents: Intents) -> Mapping[str, Node]:
    """The nodes that some source names now, by address, with capacity and labels as operators want them.

    Where sources agree on an address the first of `Source` describes it; labels of the others fill gaps.
    """
    nodes: dict[str, Node] = {}
    for source in reversed(Source):
        topology = facts.topologies.get(source)
        if topology is None:
            continue
        for address, node in topology.nodes.items():
            existing = nodes.get(address)
            nodes[address] = node if existing is None else _merge_node(node, existing)
    for address in intents.weights.keys() | intents.labels.keys():
        if address in nodes:
            nodes[address] = with_overrides(nodes[address], intents)
    return nodes


def with_overrides(node: Node, intents: Intents) -> Node:
    """A node with capacity and labels as operators want them; the same object when they want nothing."""
    if node.address in intents.weights:
        node = replace(node, weight=intents.weights[node.address])
    if node.address in intents.labels:
        labels = MappingProxyType({**node.labels, **intents.labels[node.address]})
        node = replace(node, labels=labels)
    return node


def retained(facts: Facts, previous: Plan) -> frozenset[str]:
    """Addresses of nodes that are named by no source now but may not count as gone.

    A source that has not delivered a whole list since start (its server is away) proves nothing by silence.
    """
    incomplete_sources = {source for source in Source if not _is_complete(facts, source)}
    return frozenset(
        address for address, planned in previous.nodes.items() if planned.node.source in incomplete_sources
    )


def has_other_source(address: str, facts: Facts) -> bool:
    """Whether PD or the configuration names the node, so that it is not an operator's alone."""
    return any(
        address in facts.topologies[source].nodes
        for source in (Source.PD, Source.STATIC)
        if source in facts.topologies
    )


def all_sources_complete(facts: Facts) -> bool:
    """Whether every source has delivered a whole list since start."""
    return all(_is_complete(facts, source) for source in Source)


def _is_complete(facts: Facts, source: Source) -> bool:
    topology = facts.topologies.get(source)
    return topology is not None and topology.is_complete


def _merge_node(first: Node, second: Node) -> Node:
    return replace(
        first,
        status_address=first.status_address or second.status_address,
        labels=MappingProxyType({**second.labels, **first.labels}),
        # PD knows no capacity: what the configuration or an operator says of the same address counts.
        weight=second.weight if first.source is Source.PD else first.weight,
    )
