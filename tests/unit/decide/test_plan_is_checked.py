"""When a plan may be the first to go out: not while a node is absent only because nobody has looked yet."""

from __future__ import annotations

import pytest

from controlplane.decide.plan import has_completed_first_checks
from controlplane.model.facts import Facts
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, Policy

A = "10.0.0.1:4000"
SEEN = CheckResult(CheckStatus.FAIL, "it refuses", 1, 0.0)


@pytest.mark.parametrize(
    ("health", "status_address", "policy", "is_checked"),
    [
        (None, None, Policy(), False),
        (Health(sql=SEEN), None, Policy(), True),
        (Health(sql=SEEN), "10.0.0.1:10080", Policy(), False),
        (Health(status=SEEN), "10.0.0.1:10080", Policy(), False),
        (Health(status=SEEN, sql=SEEN), "10.0.0.1:10080", Policy(), True),
        (Health(sql=SEEN), "10.0.0.1:10080", Policy(status_check=False), True),
        (Health(status=SEEN), "10.0.0.1:10080", Policy(sql_check=False), True),
        (None, None, Policy(sql_check=False), True),  # nothing to be checked
    ],
)
def test_every_check_that_is_to_be_made_has_to_have_ended(
    health: Health | None, status_address: str | None, policy: Policy, is_checked: bool
) -> None:
    node = NodePlan(Node(A, Source.PD, status_address), State.JOINING, "a reason", 0.0)
    facts = Facts(health={A: health} if health else {})
    assert has_completed_first_checks(Plan({A: node}), facts, policy) is is_checked


def test_nodes_that_are_published_anyway_are_not_waited_for() -> None:
    active = NodePlan(Node(A, Source.PD), State.ACTIVE, "a reason", 0.0)
    assert has_completed_first_checks(Plan({A: active}), Facts(), Policy())
    assert has_completed_first_checks(Plan(), Facts(), Policy())
