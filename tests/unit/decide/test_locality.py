"""Groups, nodes that stand in, and zones that are full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.decide.balance.locality import classify, overloaded_zones, serving_by_group
from controlplane.model.nodes import GroupZone, Node, NodeGroup, Source, State
from controlplane.model.plan import BalancePolicy, EdsHealth, NodePlan, Policy

POLICY = Policy(
    groups=(NodeGroup("olap", {"use": "olap"}), NodeGroup("fast", {"use": "olap", "disk": "nvme"})),
    backup_labels={"role": "backup"},
)


def node(address: str = "10.0.0.1:4000", **labels: str) -> Node:
    return Node(address, Source.STATIC, labels=labels)


def planned(address: str, *, group: str = "", backup: bool = False, zone: str = "") -> NodePlan:
    return NodePlan(
        node(address),
        State.ACTIVE,
        "",
        0.0,
        EdsHealth.HEALTHY,
        1,
        address,
        group=group,
        backup=backup,
        zone=zone,
    )


def served(*nodes: NodePlan) -> dict[str, NodePlan]:
    return {each.node.address: each for each in nodes}


@pytest.mark.parametrize(
    ("labels", "where"),
    [
        ({}, ("", False, "")),
        ({"use": "olap"}, ("olap", False, "")),
        ({"use": "olap", "disk": "nvme"}, ("olap", False, "")),  # the first group that it fits
        ({"use": "oltp", "disk": "nvme"}, ("", False, "")),  # one label of two is not enough
        ({"role": "backup", "zone": "a"}, ("", True, "a")),
        ({"role": "spare", "use": "olap", "zone": "b"}, ("olap", False, "b")),
    ],
)
def test_labels_tell_the_place_of_a_node(labels: dict[str, str], where: tuple[str, bool, str]) -> None:
    assert classify(node(**labels), POLICY) == where


def test_no_node_stands_in_when_no_labels_say_which() -> None:
    assert classify(node(role="backup"), replace(POLICY, backup_labels={})) == ("", False, "")


def test_the_zone_stands_in_the_label_that_the_settings_name() -> None:
    assert classify(node(zone="a", rack="r1"), replace(POLICY, zone_label="rack"))[2] == "r1"


def test_nodes_that_stand_in_take_sessions_where_no_other_of_their_group_does() -> None:
    nodes = served(
        planned("a"),
        planned("b", backup=True),
        planned("c", group="olap", backup=True),
        planned("d", group="olap", backup=True),
    )
    assert serving_by_group(nodes) == {"": ["a"], "olap": ["c", "d"]}


# --- zones --------------------------------------------------------------------------------------------------

TWO_ZONES = served(planned("a", zone="a"), planned("b", zone="b"))
EVEN = {"a": 1.0, "b": 1.0}
ENVOYS = {"envoy-1": "a"}
FULL: frozenset[GroupZone] = frozenset({("", "a")})


def is_full(sessions: int, elsewhere: int, *, before: frozenset[GroupZone] = frozenset()) -> bool:
    return bool(overloaded_zones(TWO_ZONES, {"a": sessions, "b": elsewhere}, EVEN, before, POLICY, ENVOYS))


def test_a_zone_is_full_above_its_threshold_and_until_midway_below_it() -> None:
    assert not is_full(150, 50)
    assert is_full(151, 49)
    assert is_full(126, 74, before=FULL)
    assert not is_full(125, 75, before=FULL)


def test_a_few_sessions_make_no_zone_full() -> None:
    assert not is_full(7, 0)
    assert is_full(8, 0)


def test_a_zone_without_any_session_is_not_full() -> None:
    assert not is_full(0, 0, before=FULL)


def test_only_zones_of_envoys_are_looked_at() -> None:
    assert not overloaded_zones(TWO_ZONES, {"a": 0, "b": 100}, EVEN, (), POLICY, ENVOYS)
    assert overloaded_zones(TWO_ZONES, {"a": 0, "b": 100}, EVEN, (), POLICY, {"x": "b", "y": ""}) == {
        ("", "b")
    }


@pytest.mark.parametrize("strategy", [BalancePolicy.LOCATION, BalancePolicy.CONNECTION])
def test_by_place_or_connections_alone_no_zone_is_full(strategy: BalancePolicy) -> None:
    policy = replace(POLICY, balance_policy=strategy)
    assert not overloaded_zones(TWO_ZONES, {"a": 100, "b": 0}, EVEN, FULL, policy, ENVOYS)


def test_a_node_of_unknown_load_makes_no_zone_full_nor_empty() -> None:
    nodes = TWO_ZONES | served(planned("c", zone="b"))
    assert not overloaded_zones(nodes, {"a": 100}, EVEN | {"c": 1.0}, (), POLICY, ENVOYS)
    assert overloaded_zones(nodes, {"a": 100, "b": 0}, EVEN | {"c": 1.0}, (), POLICY, ENVOYS)


def test_a_group_is_measured_by_its_own_nodes() -> None:
    nodes = TWO_ZONES | served(planned("c", group="olap", zone="a"), planned("d", group="olap", zone="b"))
    counts = {"a": 5, "b": 5, "c": 90, "d": 10}
    assert overloaded_zones(nodes, counts, dict.fromkeys(nodes, 1.0), (), POLICY, ENVOYS) == {("olap", "a")}


fleets = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from(["", "olap"]),
        st.booleans(),
        st.integers(1, 1000),
        st.one_of(st.none(), st.integers(0, 2000)),
    ),
    max_size=12,
)


@given(fleets, st.sets(st.tuples(st.sampled_from(["", "olap"]), st.sampled_from(["a", "b", "gone"]))))
def test_never_are_all_zones_of_a_group_full_and_never_one_that_has_no_node(
    fleet: list[tuple[str, str, bool, int, int | None]], before: set[GroupZone]
) -> None:
    nodes, counts, capacities = {}, {}, {}
    for number, (zone, group, backup, capacity, sessions) in enumerate(fleet):
        address = f"10.0.0.{number}:4000"
        nodes[address] = planned(address, group=group, backup=backup, zone=zone)
        capacities[address] = float(capacity)
        if sessions is not None:
            counts[address] = sessions
    envoys = {"1": "a", "2": "b", "3": "c", "4": "elsewhere", "5": ""}
    found = overloaded_zones(nodes, counts, capacities, frozenset(before), POLICY, envoys)
    for group, taking in serving_by_group(nodes).items():
        there = {nodes[a].zone for a in taking if a in counts}
        crowded = {zone for each, zone in found if each == group}
        assert crowded <= there - {""}
        # Whoever is above the mean stands beside somebody who is below it.
        assert not crowded or crowded < there
    # Without a new fact the decision stays: what is full was above the threshold, or is not below midway.
    assert overloaded_zones(nodes, counts, capacities, found, POLICY, envoys) == found


@given(st.integers(0, 500), st.integers(0, 500))
def test_sending_one_session_elsewhere_does_not_empty_a_zone_that_has_just_become_full(
    sessions: int, elsewhere: int
) -> None:
    if is_full(sessions, elsewhere):
        assert is_full(sessions - 1, elsewhere + 1, before=FULL)
