"""The rollout state machine: every transition, every failure, every operator action."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.errors import RolloutRefused
from controlplane.model.intents import DrainIntent, OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, Stage, Step
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import LoginResult, RolloutNodeView
from controlplane.rollouts.state_machine import DrainNode, ProbeLogin, RunAction, UndrainNode
from tests.support.controlplane.rollout_simulator import (
    NEW_VERSION,
    OLD_VERSION,
    ROLLOUT_ID,
    drained_node_view,
    node_view,
    rollout_spec,
    rollout_view,
    rollout_with_steps,
)

A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
NOW = 2000.0
SPEC = rollout_spec(A, B)


def step(stage: Stage, **overrides: object) -> Step:
    """Return A's step, begun recently; its node had started at 100."""
    fields: dict[str, object] = {
        "since": NOW - 5,
        "drain_requested_at": NOW - 50,
        "started_before": 100.0,
        **overrides,
    }
    return Step(A, stage, "a reason", **fields)  # type: ignore[arg-type]


def back(**overrides: object) -> RolloutNodeView:
    """Return A, drained by the rollout, back with the new version and healthy for long enough."""
    fields: dict[str, object] = {
        "started_at": NOW - 30,
        "version": NEW_VERSION,
        "healthy_since": NOW - 20,
        **overrides,
    }
    return drained_node_view(ROLLOUT_ID, **fields)


def stage_and_reason(changed: Rollout, address: str = A) -> tuple[Stage, str]:
    return changed.steps[address].stage, changed.steps[address].reason


def test_first_node_drains_and_second_waits() -> None:
    changed, effects = state_machine.advance(
        rollout_with_steps(SPEC), rollout_view({A: node_view(), B: node_view()}), NOW
    )
    assert stage_and_reason(changed) == (Stage.DRAINING, "its sessions migrate to other nodes")
    assert changed.steps[A] == replace(
        changed.steps[A], drain_requested_at=NOW, sessions=5, started_before=100.0, version_before=OLD_VERSION
    )
    assert changed.steps[B].stage is Stage.PENDING
    assert effects == (DrainNode(A),)


def test_missing_drain_is_requested_again() -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING))
    same, effects = state_machine.advance(record, rollout_view({A: node_view(), B: node_view()}), NOW)
    assert same is record
    assert effects == (DrainNode(A),)


def test_action_runs_once_on_an_empty_node() -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING))
    node = drained_node_view(moved=7, failed=1)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == (RunAction(A, 1),)
    started = changed.steps[A]
    assert stage_and_reason(changed) == (Stage.STARTED, "the action `restart` is running")
    assert (started.attempts, started.moved, started.failed, started.closed) == (1, 7, 1, 0)
    assert started.drained_by_us
    assert state_machine.advance(changed, rollout_view({A: node, B: node_view()}), NOW + 999) == (changed, ())


@pytest.mark.parametrize(("elapsed", "runs_action"), [(599.0, False), (600.0, True)])
def test_sessions_left_at_the_deadline_are_counted(elapsed: float, runs_action: bool) -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING, since=NOW - elapsed, drained_by_us=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == ((RunAction(A, 1),) if runs_action else ())
    assert changed.steps[A].closed == (3 if runs_action else 0)


@pytest.mark.parametrize(("elapsed", "runs_action"), [(600.0, False), (614.0, False), (615.0, True)])
def test_closing_sessions_get_a_grace_time(elapsed: float, runs_action: bool) -> None:
    spec = replace(SPEC, on_deadline=OnDeadline.CLOSE)
    record = rollout_with_steps(spec, step(Stage.DRAINING, since=NOW - elapsed, drained_by_us=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == ((RunAction(A, 1),) if runs_action else ())
    assert changed.steps[A].closed == 3


def test_canceled_drain_fails_the_step_and_pauses() -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING, drained_by_us=True))
    changed, effects = state_machine.advance(record, rollout_view({A: node_view(), B: node_view()}), NOW)
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        "an operator canceled its drain before the action ran",
    )
    assert changed.phase is RolloutPhase.PAUSED
    assert effects == ()


