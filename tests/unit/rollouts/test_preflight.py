"""Preflight problems and warnings, node selectors, and rollout events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.config.rollouts import RolloutSettings
from controlplane.errors import RolloutRejected
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.module_switches import ModuleSwitches, SwitchOverrides
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import MANUAL, WAITING_PREFIX, Rollout, RolloutPhase, RolloutSpec, Stage, Step
from controlplane.rollouts import rollout_events, state_machine
from controlplane.rollouts.observation import ClusterState
from controlplane.rollouts.preflight import PreflightResult, run_preflight, select_nodes
from tests.support.controlplane.rollout_simulator import rollout_spec, rollout_with_steps

A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
NODES = (A, B, C)
SETTINGS = RolloutSettings.model_validate(
    {"actions": {"restart": {"command": ["a"]}, "upgrade": {"command": ["a", "{version}", "{host}"]}}}
)
ENVOY = EnvoyStatus("envoy-1", "10.0.1.1:1", "1.40.0", "module", 1.0, 1.0)
NO_CERTIFICATE = "its sessions cannot migrate: it has no certificate"


def planned(address: str, state: State = State.ACTIVE, **overrides: Any) -> NodePlan:
    labels = {"zone": "a" if address != C else "b"}
    node = Node(address, Source.PD, started_at=overrides.pop("started_at", 100.0), labels=labels)
    return NodePlan(node, state, "a reason", 0.0, **overrides)


def cluster(*plans: NodePlan, **overrides: Any) -> ClusterState:
    nodes = {address: planned(address) for address in NODES} | {plan.node.address: plan for plan in plans}
    inputs: dict[str, Any] = {
        "facts": Facts(),
        "intents": Intents(),
        "policy": Policy(),
        "envoys": [ENVOY],
        **overrides,
    }
    return ClusterState(Plan(nodes), **inputs)


def checked(
    spec: RolloutSpec, state: ClusterState | None = None, active_rollouts: Iterable[Rollout] = ()
) -> PreflightResult:
    return run_preflight(spec, state or cluster(), active_rollouts, SETTINGS)


def test_valid_spec_has_no_problems() -> None:
    assert checked(rollout_spec(A, B)) == PreflightResult(rollout_spec(A, B))


@pytest.mark.parametrize(("version", "expected"), [("8.5.4", "v8.5.4"), ("v8.5.4", "v8.5.4"), ("", "")])
def test_version_is_normalized(version: str, expected: str) -> None:
    assert checked(rollout_spec(A, version=version)).spec.version == expected


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (rollout_spec(), "the rollout has no nodes"),
        (rollout_spec(A, A), "a node is listed twice"),
        (rollout_spec(*(f"10.0.{n}.1:4000" for n in range(2001))), "2001 nodes are too many for one rollout"),
        (rollout_spec(A, version="--flag"), "'--flag' is not a TiDB release"),
        (
            rollout_spec(A, action="rm"),
            "no action is named 'rm'; rollouts.actions in the configuration has restart,",
        ),
        (rollout_spec(A, action="upgrade", version=""), "the action upgrade uses {version}; set"),
        (rollout_spec("10.0.0.9:4000"), "unknown nodes: 10.0.0.9:4000"),
    ],
)
def test_problems_despite_force(spec: RolloutSpec, problem: str) -> None:
    result = checked(spec)
    assert result.problems_despite_force[0].startswith(problem)
    assert result.problems[: len(result.problems_despite_force)] == result.problems_despite_force


def test_rollout_that_verifies_needs_settings_and_a_capture() -> None:
    spec = rollout_spec(A, verify="replay:monday")
    assert checked(spec).problems_despite_force == tuple(
        f"nodes cannot be verified, because rollouts.verification.{name} is not set"
        for name in ("directory", "user")
    )
    verification = {"directory": "/captures", "user": "replay"}
    settings = RolloutSettings.model_validate(
        {"actions": {"restart": {"command": ["a"]}}, "verification": verification}
    )
    assert run_preflight(spec, cluster(), (), settings).problems == ()
    missing = run_preflight(spec, cluster(), (), settings, "there is no capture")
    assert (missing.problems, missing.problems_despite_force) == (("there is no capture",), ())


def test_rejects_removed_nodes_and_nodes_without_start_time() -> None:
    leaving = cluster(planned(A, removal_since=5.0, state=State.GONE), planned(B, started_at=None))
    problems = checked(rollout_spec(A, B), leaving).problems_despite_force
    assert problems[0] == f"nodes that are being removed: {A}"
    assert problems[1].startswith(f"the start time of {B} is unknown")


def test_rejects_nodes_of_an_active_rollout() -> None:
    other = replace(rollout_with_steps(rollout_spec(A, B)), id="r0")
    assert checked(rollout_spec(A), active_rollouts=[other]).problems_despite_force == (
        f"the rollout r0 is still active and also has {A}",
    )
    assert checked(rollout_spec(C), active_rollouts=[other]).problems_despite_force == ()


def test_one_node_of_each_group_must_stay_active() -> None:
    assert not checked(rollout_spec(*NODES, max_unavailable=2)).problems
    (problem,) = checked(rollout_spec(*NODES, max_unavailable=3)).problems
    assert problem.startswith("with 3 out of service at a time, no other node would be active")
    (problem,) = checked(rollout_spec(*NODES), cluster(planned(C, group="olap"))).problems
    assert problem.startswith("with 1 out of service at a time, no other node of the group olap would be")
    assert not checked(rollout_spec(A, B), cluster(planned(C, group="olap"))).problems


def test_migration_blockers_are_problems() -> None:
    plain = replace(ENVOY, id="envoy-2", filter="none")
    (problem,) = checked(rollout_spec(A), cluster(envoys=[ENVOY, plain])).problems
    assert problem == "Envoys without Tidevoy's module cannot migrate sessions: envoy-2"
    health = {B: Health(migration_blockers=("its sessions have no time to migrate", NO_CERTIFICATE))}
    (problem,) = checked(rollout_spec(A), cluster(facts=Facts(health=health))).problems
    assert problem == f"sessions cannot migrate from or to {B} ({B}: {NO_CERTIFICATE})"
    in_time = {B: Health(migration_blockers=("its sessions have no time to migrate",))}
    assert not checked(rollout_spec(A), cluster(facts=Facts(health=in_time))).problems


def test_switched_off_migration_is_a_problem() -> None:
    envoys = [ENVOY, replace(ENVOY, id="envoy-2"), replace(ENVOY, id="envoy-3", filter="none")]
    off = Intents(switch_overrides={"envoy-2": SwitchOverrides(migration=False)})
    problems = checked(rollout_spec(A), cluster(envoys=envoys, intents=off)).problems
    assert "session migration is switched off in Envoys: envoy-2" in problems
    policy = Policy(module_switches=ModuleSwitches(migration=False))
    (problem,) = checked(rollout_spec(A), cluster(envoys=envoys[:2], policy=policy)).problems
    assert problem == "session migration is switched off in Envoys: envoy-1, envoy-2"


def test_warnings() -> None:
    state = cluster(
        planned(A, version="v8.5.4"),
        planned(C, State.UNHEALTHY),
        envoys=[replace(ENVOY, connected_since=None)],
        intents=Intents(drains={B: DrainIntent(0.0, 60.0)}),
        policy=Policy(status_check=False, sql_check=False),
    )
    warnings = checked(rollout_spec(A, B), state).warnings
    assert [text.partition(":")[0].partition(",")[0] for text in warnings] == [
        "no Envoy is connected",
        "already out of service",
        "already drained",
        "already on v8.5.4",
        "health.status is off",
        "health.sql and health.statement are off and rollouts.probe is not set",
    ]


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("all", (A, B)),
        ("zone=a", (A, B)),
        (f"{B},{A},{B}", (B, A)),
        ("[FD00:0::1]:4000", ("[fd00::1]:4000",)),
        ("10.0.0.9:4000", ("10.0.0.9:4000",)),
    ],
)
def test_selector_resolves_nodes(selector: str, selected: tuple[str, ...]) -> None:
    nodes = [planned(B), planned(C, State.GONE), planned(A)]
    assert select_nodes(selector, nodes) == selected


@pytest.mark.parametrize(
    "selector", ["", "zone=c", "zone=a,disk=ssd", "10.0.0.1", "zone=a,10.0.0.1:4000", "ALL"]
)
def test_invalid_selector_is_rejected(selector: str) -> None:
    with pytest.raises(RolloutRejected):
        select_nodes(selector, [planned(A)])


def test_started_event_describes_the_rollout() -> None:
    (event,) = rollout_events.rollout_events(
        None, state_machine.create("r7", RolloutSpec((A, B), MANUAL), "alice", 5.0)
    )
    assert event.kind == "rollout.started"
    assert event.message == "alice started the rollout r7: 2 nodes, action `manual`"
    assert event.data == {"nodes": [A, B], "action": "manual", "by": "alice"}


def test_events_for_changed_steps_and_phases() -> None:
    before = rollout_with_steps(rollout_spec(A, B), Step(A, Stage.STARTED, attempts=1))
    failed = before.with_steps(Step(A, Stage.FAILED, "it broke", attempts=1))
    after = replace(failed, phase=RolloutPhase.PAUSED, reason="A failed")
    first, second = rollout_events.rollout_events(before, after)
    assert (first.kind, first.message) == ("rollout.step_failed", f"{A} is failed: it broke")
    assert first.data == {"node": A, "from": "started", "to": "failed", "reason": "it broke", "attempt": 1}
    assert (second.kind, second.message) == ("rollout.paused", "the rollout r1 is paused: A failed")
    assert [
        event.kind
        for event in rollout_events.rollout_events(after, replace(after, phase=RolloutPhase.RUNNING))
    ] == ["rollout.resumed"]
    assert not list(rollout_events.rollout_events(after, replace(after, reason="another reason")))
    waits = replace(after, reason=f"{WAITING_PREFIX}a node is out")
    (event,) = rollout_events.rollout_events(after, waits)
    assert (event.kind, event.message) == ("rollout.waiting", "the rollout r1 waits: a node is out")
    assert not list(
        rollout_events.rollout_events(waits, replace(waits, reason=f"{WAITING_PREFIX}another is out"))
    )
