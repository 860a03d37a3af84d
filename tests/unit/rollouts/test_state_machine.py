"""The rollout state machine: every transition, every failure, every operator action."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.errors import RolloutRejected
from controlplane.model.intents import DrainIntent, OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, Stage, Step
from controlplane.model.views import DrainProgress
from controlplane.rollouts import node_step, state_machine
from controlplane.rollouts.observation import LoginResult, RolloutNodeView
from controlplane.rollouts.state_machine import Effects, advance
from tests.support.controlplane.rollout_simulator import (
    NEW_VERSION,
    NOW,
    OLD_VERSION,
    ROLLOUT_ID,
    drained_node_view,
    node_view,
    returned_view,
    rollout_spec,
    rollout_view,
    rollout_with_steps,
)

A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
SPEC = rollout_spec(A, B)


def step_of_a(stage: Stage, **overrides: object) -> Step:
    """Return a step of A that began recently. A had started at 100."""
    fields: dict[str, object] = {
        "since": NOW - 5,
        "drain_requested_at": NOW - 50,
        "started_before": 100.0,
        **overrides,
    }
    return Step(A, stage, "a reason", **fields)  # type: ignore[arg-type]


def advance_first(rollout: Rollout, node: RolloutNodeView, **view: object) -> tuple[Rollout, Effects]:
    """Advance a rollout now. `node` is the view of A; B is in service."""
    return advance(rollout, rollout_view({A: node, B: node_view()}, **view), NOW)


def stage_and_reason(changed: Rollout, address: str = A) -> tuple[Stage, str]:
    return changed.steps[address].stage, changed.steps[address].reason


def test_first_node_drains_and_second_waits() -> None:
    changed, effects = advance_first(rollout_with_steps(SPEC), node_view())
    assert stage_and_reason(changed) == (Stage.DRAINING, "its sessions migrate to other nodes")
    assert changed.steps[A] == replace(
        changed.steps[A], drain_requested_at=NOW, sessions=5, started_before=100.0, version_before=OLD_VERSION
    )
    assert changed.steps[B].stage is Stage.PENDING
    assert effects == Effects(drain=(A,))


def test_missing_drain_is_requested_again() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.DRAINING))
    same, effects = advance_first(record, node_view())
    assert same is record
    assert effects == Effects(drain=(A,))


def test_action_runs_once_on_an_empty_node() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.DRAINING))
    node = drained_node_view(drain_progress=DrainProgress(0.0, 1.0, 0, 7, {"busy": 1}))
    changed, effects = advance_first(record, node)
    assert effects == Effects(run_action=(A,))
    started = changed.steps[A]
    assert stage_and_reason(changed) == (Stage.STARTED, "the action `restart` is running")
    assert (started.attempts, started.terminated_sessions) == (1, 0)
    assert (started.migrated_sessions, started.failed_migrations) == (7, 1)
    assert started.owns_drain
    assert advance(changed, rollout_view({A: node, B: node_view()}), NOW + 999) == (
        changed,
        Effects(),
    )


@pytest.mark.parametrize(("elapsed", "runs_action"), [(599.0, False), (600.0, True)])
def test_sessions_left_at_the_deadline_are_counted(elapsed: float, runs_action: bool) -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.DRAINING, since=NOW - elapsed, owns_drain=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = advance_first(record, node)
    assert effects == (Effects(run_action=(A,)) if runs_action else Effects())
    assert changed.steps[A].terminated_sessions == (3 if runs_action else 0)


@pytest.mark.parametrize(("elapsed", "runs_action"), [(600.0, False), (614.0, False), (615.0, True)])
def test_closing_sessions_get_a_grace_time(elapsed: float, runs_action: bool) -> None:
    spec = replace(SPEC, on_deadline=OnDeadline.CLOSE)
    record = rollout_with_steps(spec, step_of_a(Stage.DRAINING, since=NOW - elapsed, owns_drain=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = advance_first(record, node)
    assert effects == (Effects(run_action=(A,)) if runs_action else Effects())
    assert changed.steps[A].terminated_sessions == 3


def test_canceled_drain_fails_the_step_and_pauses() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.DRAINING, owns_drain=True))
    changed, effects = advance_first(record, node_view())
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        "an operator canceled its drain before the action ran",
    )
    assert changed.phase is RolloutPhase.PAUSED
    assert effects == Effects()


def test_operator_drained_node_runs_the_action_and_stays_drained() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.DRAINING))
    changed, effects = advance_first(record, drained_node_view(owner=""))
    assert effects == Effects(run_action=(A,))
    changed = state_machine.action_ended(changed, A, 1, "", NOW + 1)
    returned = replace(returned_view(), drain=DrainIntent(0.0, 60.0))
    changed, effects = advance(changed, rollout_view({A: returned, B: node_view()}), NOW + 2)
    assert stage_and_reason(changed) == (
        Stage.DONE,
        "it is back and stays drained, because an operator drained it",
    )
    assert effects == Effects(drain=(B,))


@pytest.mark.parametrize(
    ("node", "missing"),
    [
        (drained_node_view(), "has not registered with a newer start time"),
        (None, "is no longer known"),
        (returned_view(healthy_since=None, failure="is not registered"), "is not registered"),
        (returned_view(greeted_at=NOW - 21), "has not sent a greeting on its SQL port since"),
    ],
)
def test_node_that_misses_its_return_deadline_fails(node: RolloutNodeView | None, missing: str) -> None:
    nodes = {B: node_view()} if node is None else {A: node, B: node_view()}
    waiting = rollout_with_steps(
        SPEC, step_of_a(Stage.RETURNING, since=NOW - 599, owns_drain=node is not None)
    )
    same, _ = advance(waiting, rollout_view(nodes), NOW)
    assert same.steps[A].stage is Stage.RETURNING
    late = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, since=NOW - 600, owns_drain=node is not None))
    changed, effects = advance(late, rollout_view(nodes), NOW)
    assert stage_and_reason(changed) == (Stage.FAILED, f"it was not back within 600 s: it {missing}")
    assert changed.phase is RolloutPhase.PAUSED
    drain_note = "; it stays drained" if node is not None else ""
    assert changed.reason == (
        f"{A} failed: it was not back within 600 s: it {missing}{drain_note}. Once it is fixed, `tidevoy"
        f" rollout resume {ROLLOUT_ID}` retries it; `tidevoy rollout abort {ROLLOUT_ID}` undrains it and ends"
        " the rollout"
    )
    assert effects == Effects()


def test_return_deadline_waits_for_minimum_observation() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, since=NOW - 6000, owns_drain=True))
    nodes = {A: drained_node_view(), B: node_view()}
    assert advance(record, rollout_view(nodes, observing_since=NOW - 14), NOW)[0] is record
    assert advance(record, rollout_view(nodes, observing_since=NOW - 15), NOW)[0].phase is RolloutPhase.PAUSED


def test_node_healthy_at_its_deadline_gets_extra_time() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, since=NOW - 600, owns_drain=True))
    same, _ = advance_first(record, returned_view(healthy_since=NOW - 9))
    assert same.steps[A].stage is Stage.RETURNING
    changed, effects = advance_first(record, returned_view(healthy_since=NOW - 10))
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == Effects(undrain=(A,))


@pytest.mark.parametrize("version", [OLD_VERSION, ""])
def test_wrong_version_fails_once_the_node_is_healthy(version: str) -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, owns_drain=True))
    early, _ = advance_first(record, returned_view(version=version, healthy_since=NOW - 9))
    assert early.steps[A].stage is Stage.RETURNING
    changed, effects = advance_first(record, returned_view(version=version))
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        f"it came back, but has version {version or 'unknown'} instead of {NEW_VERSION}",
    )
    assert changed.steps[A].version_after == version
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, Effects())


def test_login_probe_runs_when_all_other_conditions_are_met() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, owns_drain=True, version_after=NEW_VERSION))
    same, effects = advance_first(record, returned_view(), probes_login=True)
    assert (same, effects) == (record, Effects(probe_login=(A,)))
    failed_probe = returned_view(login_result=LoginResult(NOW - 2, "failed the login probe"))
    assert advance_first(record, failed_probe, probes_login=True)[0] is record
    outdated_probe = returned_view(login_result=LoginResult(NOW - 21))
    assert advance_first(record, outdated_probe, probes_login=True)[0] is record
    succeeded = returned_view(login_result=LoginResult(NOW - 2))
    changed, _ = advance_first(record, succeeded, probes_login=True)
    assert changed.steps[A].stage is Stage.WARMING


def test_warmed_up_node_is_done_and_the_next_one_starts() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.WARMING))
    cold = node_view(started_at=NOW, version=NEW_VERSION, is_warmed_up=False)
    assert advance_first(record, cold) == (record, Effects())
    changed, effects = advance_first(record, replace(cold, is_warmed_up=True))
    assert stage_and_reason(changed) == (Stage.DONE, "it is in service again")
    assert effects == Effects(drain=(B,))


def test_missing_undrain_is_requested_again() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.WARMING))
    assert advance_first(record, returned_view()) == (
        record,
        Effects(undrain=(A,)),
    )


def test_node_that_does_not_stay_in_service_fails() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.WARMING, since=NOW - 600))
    node = node_view(state=State.UNHEALTHY, reason="it refuses connections")
    changed, _ = advance_first(record, node)
    assert stage_and_reason(changed) == (
        Stage.FAILED,
        "it was back, but did not stay in service: it is unhealthy: it refuses connections",
    )


def test_rollout_is_done_when_all_nodes_are_done() -> None:
    record = rollout_with_steps(rollout_spec(A), step_of_a(Stage.DONE))
    changed, _ = advance(record, rollout_view({A: node_view()}), NOW)
    assert (changed.phase, changed.reason, changed.ended_at) == (RolloutPhase.DONE, "1 of 1 nodes done", NOW)


def test_failures_within_the_budget_pause_only_at_the_end() -> None:
    spec = rollout_spec(A, B, failure_budget=1)
    record = rollout_with_steps(spec, step_of_a(Stage.FAILED, owns_drain=True))
    nodes = {A: drained_node_view(), B: node_view()}
    changed, effects = advance(record, rollout_view(nodes), NOW)
    assert (changed.phase, effects) == (RolloutPhase.RUNNING, Effects(drain=(B,)))
    ended = changed.with_steps(Step(B, Stage.DONE, "done"))
    ended, effects = advance(ended, rollout_view(nodes), NOW)
    assert (ended.phase, effects) == (RolloutPhase.PAUSED, Effects())


def test_failed_interrupted_action_pauses_despite_the_budget() -> None:
    record = rollout_with_steps(
        rollout_spec(A, B, failure_budget=1), step_of_a(Stage.STARTED, attempts=1, owns_drain=True)
    )
    changed = state_machine.action_ended(record, A, 1, None, NOW)
    assert changed.steps[A].stage is Stage.RETURNING
    late, effects = advance(changed, rollout_view({A: drained_node_view(), B: node_view()}), NOW + 600)
    assert late.phase is RolloutPhase.PAUSED
    assert "may have been interrupted, and it was not back within 600 s" in late.reason
    assert effects == Effects()


def test_interrupted_step_continues_when_the_node_is_back() -> None:
    record = state_machine.action_ended(
        rollout_with_steps(SPEC, step_of_a(Stage.STARTED, attempts=1)), A, 1, None, NOW - 1
    )
    changed, effects = advance_first(record, returned_view())
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == Effects(undrain=(A,))


def test_failed_action_pauses_and_is_retried_after_resume() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.STARTED, attempts=1, owns_drain=True))
    failed = state_machine.action_ended(record, A, 1, "ended with exit code 3: no such unit", NOW)
    assert stage_and_reason(failed) == (
        Stage.FAILED,
        "the action `restart` ended with exit code 3: no such unit",
    )
    assert state_machine.action_ended(failed, A, 1, "", NOW) is failed
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    paused, effects = advance(failed, nodes, NOW)
    assert (paused.phase, effects) == (RolloutPhase.PAUSED, Effects())
    resumed = state_machine.resume(paused, "bob", NOW + 1)
    assert resumed.steps[A].stage is Stage.PENDING
    draining, effects = advance(resumed, nodes, NOW + 2)
    assert (draining.steps[A].stage, effects) == (Stage.DRAINING, Effects())
    retried, effects = advance(draining, nodes, NOW + 3)
    assert (retried.steps[A].attempts, effects) == (2, Effects(run_action=(A,)))


def test_result_of_another_attempt_is_ignored() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.STARTED, attempts=2))
    assert state_machine.action_ended(record, A, 1, "failed", NOW) is record


@pytest.mark.parametrize(
    ("node", "stage"),
    [
        (returned_view(), Stage.RETURNING),
        (returned_view(version=OLD_VERSION), Stage.DRAINING),
        (returned_view(healthy_since=None, failure="does not pass"), Stage.DRAINING),
        (drained_node_view(), Stage.DRAINING),
    ],
)
def test_retried_node_that_is_already_back_skips_the_action(node: RolloutNodeView, stage: Stage) -> None:
    failed = rollout_with_steps(
        SPEC, step_of_a(Stage.FAILED, attempts=1, owns_drain=True), phase=RolloutPhase.PAUSED
    )
    changed, _ = advance_first(state_machine.resume(failed, "bob", NOW), node)
    assert changed.steps[A].stage is stage


def test_resumed_failures_are_retried_one_by_one_and_stay_drained() -> None:
    spec = rollout_spec(A, B, C, failure_budget=2)
    failures = [replace(step_of_a(Stage.FAILED, owns_drain=True), address=a) for a in (B, C)]
    record = rollout_with_steps(spec, *failures, phase=RolloutPhase.PAUSED)
    nodes = rollout_view({A: node_view(), B: drained_node_view(), C: drained_node_view()})
    changed, effects = advance(state_machine.resume(record, "bob", NOW), nodes, NOW)
    assert [changed.steps[a].stage for a in (A, B, C)] == [Stage.PENDING, Stage.DRAINING, Stage.PENDING]
    assert effects == Effects()


def test_paused_rollout_starts_nothing_but_finishes_returns() -> None:
    both = rollout_spec(A, B, max_unavailable=2)
    record = rollout_with_steps(
        both,
        step_of_a(Stage.RETURNING, owns_drain=True),
        Step(B, Stage.DRAINING, "drained", drain_requested_at=1.0, started_before=100.0),
        phase=RolloutPhase.PAUSED,
        reason="paused by bob",
    )
    changed, effects = advance(record, rollout_view({A: returned_view(), B: drained_node_view()}), NOW)
    assert [changed.steps[a].stage for a in (A, B)] == [Stage.WARMING, Stage.DRAINING]
    assert effects == Effects(undrain=(A,))
    assert changed.reason == "paused by bob"


def test_abort_releases_only_its_own_drains() -> None:
    record = rollout_with_steps(rollout_spec(A, B, C), step_of_a(Stage.DRAINING, owns_drain=True))
    aborting = state_machine.abort(record, "bob", NOW)
    nodes = {A: drained_node_view(), B: drained_node_view(owner=""), C: node_view()}
    changed, effects = advance(aborting, rollout_view(nodes), NOW)
    assert effects == Effects(undrain=(A,))
    assert changed.phase is RolloutPhase.ABORTING
    assert {s.stage for s in changed.steps.values()} == {Stage.SKIPPED}
    over, effects = advance(changed, rollout_view({**nodes, A: node_view()}), NOW + 1)
    assert (over.phase, over.reason, effects) == (
        RolloutPhase.ABORTED,
        "aborted by bob; 0 of 3 nodes done, 3 skipped",
        Effects(),
    )


def test_abort_waits_for_a_running_action() -> None:
    record = rollout_with_steps(SPEC, step_of_a(Stage.STARTED, attempts=1, owns_drain=True))
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    waiting, effects = advance(state_machine.abort(record, "bob", NOW), nodes, NOW)
    assert (waiting.phase, effects) == (RolloutPhase.ABORTING, Effects())
    ended = state_machine.action_ended(waiting, A, 1, "", NOW + 1)
    changed, effects = advance(ended, nodes, NOW + 1)
    assert (stage_and_reason(changed)[0], effects) == (Stage.SKIPPED, Effects(undrain=(A,)))


def test_manual_rollout_waits_for_an_external_restart() -> None:
    spec = replace(SPEC, action=MANUAL)
    record = rollout_with_steps(spec, step_of_a(Stage.DRAINING))
    changed, effects = advance_first(record, drained_node_view())
    assert stage_and_reason(changed) == (
        Stage.RETURNING,
        "it can be restarted now; the rollout waits until it is back",
    )
    assert (changed.steps[A].attempts, effects) == (0, Effects())
    early, _ = advance_first(record, returned_view(is_empty=False))
    assert stage_and_reason(early) == (Stage.RETURNING, "it was restarted; waiting for it to pass its checks")


def test_manual_node_restarted_before_its_turn_is_not_drained() -> None:
    spec = replace(rollout_spec(A), action=MANUAL)
    record = state_machine.create(ROLLOUT_ID, spec, "alice", NOW, start_times={A: 100.0})
    node = node_view(started_at=NOW - 30, version=NEW_VERSION, healthy_since=NOW - 20)
    changed, effects = advance(record, rollout_view({A: node}), NOW)
    assert stage_and_reason(changed) == (
        Stage.RETURNING,
        "it was already restarted, so it is not restarted again",
    )
    assert effects == Effects()
    changed, effects = advance(changed, rollout_view({A: node}), NOW + 1)
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, Effects())


def test_rollout_waits_while_another_node_is_out_of_service() -> None:
    unavailable = {C: f"{C} is unhealthy: it refuses connections"}
    waiting, effects = advance_first(rollout_with_steps(SPEC), node_view(), unavailable=unavailable)
    assert effects == Effects()
    assert waiting.reason == (
        f"waits: a node is already out of service: {C} is unhealthy: it refuses connections"
    )
    assert (
        advance(waiting, rollout_view({A: node_view(), B: node_view()}, unavailable=unavailable), NOW + 1)[0]
        is waiting
    )
    resumed, effects = advance(waiting, rollout_view({A: node_view(), B: node_view()}), NOW + 2)
    assert (resumed.reason, effects) == ("", Effects(drain=(A,)))


def test_node_that_is_out_of_service_starts_first() -> None:
    unhealthy = node_view(state=State.UNHEALTHY, healthy_since=None)
    nodes = rollout_view(
        {A: node_view(), B: unhealthy}, unavailable={B: f"{B} is unhealthy: it refuses connections"}
    )
    assert advance(rollout_with_steps(SPEC), nodes, NOW)[1] == Effects(drain=(B,))


def test_last_active_node_is_not_drained_unless_forced() -> None:
    last = rollout_view({A: node_view(), B: node_view()}, active={A: "olap", B: "oltp", "other": "oltp"})
    waiting, effects = advance(rollout_with_steps(rollout_spec(A)), last, NOW)
    assert (waiting.reason, effects) == (
        f"waits: {A} is the only node of the group olap in service",
        Effects(),
    )
    assert advance(rollout_with_steps(rollout_spec(A), forced=True), last, NOW)[1] == Effects(drain=(A,))


def test_max_unavailable_never_empties_a_group() -> None:
    two_nodes = rollout_view({A: node_view(), B: node_view()}, active={A: "", B: ""})
    changed, effects = advance(rollout_with_steps(rollout_spec(A, B, max_unavailable=2)), two_nodes, NOW)
    assert effects == Effects(drain=(A,))
    assert changed.steps[B].stage is Stage.PENDING


def test_rollout_waits_for_a_node_of_another_rollout() -> None:
    nodes = rollout_view({A: node_view(), B: node_view()}, in_other_rollouts={A: "r0", B: "r0"})
    waiting, effects = advance(rollout_with_steps(SPEC), nodes, NOW)
    assert (waiting.reason, effects) == (f"waits: the rollout r0 is working on {A}", Effects())


def test_unknown_node_is_awaited_and_then_skipped() -> None:
    record = rollout_with_steps(rollout_spec(A))
    assert advance(record, rollout_view({}, is_complete=False), NOW) == (record, Effects())
    missed, _ = advance(record, rollout_view({}), NOW)
    assert missed.steps[A].stage is Stage.PENDING
    found, _ = advance(missed, rollout_view({A: node_view()}), NOW + 1)
    assert found.steps[A].stage is Stage.DRAINING
    skipped, _ = advance(missed, rollout_view({}), NOW + 600)
    assert stage_and_reason(skipped) == (Stage.SKIPPED, "it no longer existed when its turn came")
    assert (skipped.phase, skipped.reason) == (RolloutPhase.DONE, "0 of 1 nodes done, 1 skipped")


def test_removed_node_is_skipped_or_fails() -> None:
    removed = node_view(is_removed=True)
    assert (
        stage_and_reason(advance(rollout_with_steps(rollout_spec(A)), rollout_view({A: removed}), NOW)[0])[0]
        is Stage.SKIPPED
    )
    for stage in (Stage.DRAINING, Stage.RETURNING):
        failed, _ = advance(
            rollout_with_steps(rollout_spec(A), step_of_a(stage)), rollout_view({A: removed}), NOW
        )
        assert failed.phase is RolloutPhase.PAUSED


def test_unknown_node_does_not_fail_while_a_source_is_incomplete() -> None:
    record = rollout_with_steps(rollout_spec(A), step_of_a(Stage.DRAINING, owns_drain=True))
    assert advance(record, rollout_view({}, is_complete=False), NOW) == (record, Effects())


def test_node_without_start_time_fails() -> None:
    changed, effects = advance(
        rollout_with_steps(rollout_spec(A)), rollout_view({A: node_view(started_at=None)}), NOW
    )
    assert stage_and_reason(changed)[0] is Stage.FAILED
    assert effects == Effects()


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
        with pytest.raises(RolloutRejected, match=f"it is {phase}"):
            operation(record, "bob", NOW)


def test_clamp_timestamps_limits_future_times() -> None:
    record = state_machine.clamp_timestamps(
        rollout_with_steps(SPEC, step_of_a(Stage.DRAINING), since=NOW, created_at=NOW), 10.0
    )
    assert (record.since, record.created_at, record.ended_at) == (10.0, 10.0, None)
    assert (record.steps[A].since, record.steps[A].drain_requested_at, record.steps[A].ended_at) == (
        10.0,
        10.0,
        None,
    )
    assert list(record.steps) == [A, B]


def test_drain_progress_is_added_to_a_step() -> None:
    draining = step_of_a(Stage.DRAINING, migrated_sessions=4)
    shown = node_step.with_drain_progress(draining, DrainProgress(0.0, 1.0, 2, 3, {"busy": 1}))
    assert (shown.migrated_sessions, shown.failed_migrations) == (4, 1), "counts never decrease"
    assert node_step.with_drain_progress(draining, None) is draining


def test_repeatedly_failing_node_misses_its_deadline() -> None:
    """Each pass finds the node healthy, but never for long enough."""
    record = rollout_with_steps(SPEC, step_of_a(Stage.RETURNING, since=NOW - 601, owns_drain=True))
    since_before, since_after = (returned_view(healthy_since=NOW + at) for at in (-2, 4))
    same, _ = advance(record, rollout_view({A: since_before, B: node_view()}), NOW + 5)
    assert same.steps[A].stage is Stage.RETURNING
    changed, _ = advance(record, rollout_view({A: since_after, B: node_view()}), NOW + 5)
    assert changed.steps[A].stage is Stage.FAILED
    assert "has not passed its checks for 10 s yet" in changed.steps[A].reason


def test_missing_node_fails_again_when_retried() -> None:
    record = rollout_with_steps(rollout_spec(A), step_of_a(Stage.PENDING, owns_drain=True))
    empty_view = rollout_view({}, owned_drains=frozenset({A}))
    missed, _ = advance(record, empty_view, NOW)
    assert missed.steps[A].stage is Stage.PENDING
    changed, effects = advance(missed, empty_view, NOW + 600)
    assert stage_and_reason(changed) == (Stage.FAILED, "it no longer existed when it was to be retried")
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, Effects())
    assert changed.steps[A].owns_drain


def test_rollout_is_not_done_before_all_drains_are_released() -> None:
    record = rollout_with_steps(rollout_spec(A), step_of_a(Stage.DONE))
    same, effects = advance(record, rollout_view({}, owned_drains=frozenset({A})), NOW)
    assert (same.phase, effects) == (RolloutPhase.RUNNING, Effects(undrain=(A,)))
    assert advance(same, rollout_view({}), NOW)[0].phase is RolloutPhase.DONE


def test_abort_waits_for_an_action_on_an_operator_drained_node() -> None:
    record = state_machine.abort(
        rollout_with_steps(rollout_spec(A), step_of_a(Stage.STARTED, attempts=1)), "bob", NOW
    )
    nodes = rollout_view({A: drained_node_view(owner="")})
    assert advance(record, nodes, NOW) == (record, Effects())
    over, _ = advance(state_machine.action_ended(record, A, 1, "", NOW), nodes, NOW)
    assert over.phase is RolloutPhase.ABORTED