def test_operator_drained_node_runs_the_action_and_stays_drained() -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING))
    changed, effects = state_machine.advance(
        record, rollout_view({A: drained_node_view(owner=""), B: node_view()}), NOW
    )
    assert effects == (RunAction(A, 1),)
    changed = state_machine.action_finished(changed, A, 1, "", NOW + 1)
    returned = replace(back(), drain=DrainIntent(0.0, 60.0))
    changed, effects = state_machine.advance(changed, rollout_view({A: returned, B: node_view()}), NOW + 2)
    assert stage_and_reason(changed) == (
        Stage.DONE,
        "it is back and stays drained, because an operator drained it",
    )
    assert effects == (DrainNode(B),)


@pytest.mark.parametrize(
    ("node", "missing"),
    [
        (drained_node_view(), "has not registered with a newer start time"),
        (None, "is no longer known"),
        (back(healthy_since=None, failure="is not registered"), "is not registered"),
        (back(greeted_at=NOW - 21), "has not sent a greeting on its SQL port since"),
    ],
)
def test_node_that_misses_its_return_deadline_fails(node: RolloutNodeView | None, missing: str) -> None:
    nodes = {B: node_view()} if node is None else {A: node, B: node_view()}
    waiting = rollout_with_steps(SPEC, step(Stage.RETURNING, since=NOW - 599, drained_by_us=node is not None))
    same, _ = state_machine.advance(waiting, rollout_view(nodes), NOW)
    assert same.steps[A].stage is Stage.RETURNING
    late = rollout_with_steps(SPEC, step(Stage.RETURNING, since=NOW - 600, drained_by_us=node is not None))
    changed, effects = state_machine.advance(late, rollout_view(nodes), NOW)
    assert stage_and_reason(changed) == (Stage.FAILED, f"it was not back within 600 s: it {missing}")
    assert changed.phase is RolloutPhase.PAUSED
    drain_note = "; it stays drained" if node is not None else ""
    assert changed.reason == (
        f"{A} failed: it was not back within 600 s: it {missing}{drain_note}. Once it is fixed, `tidevoy"
        f" rollout resume {ROLLOUT_ID}` retries it; `tidevoy rollout abort {ROLLOUT_ID}` undrains it and ends"
        " the rollout"
    )
    assert effects == ()


def test_return_deadline_waits_for_minimum_observation() -> None:
    record = rollout_with_steps(SPEC, step(Stage.RETURNING, since=NOW - 6000, drained_by_us=True))
    nodes = {A: drained_node_view(), B: node_view()}
    assert state_machine.advance(record, rollout_view(nodes, observing_since=NOW - 14), NOW)[0] is record
    assert (
        state_machine.advance(record, rollout_view(nodes, observing_since=NOW - 15), NOW)[0].phase
        is RolloutPhase.PAUSED
    )


def test_node_healthy_at_its_deadline_gets_extra_time() -> None:
    record = rollout_with_steps(SPEC, step(Stage.RETURNING, since=NOW - 600, drained_by_us=True))
    same, _ = state_machine.advance(
        record, rollout_view({A: back(healthy_since=NOW - 9), B: node_view()}), NOW
    )
    assert same.steps[A].stage is Stage.RETURNING
    changed, effects = state_machine.advance(
        record, rollout_view({A: back(healthy_since=NOW - 10), B: node_view()}), NOW
    )
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == (UndrainNode(A),)


@pytest.mark.parametrize("version", [OLD_VERSION, ""])
def test_wrong_version_fails_once_the_node_is_healthy(version: str) -> None:
    record = rollout_with_steps(SPEC, step(Stage.RETURNING, drained_by_us=True))
    early, _ = state_machine.advance(
        record, rollout_view({A: back(version=version, healthy_since=NOW - 9), B: node_view()}), NOW
    )
    assert early.steps[A].stage is Stage.RETURNING
    changed, effects = state_machine.advance(
        record, rollout_view({A: back(version=version), B: node_view()}), NOW
    )
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        f"it came back, but has version {version or 'unknown'} instead of {NEW_VERSION}",
    )
    assert changed.steps[A].version_after == version
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, ())


