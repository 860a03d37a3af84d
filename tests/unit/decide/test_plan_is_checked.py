"""The first plan is published only after the first checks of all nodes have completed."""

from __future__ import annotations

import pytest

from controlplane.decide.plan import has_completed_first_checks
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, Policy

A = "10.0.0.1:4000"
FAILED = CheckResult(CheckStatus.FAIL, "it refuses", 1, 0.0)


@pytest.mark.parametrize(
    ("health", "status_address", "policy", "is_checked"),
    [
        (None, None, Policy(), False),
        (Health(sql=FAILED), None, Policy(), True),
        (Health(sql=FAILED), "10.0.0.1:10080", Policy(), False),
        (Health(status=FAILED), "10.0.0.1:10080", Policy(), False),
        (Health(status=FAILED, sql=FAILED), "10.0.0.1:10080", Policy(), True),
        (Health(sql=FAILED), "10.0.0.1:10080", Policy(status_check=False), True),
        (Health(status=FAILED), "10.0.0.1:10080", Policy(sql_check=False), True),
        (None, None, Policy(sql_check=False), True),  # no check is enabled
        (Health(sql=FAILED), None, Policy(statement_check=True), False),
        (Health(sql=FAILED, statement=FAILED), None, Policy(statement_check=True), True),
    ],
)
def test_waits_for_every_enabled_check(
    health: Health | None, status_address: str | None, policy: Policy, is_checked: bool
) -> None:
    node = NodePlan(Node(A, Source.PD, status_address), State.JOINING, "a reason", 0.0)
    facts = Facts(health={A: health} if health else {})
    assert has_completed_first_checks(Plan({A: node}), facts, policy) is is_checked


def test_does_not_wait_for_nodes_in_service() -> None:
    active = NodePlan(Node(A, Source.PD), State.ACTIVE, "a reason", 0.0)
    assert has_completed_first_checks(Plan({A: active}), Facts(), Policy())
    assert has_completed_first_checks(Plan(), Facts(), Policy())
