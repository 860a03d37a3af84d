"""Stamps: a leader's numbers never fall, and who was told what is told by them."""

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


def test_whoever_has_no_others_beside_it_has_no_stamps() -> None:
    offers = PlanGeneration()
    offers.advance(plan("a:1"))
    assert (offers.stamp, list(offers.closed)) == (None, ["a:1"])


def test_a_leader_counts_its_plans_and_goes_on_counting_in_the_same_term() -> None:
    offers = PlanGeneration()
    offers.become_leader(7, plan())
    offers.advance(plan("a:1"))
    assert offers.stamp == (7, 2)
    offers.go_standalone()
    offers.advance(plan("a:1", "b:1"))
    assert offers.stamp is None
    offers.become_leader(7, plan("a:1", "b:1"))
    assert offers.stamp == (7, 3)
    offers.become_leader(9, plan())
    assert offers.stamp == (9, 1)


def test_others_know_that_a_node_is_closed_from_the_plan_on_that_closes_it() -> None:
    offers = PlanGeneration()
    offers.become_leader(7, plan())
    offers.advance(plan("a:1"))
    offers.advance(plan("a:1", "b:1"))
    assert (
        list(offers.known_closed(None))
        == list(offers.known_closed((7, 1)))
        == list(offers.known_closed((6, 99)))
        == []
    )
    assert list(offers.known_closed((7, 2))) == ["a:1"]
    assert list(offers.known_closed((7, 3))) == ["a:1", "b:1"]


def test_what_is_closed_while_nobody_hears_of_it_is_told_with_the_next_plan_for_all() -> None:
    offers = PlanGeneration()
    offers.become_leader(7, plan("a:1"))
    offers.go_standalone()
    offers.advance(plan("a:1", "b:1"))
    assert list(offers.known_closed((7, 99))) == ["a:1"]
    offers.become_leader(8, plan("a:1", "b:1"))
    assert list(offers.known_closed((7, 99))) == ["a:1"]
    assert list(offers.known_closed((8, 1))) == ["a:1", "b:1"]


def test_what_opens_and_closes_again_is_to_be_told_anew() -> None:
    offers = PlanGeneration()
    offers.become_leader(7, plan("a:1"))
    offers.advance(plan())
    offers.advance(plan("a:1"))
    assert list(offers.known_closed((7, 2))) == []
    assert list(offers.known_closed((7, 3))) == ["a:1"]


def test_so_is_what_was_open_in_a_plan_that_was_missed() -> None:
    offers = PlanGeneration()
    offers.adopt(plan("a:1", at=1.0), (7, 2))
    offers.adopt(plan("a:1", at=9.0), (7, 6))
    assert list(offers.known_closed((7, 5))) == []
    assert list(offers.known_closed((7, 6))) == ["a:1"]


def test_a_new_leader_knows_what_the_old_one_told() -> None:
    offers = PlanGeneration()
    offers.adopt(plan("a:1"), (7, 5))
    offers.become_leader(9, plan("a:1"))
    assert list(offers.known_closed((7, 4))) == []
    assert list(offers.known_closed((7, 5))) == ["a:1"]


def test_a_follower_takes_later_plans_and_after_straying_the_leaders_whatever_it_is() -> None:
    offers = PlanGeneration()
    assert offers.is_newer((7, 1), 7)
    offers.adopt(plan(), (7, 5))
    assert not offers.is_newer((7, 5), 7)
    assert not offers.is_newer((7, 4), 7)
    assert offers.is_newer((7, 6), 7)
    assert offers.is_newer((9, 1), 9)
    offers.go_standalone()
    assert offers.is_newer((7, 5), 7)  # the same leader goes on, and has had no other plan since
    assert not offers.is_newer((7, 5), 9)  # ours is younger than what the last leader has left
    assert offers.is_newer((9, 1), 9)
