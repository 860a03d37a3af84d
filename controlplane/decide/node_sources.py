"""Merge the nodes of all sources and the overrides of operators into one list of nodes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from controlplane.intents import changes as intent_changes
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, Source
from controlplane.model.plan import Plan


def merged_nodes(facts: Facts, intents: Intents) -> Mapping[str, Node]:
    """Return the nodes of all sources, by address, with the overrides of operators applied.

    If several sources list an address, the first in the order of `Source` wins. Labels that only another
    source sets are added.
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
    """Return the node with its weight and labels from the intents, or the same object if they have none."""
    if node.address in intents.weights:
        node = replace(node, weight=intents.weights[node.address])
    if node.address in intents.labels:
        labels = MappingProxyType({**node.labels, **intents.labels[node.address]})
        node = replace(node, labels=labels)
    return node


def addresses_of_incomplete_sources(facts: Facts, previous: Plan) -> frozenset[str]:
    """Return the addresses of the previous plan whose source has not delivered a complete list since start.

    Such a source may be unreachable, so a node that it does not list may still exist.
    """
    incomplete = _incomplete_sources(facts)
    return frozenset(a for a, planned in previous.nodes.items() if planned.node.source in incomplete)


def has_other_source(address: str, facts: Facts) -> bool:
    """Return whether PD or the configuration defines the node, not only an operator."""
    return any(
        address in facts.topologies[source].nodes
        for source in (Source.PD, Source.STATIC)
        if source in facts.topologies
    )


def all_sources_complete(facts: Facts) -> bool:
    """Return whether every source has delivered a complete list since start."""
    return not _incomplete_sources(facts)


def _incomplete_sources(facts: Facts) -> set[Source]:
    """Return the sources that have not delivered a complete list since start."""
    return set(Source) - {source for source, topology in facts.topologies.items() if topology.is_complete}


def _merge_node(first: Node, second: Node) -> Node:
    return replace(
        first,
        status_address=first.status_address or second.status_address,
        labels=MappingProxyType({**second.labels, **first.labels}),
        # PD has no weights, so the weight of the other source applies.
        weight=second.weight if first.source is Source.PD else first.weight,
    )


def forget_completed_removals(intents: Intents, plan: Plan, facts: Facts) -> Intents:
    """Return the intents without the requests for removed nodes that have left the plan.

    Before every source has delivered a complete list of nodes, all intents stay.
    """
    if not all_sources_complete(facts):
        return intents
    remaining = intents
    for address in intents.removed.keys() - plan.nodes.keys():
        # A node from PD or the configuration stays removed, even if it registers again, until an operator
        # adds it.
        is_defined_elsewhere = has_other_source(address, facts) or address not in intents.added
        remaining = intent_changes.forget(remaining, address, has_other_source=is_defined_elsewhere)
    return remaining
