"""What is looked up and what is checked follows from the nodes, the plan and the answers of DNS."""

from __future__ import annotations

from controlplane.model.facts import Facts
from controlplane.model.nodes import Node, Resolution, Source, State
from controlplane.model.plan import NodePlan, Plan
from controlplane.observe.health.check_targets import build_check_targets, host_names
from controlplane.observe.health.health_checker import CheckTarget

RESOLVED = Facts(
    resolutions={
        "tidb-0": Resolution("tidb-0", "10.0.0.1"),
        "status-0": Resolution("status-0", "10.0.0.9"),
        "unknown": Resolution("unknown", None, "it cannot be resolved"),
        "tidb-6": Resolution("tidb-6", "fd00::6"),
    }
)


def node(address: str, status: str | None = None) -> Node:
    return Node(address, Source.PD, status)


def plan(address: str, endpoint: str | None) -> Plan:
    return Plan({address: NodePlan(node(address), State.ACTIVE, "a reason", 0.0, endpoint=endpoint)})


def test_only_names_are_looked_up() -> None:
    nodes = [
        node("tidb-0:4000", "status-0:10080"),
        node("10.0.0.1:4000", "10.0.0.1:10080"),
        node("[fd00::1]:4000", "[fd00::1]:10080"),
        node("tidb-1:4000"),
    ]
    assert host_names(nodes) == {"tidb-0", "status-0", "tidb-1"}
    assert host_names([]) == set()


def test_names_are_replaced_by_addresses_and_kept_for_certificates() -> None:
    found = build_check_targets([node("tidb-0:4000", "status-0:10080")], Plan(), RESOLVED)
    assert found == {"tidb-0:4000": CheckTarget("tidb-0:4000", "10.0.0.1:4000", "10.0.0.9:10080", "status-0")}


def test_literal_addresses_need_no_answer_of_dns() -> None:
    found = build_check_targets(
        [node("[fd00::1]:4000", "[fd00::1]:10080"), node("10.0.0.2:4000")], Plan(), Facts()
    )
    assert found["[fd00::1]:4000"] == CheckTarget(
        "[fd00::1]:4000", "[fd00::1]:4000", "[fd00::1]:10080", "fd00::1"
    )
    assert found["10.0.0.2:4000"] == CheckTarget("10.0.0.2:4000", "10.0.0.2:4000", None, "")


def test_a_name_that_leads_to_ipv6_is_put_in_brackets() -> None:
    assert (
        build_check_targets([node("tidb-6:4000")], Plan(), RESOLVED)["tidb-6:4000"].sql_endpoint
        == "[fd00::6]:4000"
    )


def test_nodes_without_an_address_are_left_out_until_they_have_one() -> None:
    assert build_check_targets([node("unknown:4000"), node("never-asked:4000")], Plan(), RESOLVED) == {}


def test_what_is_checked_is_what_envoys_are_told() -> None:
    """After a restart without DNS the saved plan still knows where the node is."""
    kept = plan("unknown:4000", "10.0.0.7:4000")
    assert (
        build_check_targets([node("unknown:4000")], kept, RESOLVED)["unknown:4000"].sql_endpoint
        == "10.0.0.7:4000"
    )
    assert build_check_targets([node("tidb-0:4000")], plan("tidb-0:4000", None), RESOLVED)[
        "tidb-0:4000"
    ].sql_endpoint == ("10.0.0.1:4000")


def test_a_status_name_that_does_not_resolve_leaves_the_sql_check() -> None:
    (found,) = build_check_targets([node("10.0.0.2:4000", "unknown:10080")], Plan(), RESOLVED).values()
    assert (found.sql_endpoint, found.status_endpoint) == ("10.0.0.2:4000", None)
