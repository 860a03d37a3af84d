"""Node groups, backup nodes, and overloaded zones."""

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
    return {planned.node.address: planned for planned in nodes}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, ("", False, "")),
        ({"use": "olap"}, ("olap", False, "")),
        ({"use": "olap", "disk": "nvme"}, ("olap", False, "")),  # the first group that matches
        ({"use": "oltp", "disk": "nvme"}, ("", False, "")),  # one of two labels does not match
        ({"role": "backup", "zone": "a"}, ("", True, "a")),
        ({"role": "spare", "use": "olap", "zone": "b"}, ("olap", False, "b")),
    ],
)
def test_labels_set_group_backup_and_zone(labels: dict[str, str], expected: tuple[str, bool, str]) -> None:
    assert classify(node(**labels), POLICY) == expected


def test_no_backup_nodes_without_backup_labels() -> None:
    assert classify(node(role="backup"), replace(POLICY, backup_labels={})) == ("", False, "")


def test_zone_label_is_configurable() -> None:
    assert classify(node(zone="a", rack="r1"), replace(POLICY, zone_label="rack"))[2] == "r1"


def test_backups_serve_only_groups_without_primaries() -> None:
    nodes = served(
        planned("a"),
        planned("b", backup=True),
        planned("c", group="olap", backup=True),
        planned("d", group="olap", backup=True),
    )
    assert serving_by_group(nodes) == {"": ["a"], "olap": ["c", "d"]}


# --- zones --------------------------------------------------------------------------------------------------

TWO_ZONES = served(planned("a", zone="a"), planned("b", zone="b"))
CAPACITIES = {"a": 1.0, "b": 1.0}
ENVOYS = {"envoy-1": "a"}
OVERLOADED: frozenset[GroupZone] = frozenset({("", "a")})


def is_overloaded(here: int, elsewhere: int, *, before: frozenset[GroupZone] = frozenset()) -> bool:
    return bool(overloaded_zones(TWO_ZONES, {"a": here, "b": elsewhere}, CAPACITIES, before, POLICY, ENVOYS))


def test_zone_overload_has_hysteresis() -> None:
    assert not is_overloaded(150, 50)
    assert is_overloaded(151, 49)
    assert is_overloaded(126, 74, before=OVERLOADED)
    assert not is_overloaded(125, 75, before=OVERLOADED)


def test_few_sessions_never_overload_a_zone() -> None:
    assert not is_overloaded(7, 0)
    assert is_overloaded(8, 0)


def test_zone_without_sessions_is_not_overloaded() -> None:
    assert not is_overloaded(0, 0, before=OVERLOADED)


def test_only_zones_with_envoys_can_be_overloaded() -> None:
    assert not overloaded_zones(TWO_ZONES, {"a": 0, "b": 100}, CAPACITIES, (), POLICY, ENVOYS)
    assert overloaded_zones(TWO_ZONES, {"a": 0, "b": 100}, CAPACITIES, (), POLICY, {"x": "b", "y": ""}) == {
        ("", "b")
    }


@pytest.mark.parametrize("balance_policy", [BalancePolicy.LOCATION, BalancePolicy.CONNECTION])
def test_other_policies_have_no_overloaded_zones(balance_policy: BalancePolicy) -> None:
    policy = replace(POLICY, balance_policy=balance_policy)
    assert not overloaded_zones(TWO_ZONES, {"a": 100, "b": 0}, CAPACITIES, OVERLOADED, policy, ENVOYS)


def test_node_with_unknown_load_is_ignored() -> None:
    nodes = TWO_ZONES | served(planned("c", zone="b"))
    assert not overloaded_zones(nodes, {"a": 100}, CAPACITIES | {"c": 1.0}, (), POLICY, ENVOYS)
    assert overloaded_zones(nodes, {"a": 100, "b": 0}, CAPACITIES | {"c": 1.0}, (), POLICY, ENVOYS)


def test_groups_are_measured_separately() -> None:
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
def test_some_zone_with_nodes_is_never_overloaded(
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
    overloaded = overloaded_zones(nodes, counts, capacities, frozenset(before), POLICY, envoys)
    for group, serving in serving_by_group(nodes).items():
        zones = {nodes[a].zone for a in serving if a in counts}
        overloaded_here = {zone for name, zone in overloaded if name == group}
        assert overloaded_here <= zones - {""}
        # If one zone is above the mean, another is below it.
        assert not overloaded_here or overloaded_here < zones
    # The same facts do not change the decision again.
    assert overloaded_zones(nodes, counts, capacities, overloaded, POLICY, envoys) == overloaded


@given(st.integers(0, 500), st.integers(0, 500))
def test_sending_one_session_elsewhere_does_not_end_overload(sessions: int, elsewhere: int) -> None:
    if is_overloaded(sessions, elsewhere):
        assert is_overloaded(sessions - 1, elsewhere + 1, before=OVERLOADED)
