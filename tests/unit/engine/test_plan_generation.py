"""Stamps of plans (term, serial): they never decrease, and show which nodes a replica knows to be closed."""

from __future__ import annotations

from controlplane.engine.plan_generation import PlanGeneration
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan


def plan(*closed: str, at: float = 1.0) -> Plan:
    nodes = {
        address: NodePlan(
            Node(address, Source.PD), State.ACTIVE, "", 0.0, closed_since=at if address in closed else None
        )
        for address in ("a:1", "b:1")
    }
    return Plan(nodes=nodes)


def test_single_control_plane_has_no_stamps() -> None:
    generation = PlanGeneration()
    generation.advance(plan("a:1"))
    assert (generation.stamp, list(generation.closed)) == (None, ["a:1"])


def test_leader_serials_continue_within_a_term() -> None:
    generation = PlanGeneration()
    generation.become_leader(7, plan())
    generation.advance(plan("a:1"))
    assert generation.stamp == (7, 2)
    generation.go_standalone()
    generation.advance(plan("a:1", "b:1"))
    assert generation.stamp is None
    generation.become_leader(7, plan("a:1", "b:1"))
    assert generation.stamp == (7, 3)
    generation.become_leader(9, plan())
    assert generation.stamp == (9, 1)


def test_closed_node_is_known_from_the_plan_that_closes_it() -> None:
    generation = PlanGeneration()
    generation.become_leader(7, plan())
    generation.advance(plan("a:1"))
    generation.advance(plan("a:1", "b:1"))
    assert (
        list(generation.closed_since_plan(None))
        == list(generation.closed_since_plan((7, 1)))
        == list(generation.closed_since_plan((6, 99)))
        == []
    )
    assert list(generation.closed_since_plan((7, 2))) == ["a:1"]
    assert list(generation.closed_since_plan((7, 3))) == ["a:1", "b:1"]


def test_node_closed_while_standalone_is_known_from_the_next_shared_plan() -> None:
    generation = PlanGeneration()
    generation.become_leader(7, plan("a:1"))
    generation.go_standalone()
    generation.advance(plan("a:1", "b:1"))
    assert list(generation.closed_since_plan((7, 99))) == ["a:1"]
    generation.become_leader(8, plan("a:1", "b:1"))
    assert list(generation.closed_since_plan((7, 99))) == ["a:1"]
    assert list(generation.closed_since_plan((8, 1))) == ["a:1", "b:1"]


def test_reopened_and_closed_node_is_known_only_from_the_new_plan() -> None:
    generation = PlanGeneration()
    generation.become_leader(7, plan("a:1"))
    generation.advance(plan())
    generation.advance(plan("a:1"))
    assert list(generation.closed_since_plan((7, 2))) == []
    assert list(generation.closed_since_plan((7, 3))) == ["a:1"]


def test_node_reopened_in_a_missed_plan_is_known_only_from_the_new_plan() -> None:
    generation = PlanGeneration()
    generation.adopt(plan("a:1", at=1.0), (7, 2))
    generation.adopt(plan("a:1", at=9.0), (7, 6))
    assert list(generation.closed_since_plan((7, 5))) == []
    assert list(generation.closed_since_plan((7, 6))) == ["a:1"]


def test_new_leader_knows_the_closed_nodes_of_the_old_leader() -> None:
    generation = PlanGeneration()
    generation.adopt(plan("a:1"), (7, 5))
    generation.become_leader(9, plan("a:1"))
    assert list(generation.closed_since_plan((7, 4))) == []
    assert list(generation.closed_since_plan((7, 5))) == ["a:1"]


def test_follower_adopts_newer_plans_or_any_leader_plan_after_standalone() -> None:
    generation = PlanGeneration()
    assert generation.is_newer((7, 1), 7)
    generation.adopt(plan(), (7, 5))
    assert not generation.is_newer((7, 5), 7)
    assert not generation.is_newer((7, 4), 7)
    assert generation.is_newer((7, 6), 7)
    assert generation.is_newer((9, 1), 9)
    generation.go_standalone()
    assert generation.is_newer((7, 5), 7)  # the same leader continues with the same plan
    assert not generation.is_newer((7, 5), 9)  # no plan of an earlier term replaces ours
    assert generation.is_newer((9, 1), 9)
