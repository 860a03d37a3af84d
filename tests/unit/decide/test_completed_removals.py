"""When the intents of removed nodes are deleted."""

from __future__ import annotations

from dataclasses import replace

from controlplane.decide.node_sources import all_sources_complete, forget_completed_removals
from controlplane.model.facts import Facts
from controlplane.model.intents import AddedNode, DrainIntent, Intents
from controlplane.model.nodes import Node, Source, Topology
from controlplane.model.plan import Plan
from tests.support.controlplane.balance_inputs import A, B, node_plan, node_plans

INTENTS = Intents(
    added={A: AddedNode(A), B: AddedNode(B)},
    removed={A: 1.0},
    drains={A: DrainIntent(1.0, 60.0)},
    weights={A: 5, B: 6},
    labels={A: {"zone": "a"}},
)
FACTS = Facts(topologies={source: Topology(source, is_complete=True) for source in Source})


def facts_with_node_in(source: Source) -> Facts:
    """Return facts in which one source still defines the node."""
    topology = Topology(source, {A: Node(A, source)}, is_complete=True)
    return replace(FACTS, topologies={**FACTS.topologies, source: topology})


def test_keeps_intents_while_the_node_is_in_the_plan() -> None:
    assert forget_completed_removals(INTENTS, Plan(node_plans(node_plan(A))), FACTS) is INTENTS
    assert forget_completed_removals(Intents(weights={A: 5}), Plan(), FACTS) == Intents(weights={A: 5})


def test_drops_all_intents_of_a_removed_node_only() -> None:
    remaining = forget_completed_removals(INTENTS, Plan(node_plans(node_plan(B))), FACTS)
    assert remaining == Intents(added={B: AddedNode(B)}, weights={B: 6})


def test_node_defined_by_pd_or_configuration_stays_removed() -> None:
    for source in (Source.PD, Source.STATIC):
        remaining = forget_completed_removals(INTENTS, Plan(), facts_with_node_in(source))
        assert remaining == Intents(added={B: AddedNode(B)}, removed={A: 1.0}, weights={B: 6})
        assert forget_completed_removals(remaining, Plan(), facts_with_node_in(source)) == remaining


def test_node_that_no_operator_added_stays_removed() -> None:
    intents = Intents(removed={A: 1.0}, weights={A: 5})
    assert forget_completed_removals(intents, Plan(), FACTS) == Intents(removed={A: 1.0})


def test_keeps_intents_until_all_sources_are_complete() -> None:
    for source in Source:
        incomplete = replace(FACTS, topologies={**FACTS.topologies, source: Topology(source)})
        assert not all_sources_complete(incomplete)
        assert forget_completed_removals(INTENTS, Plan(), incomplete) is INTENTS
    assert forget_completed_removals(INTENTS, Plan(), Facts()) is INTENTS
