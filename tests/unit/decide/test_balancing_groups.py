"""Balancing groups, within which sessions are balanced: how node groups, zones and backups form them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.fair_share import BalancingGroup, balancing_groups
from controlplane.model.nodes import GroupZone
from controlplane.model.plan import BalancePolicy, Factor, NodePlan
from tests.support.controlplane.balance_inputs import NOW, POLICY, A, B, C, D, node_plan, node_plans

ZONES = {"x": "a", "y": "b"}  # zone of each Envoy


def grouped_nodes(
    *planned: NodePlan, overloaded: tuple[GroupZone, ...] = (), zones: dict[str, str] | None = None
) -> dict[tuple[str, str], list[str]]:
    """Return the nodes of each balancing group, by group and zone."""
    groups = balancing_groups(
        node_plans(*planned), overloaded, ZONES if zones is None else zones, POLICY, NOW
    )
    return {(group, zone): list(capacities) for group, zone, capacities in groups}


def test_nodes_without_labels_form_one_group() -> None:
    heavy = node_plan(B, weight=300, factors={"cpu": Factor(0.5, 0.5, 1, "")})
    new = node_plan(C, NOW - 15.0)
    policy = replace(POLICY, slow_start=30.0)
    (group,) = balancing_groups(node_plans(node_plan(A), heavy, new), (), {}, policy, NOW)
    assert (group.group, group.zone) == ("", "")
    assert group.capacities == pytest.approx({A: 100.0, B: 150.0, C: 55.0})
    assert balancing_groups({}, (), ZONES, POLICY, NOW) == []


def test_node_groups_are_separate() -> None:
    assert grouped_nodes(
        node_plan(A), node_plan(B, group="olap"), node_plan(C), node_plan(D, group="olap")
    ) == {
        ("", ""): [A, C],
        ("olap", ""): [B, D],
    }


def test_zones_with_envoys_are_separate_unless_overloaded() -> None:
    planned = [node_plan(A, zone="a"), node_plan(B, zone="a"), node_plan(C, zone="b"), node_plan(D, zone="c")]
    assert grouped_nodes(*planned) == {("", ""): [D], ("", "a"): [A, B], ("", "b"): [C]}
    assert grouped_nodes(*planned, overloaded=(("", "a"), ("olap", "b"))) == {
        ("", ""): [A, B, D],
        ("", "b"): [C],
    }
    assert grouped_nodes(*planned, zones={}) == {("", ""): [A, B, C, D]}
    assert grouped_nodes(node_plan(A), node_plan(B, zone="a"), zones={"x": ""}) == {("", ""): [A, B]}


def test_zones_are_separate_per_node_group() -> None:
    planned = [
        node_plan(A, zone="a"),
        node_plan(B, zone="a", group="olap"),
        node_plan(C, zone="b", group="olap"),
    ]
    assert grouped_nodes(*planned, overloaded=(("olap", "a"),)) == {
        ("", "a"): [A],
        ("olap", ""): [B],
        ("olap", "b"): [C],
    }


def test_connection_policy_ignores_zones() -> None:
    planned = node_plans(node_plan(A, zone="a"), node_plan(B, zone="b"))
    policy = replace(POLICY, balance_policy=BalancePolicy.CONNECTION)
    assert balancing_groups(planned, (), ZONES, policy, NOW) == [BalancingGroup("", "", {A: 100.0, B: 100.0})]


def test_unused_backups_have_no_capacity() -> None:
    backup = node_plan(C, backup=True)
    (unused,) = balancing_groups(node_plans(node_plan(A), node_plan(B), backup), (), {}, POLICY, NOW)
    assert unused.capacities == {A: 100.0, B: 100.0, C: 0.0}
    (in_use,) = balancing_groups(node_plans(backup), (), {}, POLICY, NOW)
    assert in_use.capacities == {C: 100.0}
    two_groups = balancing_groups(
        node_plans(node_plan(A), replace(backup, group="olap")), (), {}, POLICY, NOW
    )
    assert [group.capacities for group in two_groups] == [{A: 100.0}, {C: 100.0}]
    two_zones = balancing_groups(
        node_plans(node_plan(A, zone="a"), replace(backup, zone="b")), (), ZONES, POLICY, NOW
    )
    assert two_zones == [BalancingGroup("", "a", {A: 100.0, C: 0.0})]


locations = st.tuples(st.sampled_from(["", "g", "h"]), st.booleans(), st.sampled_from(["", "a", "b", "c"]))


@given(
    st.lists(locations, max_size=9),
    st.sets(st.tuples(st.sampled_from(["", "g"]), st.sampled_from(["a", "b"]))),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["", "a", "b"])),
)
def test_each_node_is_in_one_group_and_each_group_has_capacity(
    drawn: list[tuple[str, bool, str]], overloaded: set[GroupZone], zones: dict[str, str]
) -> None:
    served = node_plans(
        *(node_plan(f"{i}:1", group=g, backup=b, zone=z) for i, (g, b, z) in enumerate(drawn)),
    )
    groups = balancing_groups(served, overloaded, zones, POLICY, NOW)
    assert sorted(a for group in groups for a in group.capacities) == sorted(served)
    for group in groups:
        assert {served[a].group for a in group.capacities} == {group.group}
        assert any(group.capacities.values())
        receiving = {a for a, capacity in group.capacities.items() if capacity}
        if group.zone:
            assert {served[a].zone for a in receiving} == {group.zone}
            assert group.zone in zones.values()
