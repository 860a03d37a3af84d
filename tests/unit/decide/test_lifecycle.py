"""A node's life as a table: what is known, and the state, advice and reason that must follow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from controlplane.decide.lifecycle import Evidence, advance
from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.intents import Drain, OnDeadline
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import Advice, NodePlan, Policy

NOW = 1_000_000.0
NODE = Node("10.0.0.1:4000", Source.PD, status_address="10.0.0.1:10080")
POLICY = Policy(status_rise=2, status_fall=3, sql_rise=2, sql_fall=3, registration_grace=60, gone_grace=600)


def probe(outcome: str, streak: int = 1) -> Probe:
    return Probe(Outcome(outcome), f"probe said {outcome}", streak, NOW)


def health(status: Probe | None, sql: Probe | None) -> Health:
    return Health(status=status, sql=sql)


GOOD = health(probe("pass", 9), probe("pass", 9))
ONE_PASS = health(probe("pass", 1), probe("pass", 1))
DOWN = health(probe("fail", 3), probe("fail", 3))
ONE_FAIL = health(probe("pass", 5), probe("fail", 1))
STOPPING = health(probe("stopping", 1), probe("pass", 7))
STARTING = health(probe("stopping", 1), probe("fail", 9))
UNCHECKED = Health()


def past(state: State, **fields: Any) -> NodePlan:
    closed = None if state in (State.JOINING, State.ACTIVE) else NOW - 10
    planned = NodePlan(NODE, state, f"was {state}", NOW - 10, endpoint="10.0.0.1:4000", closed_since=closed)
    return replace(planned, **fields)


@dataclass(frozen=True)
class Case:
    name: str
    past: NodePlan | None
    expect: State | None
    advice: Advice | None
    health: Health = UNCHECKED
    known: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    closing: bool = False


UNREGISTERED = {"node": replace(NODE, registered=False)}
DRAINED = {"drain": Drain(NOW - 5, 600)}
OVERDUE = {"drain": Drain(NOW - 5, 5), "overdue": True}
IN_TIME = {"overdue": False}
CLOSING = {"drain": Drain(NOW - 5, 5, OnDeadline.CLOSE), "overdue": True}
CASES = [
    Case("discovered", None, State.JOINING, None, reason="not been checked"),
    Case("one pass activates", None, State.ACTIVE, Advice.HEALTHY, ONE_PASS),
    Case("one pass activates a joining", past(State.JOINING), State.ACTIVE, Advice.HEALTHY, ONE_PASS),
    Case("joining, refuses", past(State.JOINING), State.JOINING, None, DOWN, reason="probe said fail"),
    Case("joining, starts up", past(State.JOINING), State.JOINING, None, STARTING),
    Case("joining, only SQL passes", None, State.JOINING, None, health(None, probe("pass"))),
    Case("joining without ttl", None, State.JOINING, None, GOOD, UNREGISTERED, reason="`ttl`"),
    Case(
        "no endpoint",
        None,
        State.JOINING,
        None,
        UNCHECKED,
        {"endpoint": None, "unresolved": "no such name"},
        reason="no such name",
    ),
    Case("active stays", past(State.ACTIVE), State.ACTIVE, Advice.HEALTHY, GOOD),
    Case("active, unchecked after a restart", past(State.ACTIVE), State.ACTIVE, Advice.HEALTHY),
    Case("active, one failure", past(State.ACTIVE), State.ACTIVE, Advice.HEALTHY, ONE_FAIL),
    Case(
        "active, fall failures",
        past(State.ACTIVE),
        State.UNHEALTHY,
        Advice.UNHEALTHY,
        DOWN,
        reason="probe said fail",
    ),
    Case(
        "active, only the status port is down",
        past(State.ACTIVE),
        State.UNHEALTHY,
        Advice.UNHEALTHY,
        health(probe("fail", 3), probe("pass", 9)),
    ),
    Case(
        "active, says it stops",
        past(State.ACTIVE),
        State.DRAINING,
        Advice.DRAINING,
        STOPPING,
        reason="probe said stopping",
    ),
    Case("stopping, empty", past(State.DRAINING), State.DRAINED, Advice.DRAINING, STOPPING, {"empty": True}),
    Case("stopped", past(State.DRAINING), State.UNHEALTHY, Advice.UNHEALTHY, DOWN),
    Case(
        "stopping, SQL fails once",
        past(State.DRAINING),
        State.DRAINING,
        Advice.DRAINING,
        health(probe("stopping", 2), probe("fail", 1)),
    ),
    Case("unhealthy, starting", past(State.UNHEALTHY), State.UNHEALTHY, Advice.UNHEALTHY, STARTING),
    Case(
        "unhealthy, status 500 but greets", past(State.UNHEALTHY), State.UNHEALTHY, Advice.UNHEALTHY, STOPPING
    ),
    Case("unhealthy, one pass", past(State.UNHEALTHY), State.UNHEALTHY, Advice.UNHEALTHY, ONE_PASS),
    Case("unhealthy, rise passes", past(State.UNHEALTHY), State.ACTIVE, Advice.HEALTHY, GOOD),
    Case("unhealthy, unchecked after a restart", past(State.UNHEALTHY), State.UNHEALTHY, Advice.UNHEALTHY),
    Case(
        "unhealthy, passes, not registered",
        past(State.UNHEALTHY),
        State.UNHEALTHY,
        Advice.UNHEALTHY,
        GOOD,
        UNREGISTERED,
        reason="stale",
    ),
    Case(
        "ttl lost",
        past(State.ACTIVE),
        State.ACTIVE,
        Advice.HEALTHY,
        GOOD,
        UNREGISTERED,
        reason="borne for 60 s",
    ),
    Case(
        "ttl lost 59 s ago",
        past(State.ACTIVE, unregistered_since=NOW - 59),
        State.ACTIVE,
        Advice.HEALTHY,
        GOOD,
        UNREGISTERED,
    ),
    Case(
        "ttl lost 60 s ago",
        past(State.ACTIVE, unregistered_since=NOW - 60),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        UNREGISTERED,
        reason="over 60 s",
    ),
    Case(
        "ttl still lost",
        past(State.DRAINING, unregistered_since=NOW - 90),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        UNREGISTERED,
    ),
    Case(
        "ttl lost and fails",
        past(State.ACTIVE, unregistered_since=NOW - 1),
        State.UNHEALTHY,
        Advice.UNHEALTHY,
        DOWN,
        UNREGISTERED,
    ),
    Case("ttl back", past(State.DRAINING, unregistered_since=NOW - 90), State.ACTIVE, Advice.HEALTHY, GOOD),
    Case(
        "drain", past(State.ACTIVE), State.DRAINING, Advice.DRAINING, GOOD, DRAINED, reason="by an operator"
    ),
    Case(
        "drain, empty", past(State.DRAINING), State.DRAINED, Advice.DRAINING, GOOD, DRAINED | {"empty": True}
    ),
    Case("drained, nothing is known", past(State.DRAINED), State.DRAINED, Advice.DRAINING, GOOD, DRAINED),
    Case(
        "drain beats checks",
        past(State.DRAINED),
        State.DRAINED,
        Advice.DRAINING,
        DOWN,
        DRAINED | {"empty": True},
    ),
    Case(
        "deadline, keep",
        past(State.DRAINING),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        OVERDUE,
        reason="it still has sessions",
    ),
    Case(
        "deadline, close",
        past(State.DRAINING),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        CLOSING,
        reason="the sessions that are left are ended",
        closing=True,
    ),
    Case("close, in time", past(State.DRAINING), State.DRAINING, Advice.DRAINING, GOOD, CLOSING | IN_TIME),
    Case(
        "deadline, close, empty",
        past(State.DRAINING, closing=True),
        State.DRAINED,
        Advice.DRAINING,
        GOOD,
        CLOSING | {"empty": True},
        reason="drained by an operator",
    ),
    Case(
        "deadline, close, gone",
        past(State.DRAINING),
        State.GONE,
        Advice.DRAINING,
        DOWN,
        CLOSING | {"listed": False},
        closing=True,
    ),
    Case(
        "removed by force",
        past(State.DRAINING),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        CLOSING | {"removed_since": NOW},
        reason="are ended",
        closing=True,
    ),
    Case("closing taken back", past(State.DRAINING, closing=True), State.ACTIVE, Advice.HEALTHY, GOOD),
    Case("drain of a joining", None, State.DRAINING, Advice.DRAINING, UNCHECKED, DRAINED),
    Case("undrained", past(State.DRAINED), State.ACTIVE, Advice.HEALTHY, GOOD),
    Case("undrained, down", past(State.DRAINED), State.UNHEALTHY, Advice.UNHEALTHY, DOWN),
    Case(
        "gone",
        past(State.ACTIVE),
        State.GONE,
        Advice.DRAINING,
        GOOD,
        {"listed": False},
        reason="PD was deleted",
    ),
    Case("gone, empty", past(State.GONE), None, None, GOOD, {"listed": False, "empty": True}),
    Case("gone, grace over", past(State.GONE, leaving_since=NOW - 600), None, None, GOOD, {"listed": False}),
    Case(
        "gone, within grace",
        past(State.GONE, leaving_since=NOW - 599),
        State.GONE,
        Advice.DRAINING,
        GOOD,
        {"listed": False},
    ),
    Case("gone while joining", past(State.JOINING), None, None, UNCHECKED, {"listed": False}),
    Case("gone and back", past(State.GONE), State.ACTIVE, Advice.HEALTHY, ONE_PASS),
    Case("gone and back, down", past(State.GONE), State.JOINING, None, DOWN),
    Case(
        "gone while drained",
        past(State.DRAINED),
        State.GONE,
        None,
        DOWN,
        DRAINED | {"listed": False, "empty": True},
        reason="drained when it comes back",
    ),
    Case("back, still drained", past(State.GONE), State.DRAINING, Advice.DRAINING, GOOD, DRAINED),
    Case(
        "removed",
        past(State.ACTIVE),
        State.DRAINING,
        Advice.DRAINING,
        GOOD,
        {"removed_since": NOW},
        reason="removed by an operator",
    ),
    Case("removed, empty", past(State.DRAINING), None, None, GOOD, {"removed_since": NOW, "empty": True}),
    Case("removed, named again by PD", None, None, None, GOOD, {"removed_since": NOW}),
    Case(
        "removed beats drain",
        past(State.DRAINED),
        None,
        None,
        GOOD,
        DRAINED | {"removed_since": NOW, "empty": True},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    evidence = Evidence(
        node=NODE,
        listed=True,
        removed_since=None,
        drain=None,
        health=case.health,
        endpoint="10.0.0.1:4000",
        unresolved="",
        empty=False,
        occupied=False,
    )
    planned = advance(case.past, evidence._replace(**case.known), POLICY, NOW)
    if case.expect is None:
        assert planned is None
        return
    assert planned is not None
    assert (planned.state, planned.advice) == (case.expect, case.advice)
    assert planned.reason
    assert case.reason in planned.reason
    assert planned.closing is case.closing
    unchanged = case.past is not None and case.past.state is case.expect
    assert planned.since == (NOW - 10 if unchanged else NOW)
    assert (planned.closed_since is None) == (case.expect in (State.JOINING, State.ACTIVE))


def test_status_is_not_asked_for_without_a_status_address() -> None:
    evidence = Evidence(
        node=replace(NODE, status_address=None),
        listed=True,
        removed_since=None,
        drain=None,
        health=health(None, probe("pass")),
        endpoint="10.0.0.1:4000",
        unresolved="",
        empty=False,
        occupied=False,
    )
    planned = advance(None, evidence, POLICY, NOW)
    assert planned is not None
    assert planned.state is State.ACTIVE


def test_checks_that_are_switched_off_decide_nothing() -> None:
    evidence = Evidence(
        node=NODE,
        listed=True,
        removed_since=None,
        drain=None,
        health=DOWN,
        endpoint="10.0.0.1:4000",
        unresolved="",
        empty=False,
        occupied=False,
    )
    planned = advance(None, evidence, replace(POLICY, status_check=False, sql_check=False), NOW)
    assert planned is not None
    assert planned.state is State.ACTIVE
