"""Merge the nodes of all sources and the overrides of operators into one list of nodes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, Source
from controlplane.model.plan import Plan


def merged_nodes(facts: Facts, intents: Intents) -> Mapping[str, Node]:
    """Return the nodes that any source defines now, by address, with the overrides of operators applied.

    If several sources define an address, the first in `Source` wins; labels of the others fill gaps.
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
    """Return the node with weight and labels from the intents; the same object if there are none."""
    if node.address in intents.weights:
        node = replace(node, weight=intents.weights[node.address])
    if node.address in intents.labels:
        labels = MappingProxyType({**node.labels, **intents.labels[node.address]})
        node = replace(node, labels=labels)
    return node


def retained(facts: Facts, previous: Plan) -> frozenset[str]:
    """Return addresses in the previous plan that no source may be taken to have dropped.

    While a source has not delivered a complete list since start (its server is unreachable), a missing node
    does not mean that it is gone.
    """
    incomplete_sources = {source for source in Source if not _is_complete(facts, source)}
    return frozenset(
        address for address, planned in previous.nodes.items() if planned.node.source in incomplete_sources
    )


def has_other_source(address: str, facts: Facts) -> bool:
    """Return whether PD or the configuration defines the node, not only an operator."""
    return any(
        address in facts.topologies[source].nodes
        for source in (Source.PD, Source.STATIC)
        if source in facts.topologies
    )


def all_sources_complete(facts: Facts) -> bool:
    """Return whether every source has delivered a complete list since start."""
    return all(_is_complete(facts, source) for source in Source)


def _is_complete(facts: Facts, source: Source) -> bool:
    topology = facts.topologies.get(source)
    return topology is not None and topology.is_complete


def _merge_node(first: Node, second: Node) -> Node:
    return replace(
        first,
        status_address=first.status_address or second.status_address,
        labels=MappingProxyType({**second.labels, **first.labels}),
        # PD knows no weights: the weight from the configuration or an operator applies.
        weight=second.weight if first.source is Source.PD else first.weight,
    )
