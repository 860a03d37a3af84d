"""Table tests of the node lifecycle: from observation to state, EDS health and reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from controlplane.decide.lifecycle import NodeObservation, advance
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.intents import DrainIntent, OnDeadline
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Policy

NOW = 1_000_000.0
NODE = Node("10.0.0.1:4000", Source.PD, status_address="10.0.0.1:10080")
POLICY = Policy(status_rise=2, status_fall=3, sql_rise=2, sql_fall=3, registration_grace=60, gone_grace=600)


def probe(status: str, consecutive: int = 1) -> CheckResult:
    return CheckResult(CheckStatus(status), f"probe reports {status}", consecutive, NOW)


def health(status: CheckResult | None, sql: CheckResult | None) -> Health:
    return Health(status=status, sql=sql)


GOOD = health(probe("pass", 9), probe("pass", 9))
ONE_PASS = health(probe("pass", 1), probe("pass", 1))
DOWN = health(probe("fail", 3), probe("fail", 3))
ONE_FAIL = health(probe("pass", 5), probe("fail", 1))
STOPPING = health(probe("stopping", 1), probe("pass", 7))
# A starting TiDB answers status requests with HTTP 500, like a stopping TiDB.
STARTING = health(probe("stopping", 1), probe("fail", 9))
UNCHECKED = Health()


def previous_plan(state: State, **fields: Any) -> NodePlan:
    closed = None if state in (State.JOINING, State.ACTIVE) else NOW - 10
    planned = NodePlan(NODE, state, f"was {state}", NOW - 10, endpoint="10.0.0.1:4000", closed_since=closed)
    return replace(planned, **fields)


@dataclass(frozen=True)
class Case:
    name: str
    past: NodePlan | None
    expected: State | None
    eds_health: EdsHealth | None
    health: Health = UNCHECKED
    observed: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    terminates: bool = False


UNREGISTERED = {"node": replace(NODE, registered=False)}
DRAINED = {"drain": DrainIntent(NOW - 5, 600)}
OVERDUE = {"drain": DrainIntent(NOW - 5, 5), "is_overdue": True}
NOT_OVERDUE = {"is_overdue": False}
CLOSING = {"drain": DrainIntent(NOW - 5, 5, OnDeadline.CLOSE), "is_overdue": True}
CASES = [
    Case("discovered", None, State.JOINING, None, reason="not been checked"),
    Case("one pass activates", None, State.ACTIVE, EdsHealth.HEALTHY, ONE_PASS),
    Case(
        "one pass activates a joining node",
        previous_plan(State.JOINING),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        ONE_PASS,
    ),
    Case(
        "joining, checks fail",
        previous_plan(State.JOINING),
        State.JOINING,
        None,
        DOWN,
        reason="probe reports fail",
    ),
    Case("joining, starting", previous_plan(State.JOINING), State.JOINING, None, STARTING),
    Case("joining, only SQL passes", None, State.JOINING, None, health(None, probe("pass"))),
    Case("joining without ttl", None, State.JOINING, None, GOOD, UNREGISTERED, reason="`ttl`"),
    Case(
        "no endpoint",
        None,
        State.JOINING,
        None,
        UNCHECKED,
        {"endpoint": None, "resolve_error": "no such name"},
        reason="no such name",
    ),
    Case("active stays", previous_plan(State.ACTIVE), State.ACTIVE, EdsHealth.HEALTHY, GOOD),
    Case("active, unchecked after a restart", previous_plan(State.ACTIVE), State.ACTIVE, EdsHealth.HEALTHY),
    Case("active, one failure", previous_plan(State.ACTIVE), State.ACTIVE, EdsHealth.HEALTHY, ONE_FAIL),
    Case(
        "active, fails `fall` times",
        previous_plan(State.ACTIVE),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
        DOWN,
        reason="probe reports fail",
    ),
    Case(
        "active, only the status port is down",
        previous_plan(State.ACTIVE),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
        health(probe("fail", 3), probe("pass", 9)),
    ),
    Case(
        "active, reports stopping",
        previous_plan(State.ACTIVE),
        State.DRAINING,
        EdsHealth.DRAINING,
        STOPPING,
        reason="probe reports stopping",
    ),
    Case(
        "stopping, empty",
        previous_plan(State.DRAINING),
        State.DRAINED,
        EdsHealth.DRAINING,
        STOPPING,
        {"is_confirmed_empty": True},
    ),
    Case("stopped", previous_plan(State.DRAINING), State.UNHEALTHY, EdsHealth.UNHEALTHY, DOWN),
    Case(
        "stopping, SQL fails once",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        health(probe("stopping", 2), probe("fail", 1)),
    ),
    Case(
        "unhealthy, starting", previous_plan(State.UNHEALTHY), State.UNHEALTHY, EdsHealth.UNHEALTHY, STARTING
    ),
    Case(
        "unhealthy, status 500 but SQL passes",
        previous_plan(State.UNHEALTHY),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
        STOPPING,
    ),
    Case(
        "unhealthy, one pass", previous_plan(State.UNHEALTHY), State.UNHEALTHY, EdsHealth.UNHEALTHY, ONE_PASS
    ),
    Case(
        "unhealthy, passes `rise` times",
        previous_plan(State.UNHEALTHY),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        GOOD,
    ),
    Case(
        "unhealthy, unchecked after a restart",
        previous_plan(State.UNHEALTHY),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
    ),
    Case(
        "unhealthy, passes, not registered",
        previous_plan(State.UNHEALTHY),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
        GOOD,
        UNREGISTERED,
        reason="stale",
    ),
    Case(
        "ttl lost",
        previous_plan(State.ACTIVE),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        GOOD,
        UNREGISTERED,
        reason="tolerated for 60 s",
    ),
    Case(
        "ttl lost 59 s ago",
        previous_plan(State.ACTIVE, unregistered_since=NOW - 59),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        GOOD,
        UNREGISTERED,
    ),
    Case(
        "ttl lost 60 s ago",
        previous_plan(State.ACTIVE, unregistered_since=NOW - 60),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        UNREGISTERED,
        reason="over 60 s",
    ),
    Case(
        "ttl still lost",
        previous_plan(State.DRAINING, unregistered_since=NOW - 90),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        UNREGISTERED,
    ),
    Case(
        "ttl lost and fails",
        previous_plan(State.ACTIVE, unregistered_since=NOW - 1),
        State.UNHEALTHY,
        EdsHealth.UNHEALTHY,
        DOWN,
        UNREGISTERED,
    ),
    Case(
        "ttl restored",
        previous_plan(State.DRAINING, unregistered_since=NOW - 90),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        GOOD,
    ),
    Case(
        "drain",
        previous_plan(State.ACTIVE),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        DRAINED,
        reason="by an operator",
    ),
    Case(
        "drain, empty",
        previous_plan(State.DRAINING),
        State.DRAINED,
        EdsHealth.DRAINING,
        GOOD,
        DRAINED | {"is_confirmed_empty": True},
    ),
    Case(
        "drained, no longer confirmed empty",
        previous_plan(State.DRAINED),
        State.DRAINED,
        EdsHealth.DRAINING,
        GOOD,
        DRAINED,
    ),
    Case(
        "drain overrides checks",
        previous_plan(State.DRAINED),
        State.DRAINED,
        EdsHealth.DRAINING,
        DOWN,
        DRAINED | {"is_confirmed_empty": True},
    ),
    Case(
        "deadline, keep",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        OVERDUE,
        reason="it still has sessions",
    ),
    Case(
        "deadline, Envoys are missing",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        OVERDUE | {"missing_envoys": tuple("abcd")},
        reason="drained by an operator; it waits for Envoys that are disconnected and may have sessions on"
        " it: a, b, c ...; the deadline has passed",
    ),
    Case(
        "sessions are left, and Envoys are missing",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        OVERDUE | {"missing_envoys": ("a",), "has_sessions": True},
        reason="drained by an operator; the deadline has passed, and it still has sessions",
    ),
    Case(
        "deadline, close",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        CLOSING,
        reason="the remaining sessions are terminated",
        terminates=True,
    ),
    Case(
        "before the deadline, close",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        CLOSING | NOT_OVERDUE,
    ),
    Case(
        "deadline, close, empty",
        previous_plan(State.DRAINING, terminate_sessions=True),
        State.DRAINED,
        EdsHealth.DRAINING,
        GOOD,
        CLOSING | {"is_confirmed_empty": True},
        reason="drained by an operator",
    ),
    Case(
        "deadline, close, gone",
        previous_plan(State.DRAINING),
        State.GONE,
        EdsHealth.DRAINING,
        DOWN,
        CLOSING | {"is_listed": False},
        terminates=True,
    ),
    Case(
        "removed by force",
        previous_plan(State.DRAINING),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        CLOSING | {"removed_since": NOW},
        reason="sessions are terminated",
        terminates=True,
    ),
    Case(
        "undrained while sessions are terminated",
        previous_plan(State.DRAINING, terminate_sessions=True),
        State.ACTIVE,
        EdsHealth.HEALTHY,
        GOOD,
    ),
    Case("drain of a new node", None, State.DRAINING, EdsHealth.DRAINING, UNCHECKED, DRAINED),
    Case("undrained", previous_plan(State.DRAINED), State.ACTIVE, EdsHealth.HEALTHY, GOOD),
    Case("undrained, down", previous_plan(State.DRAINED), State.UNHEALTHY, EdsHealth.UNHEALTHY, DOWN),
    Case(
        "gone",
        previous_plan(State.ACTIVE),
        State.GONE,
        EdsHealth.DRAINING,
        GOOD,
        {"is_listed": False},
        reason="PD was deleted",
    ),
    Case(
        "gone, empty",
        previous_plan(State.GONE),
        None,
        None,
        GOOD,
        {"is_listed": False, "is_confirmed_empty": True},
    ),
    Case(
        "gone, grace over",
        previous_plan(State.GONE, removal_since=NOW - 600),
        None,
        None,
        GOOD,
        {"is_listed": False},
    ),
    Case(
        "gone, within grace",
        previous_plan(State.GONE, removal_since=NOW - 599),
        State.GONE,
        EdsHealth.DRAINING,
        GOOD,
        {"is_listed": False},
    ),
    Case("gone while joining", previous_plan(State.JOINING), None, None, UNCHECKED, {"is_listed": False}),
    Case("gone, returned", previous_plan(State.GONE), State.ACTIVE, EdsHealth.HEALTHY, ONE_PASS),
    Case("gone, returned but down", previous_plan(State.GONE), State.JOINING, None, DOWN),
    Case(
        "gone while drained",
        previous_plan(State.DRAINED),
        State.GONE,
        None,
        DOWN,
        DRAINED | {"is_listed": False, "is_confirmed_empty": True},
        reason="drained when it comes back",
    ),
    Case(
        "returned, still drained",
        previous_plan(State.GONE),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        DRAINED,
    ),
    Case(
        "removed",
        previous_plan(State.ACTIVE),
        State.DRAINING,
        EdsHealth.DRAINING,
        GOOD,
        {"removed_since": NOW},
        reason="removed by an operator",
    ),
    Case(
        "removed, empty",
        previous_plan(State.DRAINING),
        None,
        None,
        GOOD,
        {"removed_since": NOW, "is_confirmed_empty": True},
    ),
    Case("removed, still defined by PD", None, None, None, GOOD, {"removed_since": NOW}),
    Case(
        "removal overrides drain",
        previous_plan(State.DRAINED),
        None,
        None,
        GOOD,
        DRAINED | {"removed_since": NOW, "is_confirmed_empty": True},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_next_state(case: Case) -> None:
    observation = NodeObservation(
        node=NODE,
        is_listed=True,
        removed_since=None,
        drain=None,
        health=case.health,
        endpoint="10.0.0.1:4000",
        resolve_error="",
        is_confirmed_empty=False,
        has_sessions=False,
    )
    planned = advance(case.past, observation._replace(**case.observed), POLICY, NOW)
    if case.expected is None:
        assert planned is None
        return
    assert planned is not None
    assert (planned.state, planned.eds_health) == (case.expected, case.eds_health)
    assert planned.reason
    assert case.reason in planned.reason
    assert planned.terminate_sessions is case.terminates
    lost_at = case.past.unregistered_since if case.past is not None else None
    is_registered = case.observed.get("node", NODE).registered
    assert planned.unregistered_since == (None if is_registered else lost_at or NOW)
    unchanged = case.past is not None and case.past.state is case.expected
    assert planned.since == (NOW - 10 if unchanged else NOW)
    assert (planned.closed_since is None) == (case.expected in (State.JOINING, State.ACTIVE))


def test_status_check_needs_a_status_address() -> None:
    observation = NodeObservation(
        node=replace(NODE, status_address=None),
        is_listed=True,
        removed_since=None,
        drain=None,
        health=health(None, probe("pass")),
        endpoint="10.0.0.1:4000",
        resolve_error="",
        is_confirmed_empty=False,
        has_sessions=False,
    )
    planned = advance(None, observation, POLICY, NOW)
    assert planned is not None
    assert planned.state is State.ACTIVE


def test_disabled_checks_are_ignored() -> None:
    planned = advance(None, observed(DOWN), replace(POLICY, status_check=False, sql_check=False), NOW)
    assert planned is not None
    assert planned.state is State.ACTIVE


PASSING, FAILING = probe("pass", 9), probe("fail", 3)
STATEMENT_POLICY = replace(POLICY, statement_check=True, statement_rise=2, statement_fall=3)


@pytest.mark.parametrize(
    ("past", "statement", "expected"),
    [
        (State.ACTIVE, PASSING, State.ACTIVE),
        (State.ACTIVE, None, State.ACTIVE),
        (State.ACTIVE, probe("fail", 2), State.ACTIVE),
        (State.ACTIVE, FAILING, State.UNHEALTHY),
        (State.UNHEALTHY, probe("pass", 1), State.UNHEALTHY),
        (State.UNHEALTHY, probe("pass", 2), State.ACTIVE),
        (State.JOINING, None, State.JOINING),
        (State.JOINING, probe("fail", 1), State.JOINING),
        (State.JOINING, probe("pass", 1), State.ACTIVE),
        # The check could not run, so the other checks decide.
        *(
            (past, probe(status), State.ACTIVE)
            for past in (State.JOINING, State.ACTIVE)
            for status in ("misconfigured", "full")
        ),
        (State.UNHEALTHY, probe("full"), State.ACTIVE),
        # A node that failed waits until it is certain that the check cannot run.
        (State.UNHEALTHY, probe("misconfigured", 2), State.UNHEALTHY),
        (State.UNHEALTHY, probe("misconfigured", 3), State.ACTIVE),
    ],
)
def test_statement_check(past: State, statement: CheckResult | None, expected: State) -> None:
    node_health = Health(status=PASSING, sql=PASSING, statement=statement)
    planned = advance(previous_plan(past), observed(node_health), STATEMENT_POLICY, NOW)
    assert planned is not None
    assert planned.state is expected
    if expected is State.UNHEALTHY and past is State.ACTIVE:
        assert planned.reason == FAILING.reason
    disabled = advance(previous_plan(past), observed(node_health), POLICY, NOW)
    assert disabled is not None
    assert disabled.state is State.ACTIVE


@pytest.mark.parametrize(
    ("node_health", "expected"),
    [
        (Health(probe("stopping"), PASSING, FAILING), State.DRAINING),
        (Health(FAILING, PASSING, PASSING), State.UNHEALTHY),
        (Health(PASSING, FAILING, PASSING), State.UNHEALTHY),
    ],
)
def test_other_checks_take_precedence_over_the_statement_check(node_health: Health, expected: State) -> None:
    planned = advance(previous_plan(State.ACTIVE), observed(node_health), STATEMENT_POLICY, NOW)
    assert planned is not None
    assert planned.state is expected


def observed(node_health: Health) -> NodeObservation:
    return NodeObservation(
        node=NODE,
        is_listed=True,
        removed_since=None,
        drain=None,
        health=node_health,
        endpoint="10.0.0.1:4000",
        resolve_error="",
        is_confirmed_empty=False,
        has_sessions=False,
    )
