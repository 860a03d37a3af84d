"""Merging the nodes of several sources and the overrides of operators."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from controlplane.decide.node_sources import (
    addresses_of_incomplete_sources,
    all_sources_complete,
    merged_nodes,
)
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.nodes import Node, Source, State, Topology
from controlplane.model.plan import NodePlan, Plan

A, B = "10.0.0.1:4000", "10.0.0.2:4000"


def topology(source: Source, *nodes: Node, complete: bool = True) -> Topology:
    return Topology(source, {node.address: node for node in nodes}, is_complete=complete)


def facts(*topologies: Topology) -> Facts:
    return Facts({topology.source: topology for topology in topologies})


IN_PD = Node(A, Source.PD, "10.0.0.1:10080", "v8.5.3", labels={"zone": "pd", "rack": "1"}, registered=False)
IN_CONFIG = Node(A, Source.STATIC, "10.0.0.1:1", labels={"zone": "static", "x": "1"}, weight=300)
ADDED = Node(A, Source.API, "10.0.0.1:2", labels={"zone": "api", "y": "2"}, weight=50)
BY_SOURCE = {Source.PD: IN_PD, Source.STATIC: IN_CONFIG, Source.API: ADDED}


@pytest.mark.parametrize(
    "sources", [order for n in (1, 2, 3) for order in itertools.permutations(Source, n)], ids=str
)
def test_first_source_wins_and_others_fill_gaps(sources: tuple[Source, ...]) -> None:
    merged = merged_nodes(facts(*(topology(source, BY_SOURCE[source]) for source in sources)), Intents())[A]
    ranked = [source for source in Source if source in sources]
    first = BY_SOURCE[ranked[0]]
    assert merged.source is ranked[0]
    assert (merged.status_address, merged.version, merged.registered) == (
        first.status_address,
        first.version,
        first.registered,
    )
    assert merged.labels["zone"] == first.labels["zone"]
    assert set(merged.labels) == set().union(*(BY_SOURCE[source].labels for source in ranked))
    # PD knows no weights, so the weight comes from the first other source.
    weight_source = next((source for source in ranked if source is not Source.PD), Source.PD)
    assert merged.weight == BY_SOURCE[weight_source].weight


def test_missing_status_address_comes_from_the_next_source() -> None:
    merged = merged_nodes(
        facts(
            topology(Source.PD, replace(IN_PD, status_address=None)),
            topology(Source.STATIC, replace(IN_CONFIG, status_address=None)),
            topology(Source.API, ADDED),
        ),
        Intents(),
    )
    assert merged[A].status_address == ADDED.status_address


def test_operators_override_weight_and_labels() -> None:
    intents = Intents(weights={A: 7, B: 8}, labels={A: {"zone": "mine"}, B: {"zone": "unused"}})
    merged = merged_nodes(facts(topology(Source.PD, IN_PD), topology(Source.STATIC, IN_CONFIG)), intents)
    assert list(merged) == [A]  # overrides do not create nodes
    assert merged[A].weight == 7
    assert dict(merged[A].labels) == {"zone": "mine", "rack": "1", "x": "1"}


def test_incomplete_source_retains_its_nodes() -> None:
    before = Plan(
        {
            node.address: NodePlan(node, State.ACTIVE, "a reason", 0.0)
            for node in (IN_PD, replace(ADDED, address=B))
        }
    )
    other_sources = (topology(Source.STATIC), topology(Source.API))
    assert addresses_of_incomplete_sources(facts(*other_sources), before) == {A}
    incomplete = facts(*other_sources, topology(Source.PD, complete=False))
    assert addresses_of_incomplete_sources(incomplete, before) == {A}
    assert addresses_of_incomplete_sources(facts(*other_sources, topology(Source.PD)), before) == frozenset()
    assert addresses_of_incomplete_sources(facts(), before) == {A, B}


def test_complete_when_every_source_is_complete() -> None:
    other_sources = [topology(Source.STATIC), topology(Source.API)]
    assert not all_sources_complete(facts(*other_sources))
    assert not all_sources_complete(facts(*other_sources, topology(Source.PD, complete=False)))
    assert all_sources_complete(facts(*other_sources, topology(Source.PD)))