def test_login_probe_runs_when_all_other_conditions_are_met() -> None:
    record = rollout_with_steps(SPEC, step(Stage.RETURNING, drained_by_us=True, version_after=NEW_VERSION))
    same, effects = state_machine.advance(
        record, rollout_view({A: back(), B: node_view()}, probes_login=True), NOW
    )
    assert (same, effects) == (record, (ProbeLogin(A),))
    failed_probe = back(login_result=LoginResult(NOW - 2, "failed the login probe"))
    assert (
        state_machine.advance(
            record, rollout_view({A: failed_probe, B: node_view()}, probes_login=True), NOW
        )[0]
        is record
    )
    outdated_probe = back(login_result=LoginResult(NOW - 21))
    assert (
        state_machine.advance(
            record, rollout_view({A: outdated_probe, B: node_view()}, probes_login=True), NOW
        )[0]
        is record
    )
    succeeded = back(login_result=LoginResult(NOW - 2))
    changed, _ = state_machine.advance(
        record, rollout_view({A: succeeded, B: node_view()}, probes_login=True), NOW
    )
    assert changed.steps[A].stage is Stage.WARMING


def test_warmed_up_node_is_done_and_the_next_one_starts() -> None:
    record = rollout_with_steps(SPEC, step(Stage.WARMING))
    cold = node_view(started_at=NOW, version=NEW_VERSION, is_warmed_up=False)
    assert state_machine.advance(record, rollout_view({A: cold, B: node_view()}), NOW) == (record, ())
    changed, effects = state_machine.advance(
        record, rollout_view({A: replace(cold, is_warmed_up=True), B: node_view()}), NOW
    )
    assert stage_and_reason(changed) == (Stage.DONE, "it is in service again")
    assert effects == (DrainNode(B),)


def test_missing_undrain_is_requested_again() -> None:
    record = rollout_with_steps(SPEC, step(Stage.WARMING))
    assert state_machine.advance(record, rollout_view({A: back(), B: node_view()}), NOW) == (
        record,
        (UndrainNode(A),),
    )


def test_node_that_does_not_stay_in_service_fails() -> None:
    record = rollout_with_steps(SPEC, step(Stage.WARMING, since=NOW - 600))
    node = node_view(state=State.UNHEALTHY, reason="it refuses connections")
    changed, _ = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        "it was back, but did not stay in service: it is unhealthy: it refuses connections",
    )


def test_rollout_is_done_when_all_nodes_are_done() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DONE))
    changed, _ = state_machine.advance(record, rollout_view({A: node_view()}), NOW)
    assert (changed.phase, changed.reason, changed.ended) == (RolloutPhase.DONE, "1 of 1 nodes done", NOW)


def test_failures_within_the_budget_pause_only_at_the_end() -> None:
    spec = rollout_spec(A, B, failure_budget=1)
    record = rollout_with_steps(spec, step(Stage.FAILED, drained_by_us=True))
    nodes = {A: drained_node_view(), B: node_view()}
    changed, effects = state_machine.advance(record, rollout_view(nodes), NOW)
    assert (changed.phase, effects) == (RolloutPhase.RUNNING, (DrainNode(B),))
    ended = replace(changed, steps=changed.with_step(Step(B, Stage.DONE, "done")))
    ended, effects = state_machine.advance(ended, rollout_view(nodes), NOW)
    assert (ended.phase, effects) == (RolloutPhase.PAUSED, ())


def test_failed_interrupted_action_pauses_despite_the_budget() -> None:
    record = rollout_with_steps(
        rollout_spec(A, B, failure_budget=1), step(Stage.STARTED, attempts=1, drained_by_us=True)
    )
    changed = state_machine.action_interrupted(record, A, NOW)
    assert changed.steps[A].stage is Stage.RETURNING
    late, effects = state_machine.advance(
        changed, rollout_view({A: drained_node_view(), B: node_view()}), NOW + 600
    )
    assert late.phase is RolloutPhase.PAUSED
    assert "may have been interrupted, and it was not back within 600 s" in late.reason
    assert effects == ()


