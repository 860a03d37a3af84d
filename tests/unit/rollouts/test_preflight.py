"""What speaks against a rollout, which nodes are meant, and what is told of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane.errors import RolloutRefused
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import MANUAL, WAITING_PREFIX, RolloutPhase, RolloutSpec, Stage, Step
from controlplane.rollouts import rollout_events, state_machine
from controlplane.rollouts.node_selector import select_nodes
from controlplane.rollouts.observation import ClusterState
from controlplane.rollouts.preflight import PreflightResult, run_preflight
from tests.support.controlplane.rollout_simulator import rollout_spec, rollout_with_steps

A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
NODES = (A, B, C)
ACTIONS = {"restart": frozenset[str](), "upgrade": frozenset({"version", "host"})}
ENVOY = EnvoyStatus("envoy-1", "10.0.1.1:1", "1.40.0", "module", 1.0, 1.0)
NO_CERTIFICATE = "its sessions cannot move: it has no certificate"


def planned(address: str, state: State = State.ACTIVE, **more: Any) -> NodePlan:
    labels = {"zone": "a" if address != C else "b"}
    node = Node(address, Source.PD, started_at=more.pop("started_at", 100.0), labels=labels)
    return NodePlan(node, state, "a reason", 0.0, **more)


def outlook(*plans: NodePlan, **more: Any) -> ClusterState:
    nodes = {address: planned(address) for address in NODES} | {each.node.address: each for each in plans}
    said: dict[str, Any] = {
        "facts": Facts(),
        "intents": Intents(),
        "policy": Policy(),
        "envoys": [ENVOY],
        **more,
    }
    return ClusterState(Plan(nodes), **said)


def checked(wanted: RolloutSpec, seen: ClusterState | None = None, **more: Any) -> PreflightResult:
    live = more.pop("live", ())
    return run_preflight(wanted, seen or outlook(), live, ACTIONS, probes_login=False, **more)


def test_nothing_speaks_against_an_order_that_fits() -> None:
    assert checked(rollout_spec(A, B)) == PreflightResult(rollout_spec(A, B))


@pytest.mark.parametrize(("said", "meant"), [("8.5.4", "v8.5.4"), ("v8.5.4", "v8.5.4"), ("", "")])
def test_a_version_is_told_as_nodes_tell_it(said: str, meant: str) -> None:
    assert checked(rollout_spec(A, version=said)).spec.version == meant


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (rollout_spec(), "no node is named"),
        (rollout_spec(A, A), "a node is named twice"),
        (rollout_spec(*(f"10.0.{n}.1:4000" for n in range(2001))), "2001 nodes are too many for one rollout"),
        (rollout_spec(A, max_unavailable=0), "at least 1 node must be let out"),
        (rollout_spec(A, failure_budget=-1), "at least 1 node must be let out"),
        (rollout_spec(A, healthy_for=float("nan")), "durations are seconds"),
        (rollout_spec(A, version="--flag"), "'--flag' is no release of TiDB"),
        (
            rollout_spec(A, action="rm"),
            "no action is named 'rm'; rollouts.actions of the configuration has restart,",
        ),
        (rollout_spec(A, action="upgrade", version=""), "the action upgrade fills in a version"),
        (rollout_spec("10.0.0.9:4000"), "not known: 10.0.0.9:4000"),
    ],
)
def test_what_force_does_not_help_against(wanted: RolloutSpec, found: str) -> None:
    checks = checked(wanted)
    assert checks.unforceable_problems[0].startswith(found)
    assert checks.problems[: len(checks.unforceable_problems)] == checks.unforceable_problems


def test_nodes_that_leave_or_have_no_start_time_are_refused() -> None:
    leaving = outlook(planned(A, removal_since=5.0, state=State.GONE), planned(B, started_at=None))
    found = checked(rollout_spec(A, B), leaving).unforceable_problems
    assert found[0] == f"on their way out: {A}"
    assert found[1].startswith(f"the start time is not known of {B}")


def test_a_node_has_one_rollout_at_a_time() -> None:
    other = replace(rollout_with_steps(rollout_spec(A, B)), id="r0")
    assert checked(rollout_spec(A), live=[other]).unforceable_problems == (
        f"the rollout r0 is not over and has {A}, too",
    )
    assert checked(rollout_spec(C), live=[other]).unforceable_problems == ()


def test_one_node_of_each_group_stays() -> None:
    assert not checked(rollout_spec(*NODES, max_unavailable=2)).problems
    (found,) = checked(rollout_spec(*NODES, max_unavailable=3)).problems
    assert found.startswith("with 3 out of service at a time, no other node would be active")
    (found,) = checked(rollout_spec(*NODES), outlook(planned(C, group="olap"))).problems
    assert found.startswith("with 1 out of service at a time, no other node of the group olap would be")
    assert not checked(rollout_spec(A, B), outlook(planned(C, group="olap"))).problems


def test_sessions_must_be_able_to_move() -> None:
    plain = replace(ENVOY, id="envoy-2", filter="none")
    (found,) = checked(rollout_spec(A), outlook(envoys=[ENVOY, plain])).problems
    assert found == "sessions cannot move in Envoys without Tidevoy's module: envoy-2"
    health = {B: Health(migration_blockers=("its sessions have no time to move", NO_CERTIFICATE))}
    (found,) = checked(rollout_spec(A), outlook(facts=Facts(health=health))).problems
    assert found == f"sessions cannot move from or to {B} ({B}: {NO_CERTIFICATE})"
    in_time = {B: Health(migration_blockers=("its sessions have no time to move",))}
    assert not checked(rollout_spec(A), outlook(facts=Facts(health=in_time))).problems


def test_cautions() -> None:
    seen = outlook(
        planned(A, version="v8.5.4"),
        planned(C, State.UNHEALTHY),
        envoys=[replace(ENVOY, connected_since=None)],
        intents=Intents(drains={B: DrainIntent(0.0, 60.0)}),
        policy=Policy(status_check=False, sql_check=False),
    )
    found = checked(rollout_spec(A, B), seen).warnings
    assert [text.partition(":")[0].partition(",")[0] for text in found] == [
        "no Envoy is connected",
        "out of service already",
        "drained already",
        "of v8.5.4 already",
        "health.status is off",
        "health.sql is off and rollouts.probe is not set",
    ]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", (A, B)),
        ("zone=a", (A, B)),
        (f"{B},{A},{B}", (B, A)),
        ("[FD00:0::1]:4000", ("[fd00::1]:4000",)),
        ("10.0.0.9:4000", ("10.0.0.9:4000",)),
    ],
)
def test_which_nodes_are_meant(text: str, chosen: tuple[str, ...]) -> None:
    nodes = [planned(B), planned(C, State.GONE), planned(A)]
    assert select_nodes(text, nodes) == chosen


@pytest.mark.parametrize("text", ["", "zone=c", "zone=a,disk=ssd", "10.0.0.1", "zone=a,10.0.0.1:4000", "ALL"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RolloutRefused):
        select_nodes(text, [planned(A)])


def test_a_new_rollout_is_told_with_what_it_is_to_do() -> None:
    (told,) = rollout_events.rollout_events(
        None, state_machine.create("r7", RolloutSpec((A, B), MANUAL), "alice", 5.0)
    )
    assert told.kind == "rollout.started"
    assert told.message == "alice started the rollout r7: 2 nodes, action `manual`"
    assert told.data == {"nodes": [A, B], "action": "manual", "by": "alice"}


def test_steps_and_phases_are_told_when_they_change() -> None:
    before = rollout_with_steps(rollout_spec(A, B), Step(A, Stage.STARTED, attempts=1))
    failed = replace(before, steps=before.with_step(Step(A, Stage.FAILED, "it broke", attempts=1)))
    after = replace(failed, phase=RolloutPhase.PAUSED, reason="A failed")
    first, second = rollout_events.rollout_events(before, after)
    assert (first.kind, first.message) == ("rollout.step_failed", f"{A} is failed: it broke")
    assert first.data == {"node": A, "from": "started", "to": "failed", "reason": "it broke", "attempt": 1}
    assert (second.kind, second.message) == ("rollout.paused", "the rollout r1 is paused: A failed")
    assert [
        told.kind for told in rollout_events.rollout_events(after, replace(after, phase=RolloutPhase.RUNNING))
    ] == ["rollout.resumed"]
    assert not list(rollout_events.rollout_events(after, replace(after, reason="another reason")))
    waits = replace(after, reason=f"{WAITING_PREFIX}a node is out")
    (told,) = rollout_events.rollout_events(after, waits)
    assert (told.kind, told.message) == ("rollout.waits", "the rollout r1 waits: a node is out")
    assert not list(
        rollout_events.rollout_events(waits, replace(waits, reason=f"{WAITING_PREFIX}another is out"))
    )
