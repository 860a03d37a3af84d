"""Who shares sessions with whom: groups, zones that Envoys keep to, and nodes that stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.balancing_groups import BalancingGroup, balancing_groups
from controlplane.model.nodes import GroupZone
from controlplane.model.plan import BalancePolicy, Factor, NodePlan
from tests.support.controlplane.balance_inputs import NOW, POLICY, A, B, C, D, node_plan, node_plans

ZONES = {"x": "a", "y": "b"}  # where the Envoys are


def found(
    *planned: NodePlan, full: tuple[GroupZone, ...] = (), zones: dict[str, str] | None = None
) -> dict[tuple[str, str], list[str]]:
    """The nodes of each quarter."""
    each = balancing_groups(node_plans(*planned), full, ZONES if zones is None else zones, POLICY, NOW)
    return {(group, zone): list(capacities) for group, zone, capacities in each}


def test_without_labels_all_share_with_all_by_their_capacity() -> None:
    heavy = node_plan(B, weight=300, factors={"cpu": Factor(0.5, 0.5, 1, "")})
    new = node_plan(C, NOW - 15.0)
    policy = replace(POLICY, slow_start=30.0)
    (all_of_them,) = balancing_groups(node_plans(node_plan(A), heavy, new), (), {}, policy, NOW)
    assert (all_of_them.group, all_of_them.zone) == ("", "")
    assert all_of_them.capacities == pytest.approx({A: 100.0, B: 150.0, C: 55.0})
    assert balancing_groups({}, (), ZONES, POLICY, NOW) == []


def test_nodes_of_another_group_share_among_themselves() -> None:
    assert found(node_plan(A), node_plan(B, group="olap"), node_plan(C), node_plan(D, group="olap")) == {
        ("", ""): [A, C],
        ("olap", ""): [B, D],
    }


def test_nodes_in_the_zone_of_an_envoy_share_among_themselves_until_they_are_full() -> None:
    planned = [node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"), node_plan(D, zone="c")]
    assert found(*planned) == {("", ""): [D], ("", "a"): [A, B], ("", "b"): [C]}
    assert found(*planned, full=(("", "a"), ("olap", "b"))) == {("", ""): [A, B, D], ("", "b"): [C]}
    assert found(*planned, zones={}) == {("", ""): [A, B, C, D]}
    assert found(node_plan(A), node_plan(B, zone="a"), zones={"x": ""}) == {("", ""): [A, B]}


def test_a_zone_is_one_for_each_group() -> None:
    planned = [
        node_plan(A, zone="a"),
        node_plan(B, zone="a", group="olap"),
        node_plan(C, zone="b", group="olap"),
    ]
    assert found(*planned, full=(("olap", "a"),)) == {
        ("", "a"): [A],
        ("olap", ""): [B],
        ("olap", "b"): [C],
    }


def test_by_connections_alone_nobody_asks_where_a_node_is() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="b"))
    alone = replace(POLICY, balance_policy=BalancePolicy.CONNECTION)
    assert balancing_groups(planned, (), ZONES, alone, NOW) == [BalancingGroup("", "", {A: 100.0, B: 100.0})]


def test_nodes_that_stand_in_have_no_capacity_while_others_of_their_group_serve() -> None:
    spare = node_plan(C, backup=True)
    (together,) = balancing_groups(node_plans(node_plan(A), node_plan(B), spare), (), {}, POLICY, NOW)
    assert together.capacities == {A: 100.0, B: 100.0, C: 0.0}
    (alone,) = balancing_groups(node_plans(spare), (), {}, POLICY, NOW)
    assert alone.capacities == {C: 100.0}
    other = balancing_groups(node_plans(node_plan(A), replace(spare, group="olap")), (), {}, POLICY, NOW)
    assert [each.capacities for each in other] == [{A: 100.0}, {C: 100.0}]
    near = balancing_groups(
        node_plans(node_plan(A, zone="a"), replace(spare, zone="b")), (), ZONES, POLICY, NOW
    )
    assert near == [BalancingGroup("", "a", {A: 100.0, C: 0.0})]


places = st.tuples(st.sampled_from(["", "g", "h"]), st.booleans(), st.sampled_from(["", "a", "b", "c"]))


@given(
    st.lists(places, max_size=9),
    st.sets(st.tuples(st.sampled_from(["", "g"]), st.sampled_from(["a", "b"]))),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["", "a", "b"])),
)
def test_each_node_is_in_one_quarter_of_its_group_and_each_quarter_has_capacity(
    drawn: list[tuple[str, bool, str]], full: set[GroupZone], zones: dict[str, str]
) -> None:
    served = node_plans(
        *(node_plan(f"{i}:1", group=g, backup=b, zone=z) for i, (g, b, z) in enumerate(drawn)),
    )
    each = balancing_groups(served, full, zones, POLICY, NOW)
    assert sorted(a for sharers in each for a in sharers.capacities) == sorted(served)
    for sharers in each:
        assert {served[a].group for a in sharers.capacities} == {sharers.group}
        assert any(sharers.capacities.values())
        taking = {a for a, width in sharers.capacities.items() if width}
        if sharers.zone:
            assert {served[a].zone for a in taking} == {sharers.zone}
            assert sharers.zone in zones.values()