def test_interrupted_step_continues_when_the_node_is_back() -> None:
    record = state_machine.action_interrupted(
        rollout_with_steps(SPEC, step(Stage.STARTED, attempts=1)), A, NOW - 1
    )
    changed, effects = state_machine.advance(record, rollout_view({A: back(), B: node_view()}), NOW)
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == (UndrainNode(A),)


def test_failed_action_pauses_and_is_retried_after_resume() -> None:
    record = rollout_with_steps(SPEC, step(Stage.STARTED, attempts=1, drained_by_us=True))
    failed = state_machine.action_finished(record, A, 1, "ended with exit code 3: no such unit", NOW)
    assert stage_and_reason(failed) == (
        Stage.FAILED,
        "the action `restart` ended with exit code 3: no such unit",
    )
    assert state_machine.action_finished(failed, A, 1, "", NOW) is failed
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    paused, effects = state_machine.advance(failed, nodes, NOW)
    assert (paused.phase, effects) == (RolloutPhase.PAUSED, ())
    resumed = state_machine.resume(paused, "bob", NOW + 1)
    assert resumed.steps[A].stage is Stage.PENDING
    draining, effects = state_machine.advance(resumed, nodes, NOW + 2)
    assert (draining.steps[A].stage, effects) == (Stage.DRAINING, ())
    retried, effects = state_machine.advance(draining, nodes, NOW + 3)
    assert (retried.steps[A].attempts, effects) == (2, (RunAction(A, 2),))


def test_result_of_another_attempt_is_ignored() -> None:
    record = rollout_with_steps(SPEC, step(Stage.STARTED, attempts=2))
    assert state_machine.action_finished(record, A, 1, "failed", NOW) is record


@pytest.mark.parametrize(
    ("node", "stage"),
    [
        (back(), Stage.RETURNING),
        (back(version=OLD_VERSION), Stage.DRAINING),
        (back(healthy_since=None, failure="does not pass"), Stage.DRAINING),
        (drained_node_view(), Stage.DRAINING),
    ],
)
def test_retried_node_that_is_already_back_skips_the_action(node: RolloutNodeView, stage: Stage) -> None:
    failed = rollout_with_steps(
        SPEC, step(Stage.FAILED, attempts=1, drained_by_us=True), phase=RolloutPhase.PAUSED
    )
    changed, _ = state_machine.advance(
        state_machine.resume(failed, "bob", NOW), rollout_view({A: node, B: node_view()}), NOW
    )
    assert changed.steps[A].stage is stage


def test_resumed_failures_are_retried_one_by_one_and_stay_drained() -> None:
    spec = rollout_spec(A, B, C, failure_budget=2)
    failures = [replace(step(Stage.FAILED, drained_by_us=True), address=a) for a in (B, C)]
    record = rollout_with_steps(spec, *failures, phase=RolloutPhase.PAUSED)
    nodes = rollout_view({A: node_view(), B: drained_node_view(), C: drained_node_view()})
    changed, effects = state_machine.advance(state_machine.resume(record, "bob", NOW), nodes, NOW)
    assert [changed.steps[a].stage for a in (A, B, C)] == [Stage.PENDING, Stage.DRAINING, Stage.PENDING]
    assert effects == ()


def test_paused_rollout_starts_nothing_but_finishes_returns() -> None:
    both = rollout_spec(A, B, max_unavailable=2)
    record = rollout_with_steps(
        both,
        step(Stage.RETURNING, drained_by_us=True),
        Step(B, Stage.DRAINING, "drained", drain_requested_at=1.0, started_before=100.0),
        phase=RolloutPhase.PAUSED,
        reason="paused by bob",
    )
    changed, effects = state_machine.advance(record, rollout_view({A: back(), B: drained_node_view()}), NOW)
    assert [changed.steps[a].stage for a in (A, B)] == [Stage.WARMING, Stage.DRAINING]
    assert effects == (UndrainNode(A),)
    assert changed.reason == "paused by bob"


