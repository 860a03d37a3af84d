"""When it is forgotten that a node was to be removed."""

from __future__ import annotations

from dataclasses import replace

from controlplane.decide.completed_removals import forget_completed_removals
from controlplane.decide.node_sources import all_sources_complete
from controlplane.model.facts import Facts
from controlplane.model.intents import AddedNode, DrainIntent, Intents
from controlplane.model.nodes import Node, Source, Topology
from controlplane.model.plan import Plan
from tests.support.controlplane.balance_inputs import A, B, node_plan, node_plans

ASKED = Intents(
    added={A: AddedNode(A), B: AddedNode(B)},
    removed={A: 1.0},
    drains={A: DrainIntent(1.0, 60.0)},
    weights={A: 5, B: 6},
    labels={A: {"zone": "a"}},
)
KNOWN = Facts(topologies={source: Topology(source, is_complete=True) for source in Source})


def named(source: Source) -> Facts:
    """One source still names the node."""
    there = Topology(source, {A: Node(A, source)}, is_complete=True)
    return replace(KNOWN, topologies={**KNOWN.topologies, source: there})


def test_nothing_is_forgotten_while_the_node_is_there() -> None:
    assert forget_completed_removals(ASKED, Plan(node_plans(node_plan(A))), KNOWN) is ASKED
    assert forget_completed_removals(Intents(weights={A: 5}), Plan(), KNOWN) == Intents(weights={A: 5})


def test_all_that_was_asked_for_a_node_that_has_left_is_forgotten_and_nothing_of_others() -> None:
    left = forget_completed_removals(ASKED, Plan(node_plans(node_plan(B))), KNOWN)
    assert left == Intents(added={B: AddedNode(B)}, weights={B: 6})


def test_what_pd_or_the_configuration_names_stays_removed() -> None:
    for source in (Source.PD, Source.STATIC):
        left = forget_completed_removals(ASKED, Plan(), named(source))
        assert left == Intents(added={B: AddedNode(B)}, removed={A: 1.0}, weights={B: 6})
        assert forget_completed_removals(left, Plan(), named(source)) == left


def test_what_no_operator_added_stays_removed_however_often_it_registers_anew() -> None:
    found = Intents(removed={A: 1.0}, weights={A: 5})
    assert forget_completed_removals(found, Plan(), KNOWN) == Intents(removed={A: 1.0})


def test_nothing_is_forgotten_before_each_source_has_told_all() -> None:
    for source in Source:
        partly = replace(KNOWN, topologies={**KNOWN.topologies, source: Topology(source)})
        assert not all_sources_complete(partly)
        assert forget_completed_removals(ASKED, Plan(), partly) is ASKED
    assert forget_completed_removals(ASKED, Plan(), Facts()) is ASKED
