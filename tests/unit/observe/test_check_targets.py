"""Host names to resolve, and the addresses that health checks connect to (check targets)."""

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


def test_only_names_are_resolved() -> None:
    nodes = [
        node("tidb-0:4000", "status-0:10080"),
        node("10.0.0.1:4000", "10.0.0.1:10080"),
        node("[fd00::1]:4000", "[fd00::1]:10080"),
        node("tidb-1:4000"),
    ]
    assert host_names(nodes) == {"tidb-0", "status-0", "tidb-1"}
    assert host_names([]) == set()


def test_names_are_resolved_and_kept_for_certificates() -> None:
    targets = build_check_targets([node("tidb-0:4000", "status-0:10080")], Plan(), RESOLVED)
    assert targets == {
        "tidb-0:4000": CheckTarget("tidb-0:4000", "10.0.0.1:4000", "10.0.0.9:10080", "status-0")
    }


def test_literal_addresses_need_no_resolution() -> None:
    targets = build_check_targets(
        [node("[fd00::1]:4000", "[fd00::1]:10080"), node("10.0.0.2:4000")], Plan(), Facts()
    )
    assert targets["[fd00::1]:4000"] == CheckTarget(
        "[fd00::1]:4000", "[fd00::1]:4000", "[fd00::1]:10080", "fd00::1"
    )
    assert targets["10.0.0.2:4000"] == CheckTarget("10.0.0.2:4000", "10.0.0.2:4000", None, "")


def test_ipv6_resolution_is_put_in_brackets() -> None:
    (target,) = build_check_targets([node("tidb-6:4000")], Plan(), RESOLVED).values()
    assert target.sql_endpoint == "[fd00::6]:4000"


def test_unresolved_nodes_have_no_check_target() -> None:
    assert build_check_targets([node("unknown:4000"), node("never-asked:4000")], Plan(), RESOLVED) == {}


def test_planned_endpoint_is_checked_first() -> None:
    """Envoys use the endpoint in the plan. After a restart without DNS, only the saved plan has it."""
    saved_plan = plan("unknown:4000", "10.0.0.7:4000")
    (target,) = build_check_targets([node("unknown:4000")], saved_plan, RESOLVED).values()
    assert target.sql_endpoint == "10.0.0.7:4000"
    without_endpoint = plan("tidb-0:4000", None)
    (target,) = build_check_targets([node("tidb-0:4000")], without_endpoint, RESOLVED).values()
    assert target.sql_endpoint == "10.0.0.1:4000"


def test_unresolved_status_name_leaves_the_sql_check() -> None:
    (target,) = build_check_targets([node("10.0.0.2:4000", "unknown:10080")], Plan(), RESOLVED).values()
    assert (target.sql_endpoint, target.status_endpoint) == ("10.0.0.2:4000", None)