def test_abort_releases_only_its_own_drains() -> None:
    record = rollout_with_steps(rollout_spec(A, B, C), step(Stage.DRAINING, drained_by_us=True))
    aborting = state_machine.abort(record, "bob", NOW)
    nodes = {A: drained_node_view(), B: drained_node_view(owner=""), C: node_view()}
    changed, effects = state_machine.advance(aborting, rollout_view(nodes), NOW)
    assert effects == (UndrainNode(A),)
    assert changed.phase is RolloutPhase.ABORTING
    assert {s.stage for s in changed.steps.values()} == {Stage.SKIPPED}
    over, effects = state_machine.advance(changed, rollout_view({**nodes, A: node_view()}), NOW + 1)
    assert (over.phase, over.reason, effects) == (
        RolloutPhase.ABORTED,
        "aborted by bob; 0 of 3 nodes done, 3 skipped",
        (),
    )


def test_abort_waits_for_a_running_action() -> None:
    record = rollout_with_steps(SPEC, step(Stage.STARTED, attempts=1, drained_by_us=True))
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    waiting, effects = state_machine.advance(state_machine.abort(record, "bob", NOW), nodes, NOW)
    assert (waiting.phase, effects) == (RolloutPhase.ABORTING, ())
    ended = state_machine.action_finished(waiting, A, 1, "", NOW + 1)
    changed, effects = state_machine.advance(ended, nodes, NOW + 1)
    assert (stage_and_reason(changed)[0], effects) == (Stage.SKIPPED, (UndrainNode(A),))


def test_manual_rollout_waits_for_an_external_restart() -> None:
    spec = replace(SPEC, action=MANUAL)
    record = rollout_with_steps(spec, step(Stage.DRAINING))
    changed, effects = state_machine.advance(
        record, rollout_view({A: drained_node_view(), B: node_view()}), NOW
    )
    assert stage_and_reason(changed) == (
        Stage.RETURNING,
        "it can be restarted now; the rollout waits until it is back",
    )
    assert (changed.steps[A].attempts, effects) == (0, ())
    early, _ = state_machine.advance(record, rollout_view({A: back(is_empty=False), B: node_view()}), NOW)
    assert stage_and_reason(early) == (Stage.RETURNING, "it was restarted; waiting for it to pass its checks")


def test_manual_node_restarted_before_its_turn_is_not_drained() -> None:
    spec = replace(rollout_spec(A), action=MANUAL)
    record = state_machine.create(ROLLOUT_ID, spec, "alice", NOW, start_times={A: 100.0})
    node = node_view(started_at=NOW - 30, version=NEW_VERSION, healthy_since=NOW - 20)
    changed, effects = state_machine.advance(record, rollout_view({A: node}), NOW)
    assert stage_and_reason(changed) == (
        Stage.RETURNING,
        "it was already restarted, so it is not restarted again",
    )
    assert effects == ()
    changed, effects = state_machine.advance(changed, rollout_view({A: node}), NOW + 1)
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, ())


def test_rollout_waits_while_another_node_is_out_of_service() -> None:
    unavailable = {C: f"{C} is unhealthy: it refuses connections"}
    waiting, effects = state_machine.advance(
        rollout_with_steps(SPEC), rollout_view({A: node_view(), B: node_view()}, unavailable=unavailable), NOW
    )
    assert effects == ()
    assert waiting.reason == (
        f"waits: a node is already out of service: {C} is unhealthy: it refuses connections"
    )
    assert (
        state_machine.advance(
            waiting, rollout_view({A: node_view(), B: node_view()}, unavailable=unavailable), NOW + 1
        )[0]
        is waiting
    )
    resumed, effects = state_machine.advance(waiting, rollout_view({A: node_view(), B: node_view()}), NOW + 2)
    assert (resumed.reason, effects) == ("", (DrainNode(A),))


