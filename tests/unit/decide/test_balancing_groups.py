"""Who shares sessions with whom: groups, zones that Envoys keep to, and nodes that stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.balancing_groups import Sharers, quarters
from controlplane.model.nodes import Quarter
from controlplane.model.plan import Factor, NodePlan, Strategy
from tests.support.controlplane.balance_inputs import NOW, POLICY, A, B, C, D, node, nodes

ZONES = {"x": "a", "y": "b"}  # where the Envoys are


def found(
    *planned: NodePlan, full: tuple[Quarter, ...] = (), zones: dict[str, str] | None = None
) -> dict[tuple[str, str], list[str]]:
    """The nodes of each quarter."""
    each = quarters(nodes(*planned), full, ZONES if zones is None else zones, POLICY, NOW)
    return {(group, zone): list(capacities) for group, zone, capacities in each}


def test_without_labels_all_share_with_all_by_their_capacity() -> None:
    heavy = node(B, weight=300, factors={"cpu": Factor(0.5, 0.5, 1, "")})
    new = node(C, NOW - 15.0)
    policy = replace(POLICY, slow_start=30.0)
    (all_of_them,) = quarters(nodes(node(A), heavy, new), (), {}, policy, NOW)
    assert (all_of_them.group, all_of_them.zone) == ("", "")
    assert all_of_them.capacities == pytest.approx({A: 100.0, B: 150.0, C: 55.0})
    assert quarters({}, (), ZONES, POLICY, NOW) == []


def test_nodes_of_another_group_share_among_themselves() -> None:
    assert found(node(A), node(B, group="olap"), node(C), node(D, group="olap")) == {
        ("", ""): [A, C],
        ("olap", ""): [B, D],
    }


def test_nodes_in_the_zone_of_an_envoy_share_among_themselves_until_they_are_full() -> None:
    planned = [node(A, zone="a"), node(B, zone="a"), node(C, zone="b"), node(D, zone="c")]
    assert found(*planned) == {("", ""): [D], ("", "a"): [A, B], ("", "b"): [C]}
    assert found(*planned, full=(("", "a"), ("olap", "b"))) == {("", ""): [A, B, D], ("", "b"): [C]}
    assert found(*planned, zones={}) == {("", ""): [A, B, C, D]}
    assert found(node(A), node(B, zone="a"), zones={"x": ""}) == {("", ""): [A, B]}


def test_a_zone_is_one_for_each_group() -> None:
    planned = [node(A, zone="a"), node(B, zone="a", group="olap"), node(C, zone="b", group="olap")]
    assert found(*planned, full=(("olap", "a"),)) == {
        ("", "a"): [A],
        ("olap", ""): [B],
        ("olap", "b"): [C],
    }


def test_by_connections_alone_nobody_asks_where_a_node_is() -> None:
    planned = nodes(node(A, zone="a"), node(B, zone="b"))
    alone = replace(POLICY, strategy=Strategy.CONNECTION)
    assert quarters(planned, (), ZONES, alone, NOW) == [Sharers("", "", {A: 100.0, B: 100.0})]


def test_nodes_that_stand_in_have_no_capacity_while_others_of_their_group_serve() -> None:
    spare = node(C, backup=True)
    (together,) = quarters(nodes(node(A), node(B), spare), (), {}, POLICY, NOW)
    assert together.capacities == {A: 100.0, B: 100.0, C: 0.0}
    (alone,) = quarters(nodes(spare), (), {}, POLICY, NOW)
    assert alone.capacities == {C: 100.0}
    other = quarters(nodes(node(A), replace(spare, group="olap")), (), {}, POLICY, NOW)
    assert [each.capacities for each in other] == [{A: 100.0}, {C: 100.0}]
    near = quarters(nodes(node(A, zone="a"), replace(spare, zone="b")), (), ZONES, POLICY, NOW)
    assert near == [Sharers("", "a", {A: 100.0, C: 0.0})]


places = st.tuples(st.sampled_from(["", "g", "h"]), st.booleans(), st.sampled_from(["", "a", "b", "c"]))


@given(
    st.lists(places, max_size=9),
    st.sets(st.tuples(st.sampled_from(["", "g"]), st.sampled_from(["a", "b"]))),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["", "a", "b"])),
)
def test_each_node_is_in_one_quarter_of_its_group_and_each_quarter_has_capacity(
    drawn: list[tuple[str, bool, str]], full: set[Quarter], zones: dict[str, str]
) -> None:
    served = nodes(
        *(node(f"{i}:1", group=g, backup=b, zone=z) for i, (g, b, z) in enumerate(drawn)),
    )
    each = quarters(served, full, zones, POLICY, NOW)
    assert sorted(a for sharers in each for a in sharers.capacities) == sorted(served)
    for sharers in each:
        assert {served[a].group for a in sharers.capacities} == {sharers.group}
        assert any(sharers.capacities.values())
        taking = {a for a, width in sharers.capacities.items() if width}
        if sharers.zone:
            assert {served[a].zone for a in taking} == {sharers.zone}
            assert sharers.zone in zones.values()