def test_node_that_is_out_of_service_starts_first() -> None:
    unhealthy = node_view(state=State.UNHEALTHY, healthy_since=None)
    nodes = rollout_view(
        {A: node_view(), B: unhealthy}, unavailable={B: f"{B} is unhealthy: it refuses connections"}
    )
    assert state_machine.advance(rollout_with_steps(SPEC), nodes, NOW)[1] == (DrainNode(B),)


def test_last_active_node_is_not_drained_unless_forced() -> None:
    last = rollout_view({A: node_view(), B: node_view()}, active={A: "olap", B: "oltp", "other": "oltp"})
    waiting, effects = state_machine.advance(rollout_with_steps(rollout_spec(A)), last, NOW)
    assert (waiting.reason, effects) == (
        f"waits: {A} is the only node of the group olap in service",
        (),
    )
    assert state_machine.advance(rollout_with_steps(rollout_spec(A), forced=True), last, NOW)[1] == (
        DrainNode(A),
    )


def test_max_unavailable_never_empties_a_group() -> None:
    two_nodes = rollout_view({A: node_view(), B: node_view()}, active={A: "", B: ""})
    changed, effects = state_machine.advance(
        rollout_with_steps(rollout_spec(A, B, max_unavailable=2)), two_nodes, NOW
    )
    assert effects == (DrainNode(A),)
    assert changed.steps[B].stage is Stage.PENDING


def test_rollout_waits_for_a_node_of_another_rollout() -> None:
    nodes = rollout_view({A: node_view(), B: node_view()}, in_other_rollouts={A: "r0", B: "r0"})
    waiting, effects = state_machine.advance(rollout_with_steps(SPEC), nodes, NOW)
    assert (waiting.reason, effects) == (f"waits: the rollout r0 is working on {A}", ())


def test_unknown_node_is_awaited_and_then_skipped() -> None:
    record = rollout_with_steps(rollout_spec(A))
    assert state_machine.advance(record, rollout_view({}, is_complete=False), NOW) == (record, ())
    missed, _ = state_machine.advance(record, rollout_view({}), NOW)
    assert missed.steps[A].stage is Stage.PENDING
    found, _ = state_machine.advance(missed, rollout_view({A: node_view()}), NOW + 1)
    assert found.steps[A].stage is Stage.DRAINING
    skipped, _ = state_machine.advance(missed, rollout_view({}), NOW + 600)
    assert stage_and_reason(skipped) == (Stage.SKIPPED, "it no longer existed when its turn came")
    assert (skipped.phase, skipped.reason) == (RolloutPhase.DONE, "0 of 1 nodes done, 1 skipped")


def test_removed_node_is_skipped_or_fails() -> None:
    removed = node_view(is_removed=True)
    assert (
        stage_and_reason(
            state_machine.advance(rollout_with_steps(rollout_spec(A)), rollout_view({A: removed}), NOW)[0]
        )[0]
        is Stage.SKIPPED
    )
    for stage in (Stage.DRAINING, Stage.RETURNING):
        failed, _ = state_machine.advance(
            rollout_with_steps(rollout_spec(A), step(stage)), rollout_view({A: removed}), NOW
        )
        assert failed.phase is RolloutPhase.PAUSED


def test_unknown_node_does_not_fail_while_a_source_is_incomplete() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DRAINING, drained_by_us=True))
    assert state_machine.advance(record, rollout_view({}, is_complete=False), NOW) == (record, ())


def test_node_without_start_time_fails() -> None:
    changed, effects = state_machine.advance(
        rollout_with_steps(rollout_spec(A)), rollout_view({A: node_view(started_at=None)}), NOW
    )
    assert stage_and_reason(changed)[0] is Stage.FAILED
    assert effects == ()


@pytest.mark.parametrize(
    ("operation", "phases"),
    [
        (state_machine.pause, {RolloutPhase.RUNNING, RolloutPhase.PAUSED}),
        (state_machine.resume, {RolloutPhase.RUNNING, RolloutPhase.PAUSED}),
        (
            state_machine.abort,
            {RolloutPhase.RUNNING, RolloutPhase.PAUSED, RolloutPhase.ABORTING, RolloutPhase.ABORTED},
        ),
    ],
)
@pytest.mark.parametrize("phase", list(RolloutPhase))
def test_operations_are_allowed_per_phase(
    operation: object, phases: set[RolloutPhase], phase: RolloutPhase
) -> None:
    assert callable(operation)
    record = rollout_with_steps(SPEC, phase=phase, reason="a reason")
    if phase in phases:
        changed = operation(record, "bob", NOW)
        assert operation(changed, "carol", NOW + 1) is changed, "a repeated operation changes nothing"
    else:
        with pytest.raises(RolloutRefused, match=f"it is {phase}"):
            operation(record, "bob", NOW)


def test_clamp_timestamps_limits_future_times() -> None:
    record = state_machine.clamp_timestamps(
        rollout_with_steps(SPEC, step(Stage.DRAINING), since=NOW, created=NOW), 10.0
    )
    assert (record.since, record.created, record.ended) == (10.0, 10.0, None)
    assert (record.steps[A].since, record.steps[A].drain_requested_at, record.steps[A].ended) == (
        10.0,
        10.0,
        None,
    )
    assert list(record.steps) == [A, B]


def test_drain_progress_is_added_to_draining_steps() -> None:
    record = rollout_with_steps(SPEC, step(Stage.DRAINING))
    shown = state_machine.with_drain_progress(record, {A: (3, 1), B: (9, 9)})
    assert (shown.steps[A].moved, shown.steps[A].failed, shown.steps[B].moved) == (3, 1, 0)


def test_repeatedly_failing_node_misses_its_deadline() -> None:
    """Each pass finds it healthy, but never for long enough."""
    record = rollout_with_steps(SPEC, step(Stage.RETURNING, since=NOW - 601, drained_by_us=True))
    since_before, since_after = (back(healthy_since=NOW + at) for at in (-2, 4))
    same, _ = state_machine.advance(record, rollout_view({A: since_before, B: node_view()}), NOW + 5)
    assert same.steps[A].stage is Stage.RETURNING
    changed, _ = state_machine.advance(record, rollout_view({A: since_after, B: node_view()}), NOW + 5)
    assert changed.steps[A].stage is Stage.FAILED
    assert "has not passed its checks for 10 s yet" in changed.steps[A].reason


def test_missing_node_fails_again_when_retried() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.PENDING, drained_by_us=True))
    empty_view = rollout_view({}, drained_by_us=frozenset({A}))
    missed, _ = state_machine.advance(record, empty_view, NOW)
    assert missed.steps[A].stage is Stage.PENDING
    changed, effects = state_machine.advance(missed, empty_view, NOW + 600)
    assert stage_and_reason(changed) == (Stage.FAILED, "it no longer existed when it was to be retried")
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, ())
    assert changed.steps[A].drained_by_us


def test_rollout_is_not_done_before_all_drains_are_released() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DONE))
    same, effects = state_machine.advance(record, rollout_view({}, drained_by_us=frozenset({A})), NOW)
    assert (same.phase, effects) == (RolloutPhase.RUNNING, (UndrainNode(A),))
    assert state_machine.advance(same, rollout_view({}), NOW)[0].phase is RolloutPhase.DONE


def test_abort_waits_for_an_action_on_an_operator_drained_node() -> None:
    record = state_machine.abort(
        rollout_with_steps(rollout_spec(A), step(Stage.STARTED, attempts=1)), "bob", NOW
    )
    nodes = rollout_view({A: drained_node_view(owner="")})
    assert state_machine.advance(record, nodes, NOW) == (record, ())
    over, _ = state_machine.advance(state_machine.action_finished(record, A, 1, "", NOW), nodes, NOW)
    assert over.phase is RolloutPhase.ABORTED
