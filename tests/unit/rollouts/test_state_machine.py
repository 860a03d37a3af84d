"""One rollout, step by step: each way on, each failure, each thing that an operator may do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.errors import RolloutRefused
from controlplane.model.intents import DrainIntent as Asked
from controlplane.model.intents import OnDeadline
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
WANTED = rollout_spec(A, B)


def step(stage: Stage, **more: object) -> Step:
    """A's step, begun lately; its node had started at 100."""
    said: dict[str, object] = {
        "since": NOW - 5,
        "drain_requested_at": NOW - 50,
        "started_before": 100.0,
        **more,
    }
    return Step(A, stage, "a reason", **said)  # type: ignore[arg-type]


def back(**more: object) -> RolloutNodeView:
    """A, drained by the rollout, back with the new version and steady for long enough."""
    said: dict[str, object] = {
        "started_at": NOW - 30,
        "version": NEW_VERSION,
        "healthy_since": NOW - 20,
        **more,
    }
    return drained_node_view(ROLLOUT_ID, **said)


def of(changed: Rollout, address: str = A) -> tuple[Stage, str]:
    return changed.steps[address].stage, changed.steps[address].reason


def test_the_first_node_is_drained_and_the_second_waits() -> None:
    changed, effects = state_machine.advance(
        rollout_with_steps(WANTED), rollout_view({A: node_view(), B: node_view()}), NOW
    )
    assert of(changed) == (Stage.DRAINING, "its sessions move to other nodes")
    assert changed.steps[A] == replace(
        changed.steps[A], drain_requested_at=NOW, sessions=5, started_before=100.0, version_before=OLD_VERSION
    )
    assert changed.steps[B].stage is Stage.PENDING
    assert effects == (DrainNode(A),)


def test_a_drain_that_was_not_carried_out_is_asked_for_again() -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING))
    same, effects = state_machine.advance(record, rollout_view({A: node_view(), B: node_view()}), NOW)
    assert same is record
    assert effects == (DrainNode(A),)


def test_an_empty_node_is_acted_on_once() -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING))
    node = drained_node_view(moved=7, failed=1)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == (RunAction(A, 1),)
    started = changed.steps[A]
    assert of(changed) == (Stage.STARTED, "the action `restart` runs")
    assert (started.attempts, started.moved, started.failed, started.closed) == (1, 7, 1, 0)
    assert started.drained_by_us
    assert state_machine.advance(changed, rollout_view({A: node, B: node_view()}), NOW + 999) == (changed, ())


@pytest.mark.parametrize(("past", "acts"), [(599.0, False), (600.0, True)])
def test_sessions_that_are_left_at_the_deadline_are_counted(past: float, acts: bool) -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING, since=NOW - past, drained_by_us=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == ((RunAction(A, 1),) if acts else ())
    assert changed.steps[A].closed == (3 if acts else 0)


@pytest.mark.parametrize(("past", "acts"), [(600.0, False), (614.0, False), (615.0, True)])
def test_sessions_that_are_ended_have_time_for_it(past: float, acts: bool) -> None:
    wanted = replace(WANTED, on_deadline=OnDeadline.CLOSE)
    record = rollout_with_steps(wanted, step(Stage.DRAINING, since=NOW - past, drained_by_us=True))
    node = drained_node_view(state=State.DRAINING, is_empty=False, sessions=3)
    changed, effects = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert effects == ((RunAction(A, 1),) if acts else ())
    assert changed.steps[A].closed == 3


def test_a_drain_that_an_operator_took_back_fails_and_pauses() -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING, drained_by_us=True))
    changed, effects = state_machine.advance(record, rollout_view({A: node_view(), B: node_view()}), NOW)
    assert of(changed) == (
        Stage.FAILED,
        "its drain was taken back by an operator before the action was run",
    )
    assert changed.phase is RolloutPhase.PAUSED
    assert effects == ()


def test_a_node_that_an_operator_drained_is_acted_on_and_stays_drained() -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING))
    changed, effects = state_machine.advance(
        record, rollout_view({A: drained_node_view(owner=""), B: node_view()}), NOW
    )
    assert effects == (RunAction(A, 1),)
    changed = state_machine.action_finished(changed, A, 1, "", NOW + 1)
    came = replace(back(), drain=Asked(0.0, 60.0))
    changed, effects = state_machine.advance(changed, rollout_view({A: came, B: node_view()}), NOW + 2)
    assert of(changed) == (Stage.DONE, "it is back, and stays drained, for an operator drained it")
    assert effects == (DrainNode(B),)


@pytest.mark.parametrize(
    ("node", "lacks"),
    [
        (drained_node_view(), "has not registered with a newer start time"),
        (None, "is not known any more"),
        (back(healthy_since=None, failure="is not registered"), "is not registered"),
        (back(greeted_at=NOW - 21), "has not greeted on its SQL port since"),
    ],
)
def test_a_node_that_does_not_come_back_in_time_fails(node: RolloutNodeView | None, lacks: str) -> None:
    nodes = {B: node_view()} if node is None else {A: node, B: node_view()}
    waiting = rollout_with_steps(
        WANTED, step(Stage.RETURNING, since=NOW - 599, drained_by_us=node is not None)
    )
    same, _ = state_machine.advance(waiting, rollout_view(nodes), NOW)
    assert same.steps[A].stage is Stage.RETURNING
    late = rollout_with_steps(WANTED, step(Stage.RETURNING, since=NOW - 600, drained_by_us=node is not None))
    changed, effects = state_machine.advance(late, rollout_view(nodes), NOW)
    assert of(changed) == (Stage.FAILED, f"it was not back within 600 s: it {lacks}")
    assert changed.phase is RolloutPhase.PAUSED
    kept = "; it stays drained" if node is not None else ""
    assert changed.reason == (
        f"{A} failed: it was not back within 600 s: it {lacks}{kept}. Once it is mended, `tidevoy rollout"
        f" resume {ROLLOUT_ID}` goes on with it; `tidevoy rollout abort {ROLLOUT_ID}` undrains it and ends"
    )
    assert effects == ()


def test_nobody_is_late_before_it_could_be_seen() -> None:
    record = rollout_with_steps(WANTED, step(Stage.RETURNING, since=NOW - 6000, drained_by_us=True))
    nodes = {A: drained_node_view(), B: node_view()}
    assert state_machine.advance(record, rollout_view(nodes, observing_since=NOW - 14), NOW)[0] is record
    assert (
        state_machine.advance(record, rollout_view(nodes, observing_since=NOW - 15), NOW)[0].phase
        is RolloutPhase.PAUSED
    )


def test_a_node_that_is_steady_at_its_deadline_may_go_on() -> None:
    record = rollout_with_steps(WANTED, step(Stage.RETURNING, since=NOW - 600, drained_by_us=True))
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
def test_a_wrong_version_fails_as_soon_as_it_is_steady(version: str) -> None:
    record = rollout_with_steps(WANTED, step(Stage.RETURNING, drained_by_us=True))
    early, _ = state_machine.advance(
        record, rollout_view({A: back(version=version, healthy_since=NOW - 9), B: node_view()}), NOW
    )
    assert early.steps[A].stage is Stage.RETURNING
    changed, effects = state_machine.advance(
        record, rollout_view({A: back(version=version), B: node_view()}), NOW
    )
    assert of(changed) == (
        Stage.FAILED,
        f"it came back, but has version {version or 'unknown'} instead of {NEW_VERSION}",
    )
    assert changed.steps[A].version_after == version
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, ())


def test_a_session_is_opened_when_all_else_is_well() -> None:
    record = rollout_with_steps(WANTED, step(Stage.RETURNING, drained_by_us=True, version_after=NEW_VERSION))
    same, effects = state_machine.advance(
        record, rollout_view({A: back(), B: node_view()}, probes_login=True), NOW
    )
    assert (same, effects) == (record, (ProbeLogin(A),))
    refused = back(login_result=LoginResult(NOW - 2, "cannot be logged in to"))
    assert (
        state_machine.advance(record, rollout_view({A: refused, B: node_view()}, probes_login=True), NOW)[0]
        is record
    )
    before = back(login_result=LoginResult(NOW - 21))
    assert (
        state_machine.advance(record, rollout_view({A: before, B: node_view()}, probes_login=True), NOW)[0]
        is record
    )
    welcome = back(login_result=LoginResult(NOW - 2))
    changed, _ = state_machine.advance(
        record, rollout_view({A: welcome, B: node_view()}, probes_login=True), NOW
    )
    assert changed.steps[A].stage is Stage.WARMING


def test_a_node_is_done_when_it_is_warm_and_then_the_next_one_begins() -> None:
    record = rollout_with_steps(WANTED, step(Stage.WARMING))
    cold = node_view(started_at=NOW, version=NEW_VERSION, is_warmed_up=False)
    assert state_machine.advance(record, rollout_view({A: cold, B: node_view()}), NOW) == (record, ())
    changed, effects = state_machine.advance(
        record, rollout_view({A: replace(cold, is_warmed_up=True), B: node_view()}), NOW
    )
    assert of(changed) == (Stage.DONE, "it is in service again")
    assert effects == (DrainNode(B),)


def test_an_undrain_that_was_not_carried_out_is_asked_for_again() -> None:
    record = rollout_with_steps(WANTED, step(Stage.WARMING))
    assert state_machine.advance(record, rollout_view({A: back(), B: node_view()}), NOW) == (
        record,
        (UndrainNode(A),),
    )


def test_a_node_that_does_not_stay_in_service_fails() -> None:
    record = rollout_with_steps(WANTED, step(Stage.WARMING, since=NOW - 600))
    node = node_view(state=State.UNHEALTHY, reason="it refuses connections")
    changed, _ = state_machine.advance(record, rollout_view({A: node, B: node_view()}), NOW)
    assert of(changed) == (
        Stage.FAILED,
        "it was back, but did not stay in service: it is unhealthy: it refuses connections",
    )


def test_a_rollout_is_done_when_all_are() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DONE))
    changed, _ = state_machine.advance(record, rollout_view({A: node_view()}), NOW)
    assert (changed.phase, changed.reason, changed.ended) == (RolloutPhase.DONE, "1 of 1 nodes done", NOW)


def test_failures_within_the_budget_pause_at_the_end_alone() -> None:
    wanted = rollout_spec(A, B, failure_budget=1)
    record = rollout_with_steps(wanted, step(Stage.FAILED, drained_by_us=True))
    nodes = {A: drained_node_view(), B: node_view()}
    changed, effects = state_machine.advance(record, rollout_view(nodes), NOW)
    assert (changed.phase, effects) == (RolloutPhase.RUNNING, (DrainNode(B),))
    ended = replace(changed, steps=changed.with_step(Step(B, Stage.DONE, "done")))
    ended, effects = state_machine.advance(ended, rollout_view(nodes), NOW)
    assert (ended.phase, effects) == (RolloutPhase.PAUSED, ())


def test_a_failure_that_may_be_cut_off_pauses_whatever_the_budget() -> None:
    record = rollout_with_steps(
        rollout_spec(A, B, failure_budget=1), step(Stage.STARTED, attempts=1, drained_by_us=True)
    )
    changed = state_machine.action_interrupted(record, A, NOW)
    assert changed.steps[A].stage is Stage.RETURNING
    late, effects = state_machine.advance(
        changed, rollout_view({A: drained_node_view(), B: node_view()}), NOW + 600
    )
    assert late.phase is RolloutPhase.PAUSED
    assert "may have been cut off, and it was not back within 600 s" in late.reason
    assert effects == ()


def test_what_was_cut_off_goes_on_when_the_node_is_back() -> None:
    record = state_machine.action_interrupted(
        rollout_with_steps(WANTED, step(Stage.STARTED, attempts=1)), A, NOW - 1
    )
    changed, effects = state_machine.advance(record, rollout_view({A: back(), B: node_view()}), NOW)
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == (UndrainNode(A),)


def test_an_action_that_fails_pauses_and_is_run_again_after_resume() -> None:
    record = rollout_with_steps(WANTED, step(Stage.STARTED, attempts=1, drained_by_us=True))
    told = state_machine.action_finished(record, A, 1, "ended with exit code 3: no such unit", NOW)
    assert of(told) == (Stage.FAILED, "the action `restart` ended with exit code 3: no such unit")
    assert state_machine.action_finished(told, A, 1, "", NOW) is told
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    paused, effects = state_machine.advance(told, nodes, NOW)
    assert (paused.phase, effects) == (RolloutPhase.PAUSED, ())
    resumed = state_machine.resume(paused, "bob", NOW + 1)
    assert resumed.steps[A].stage is Stage.PENDING
    begun, effects = state_machine.advance(resumed, nodes, NOW + 2)
    assert (begun.steps[A].stage, effects) == (Stage.DRAINING, ())
    again, effects = state_machine.advance(begun, nodes, NOW + 3)
    assert (again.steps[A].attempts, effects) == (2, (RunAction(A, 2),))


def test_the_outcome_of_another_attempt_is_passed_over() -> None:
    record = rollout_with_steps(WANTED, step(Stage.STARTED, attempts=2))
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
def test_a_node_that_is_back_and_right_meanwhile_is_not_acted_on_again(
    node: RolloutNodeView, stage: Stage
) -> None:
    failed = rollout_with_steps(
        WANTED, step(Stage.FAILED, attempts=1, drained_by_us=True), phase=RolloutPhase.PAUSED
    )
    changed, _ = state_machine.advance(
        state_machine.resume(failed, "bob", NOW), rollout_view({A: node, B: node_view()}), NOW
    )
    assert changed.steps[A].stage is stage


def test_resumed_failures_are_tried_one_after_the_other_and_stay_drained() -> None:
    wanted = rollout_spec(A, B, C, failure_budget=2)
    failures = [replace(step(Stage.FAILED, drained_by_us=True), address=a) for a in (B, C)]
    record = rollout_with_steps(wanted, *failures, phase=RolloutPhase.PAUSED)
    nodes = rollout_view({A: node_view(), B: drained_node_view(), C: drained_node_view()})
    changed, effects = state_machine.advance(state_machine.resume(record, "bob", NOW), nodes, NOW)
    assert [changed.steps[a].stage for a in (A, B, C)] == [Stage.PENDING, Stage.DRAINING, Stage.PENDING]
    assert effects == ()


def test_a_paused_rollout_begins_nothing_but_brings_back() -> None:
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


def test_an_aborted_rollout_gives_back_its_own_drains_alone() -> None:
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


def test_an_aborted_rollout_waits_for_an_action_that_runs() -> None:
    record = rollout_with_steps(WANTED, step(Stage.STARTED, attempts=1, drained_by_us=True))
    nodes = rollout_view({A: drained_node_view(), B: node_view()})
    waiting, effects = state_machine.advance(state_machine.abort(record, "bob", NOW), nodes, NOW)
    assert (waiting.phase, effects) == (RolloutPhase.ABORTING, ())
    ended = state_machine.action_finished(waiting, A, 1, "", NOW + 1)
    changed, effects = state_machine.advance(ended, nodes, NOW + 1)
    assert (of(changed)[0], effects) == (Stage.SKIPPED, (UndrainNode(A),))


def test_a_manual_one_waits_for_a_restart_by_others() -> None:
    wanted = replace(WANTED, action=MANUAL)
    record = rollout_with_steps(wanted, step(Stage.DRAINING))
    changed, effects = state_machine.advance(
        record, rollout_view({A: drained_node_view(), B: node_view()}), NOW
    )
    assert of(changed) == (Stage.RETURNING, "it can be restarted now; the rollout waits until it is back")
    assert (changed.steps[A].attempts, effects) == (0, ())
    early, _ = state_machine.advance(record, rollout_view({A: back(is_empty=False), B: node_view()}), NOW)
    assert of(early) == (Stage.RETURNING, "it was restarted; it is to pass its checks")


def test_a_manual_one_that_was_restarted_before_its_turn_is_not_drained() -> None:
    wanted = replace(rollout_spec(A), action=MANUAL)
    record = state_machine.create(ROLLOUT_ID, wanted, "alice", NOW, start_times={A: 100.0})
    node = node_view(started_at=NOW - 30, version=NEW_VERSION, healthy_since=NOW - 20)
    changed, effects = state_machine.advance(record, rollout_view({A: node}), NOW)
    assert of(changed) == (Stage.RETURNING, "it was restarted meanwhile, so it is not restarted again")
    assert effects == ()
    changed, effects = state_machine.advance(changed, rollout_view({A: node}), NOW + 1)
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, ())


def test_another_node_that_is_out_of_service_holds_it_up() -> None:
    out = {C: f"{C} is unhealthy: it refuses connections"}
    waiting, effects = state_machine.advance(
        rollout_with_steps(WANTED), rollout_view({A: node_view(), B: node_view()}, unavailable=out), NOW
    )
    assert effects == ()
    assert waiting.reason == (
        f"waits: a node is out of service already: {C} is unhealthy: it refuses connections"
    )
    assert (
        state_machine.advance(
            waiting, rollout_view({A: node_view(), B: node_view()}, unavailable=out), NOW + 1
        )[0]
        is waiting
    )
    going, effects = state_machine.advance(waiting, rollout_view({A: node_view(), B: node_view()}), NOW + 2)
    assert (going.reason, effects) == ("", (DrainNode(A),))


def test_a_node_that_is_out_of_service_itself_comes_first() -> None:
    ill = node_view(state=State.UNHEALTHY, healthy_since=None)
    nodes = rollout_view(
        {A: node_view(), B: ill}, unavailable={B: f"{B} is unhealthy: it refuses connections"}
    )
    assert state_machine.advance(rollout_with_steps(WANTED), nodes, NOW)[1] == (DrainNode(B),)


def test_the_last_node_in_service_is_not_drained_unless_forced() -> None:
    last = rollout_view({A: node_view(), B: node_view()}, active={A: "olap", B: "oltp", "other": "oltp"})
    waiting, effects = state_machine.advance(rollout_with_steps(rollout_spec(A)), last, NOW)
    assert (waiting.reason, effects) == (
        f"waits: {A} is the only node of the group olap in service",
        (),
    )
    assert state_machine.advance(rollout_with_steps(rollout_spec(A), forced=True), last, NOW)[1] == (
        DrainNode(A),
    )


def test_two_at_a_time_never_leave_a_group_without_any() -> None:
    pair = rollout_view({A: node_view(), B: node_view()}, active={A: "", B: ""})
    changed, effects = state_machine.advance(
        rollout_with_steps(rollout_spec(A, B, max_unavailable=2)), pair, NOW
    )
    assert effects == (DrainNode(A),)
    assert changed.steps[B].stage is Stage.PENDING


def test_a_node_that_another_rollout_has_in_hand_is_waited_for() -> None:
    nodes = rollout_view({A: node_view(), B: node_view()}, in_other_rollouts={A: "r0", B: "r0"})
    waiting, effects = state_machine.advance(rollout_with_steps(WANTED), nodes, NOW)
    assert (waiting.reason, effects) == (f"waits: the rollout r0 has {A} in hand", ())


def test_a_node_that_is_not_known_is_waited_for_and_then_skipped() -> None:
    record = rollout_with_steps(rollout_spec(A))
    assert state_machine.advance(record, rollout_view({}, is_complete=False), NOW) == (record, ())
    missed, _ = state_machine.advance(record, rollout_view({}), NOW)
    assert missed.steps[A].stage is Stage.PENDING
    there, _ = state_machine.advance(missed, rollout_view({A: node_view()}), NOW + 1)
    assert there.steps[A].stage is Stage.DRAINING
    gone, _ = state_machine.advance(missed, rollout_view({}), NOW + 600)
    assert of(gone) == (Stage.SKIPPED, "it was gone before its turn")
    assert (gone.phase, gone.reason) == (RolloutPhase.DONE, "0 of 1 nodes done, 1 skipped")


def test_a_node_that_is_removed_is_skipped_or_fails() -> None:
    removed = node_view(is_removed=True)
    assert (
        of(state_machine.advance(rollout_with_steps(rollout_spec(A)), rollout_view({A: removed}), NOW)[0])[0]
        is Stage.SKIPPED
    )
    for stage in (Stage.DRAINING, Stage.RETURNING):
        failed, _ = state_machine.advance(
            rollout_with_steps(rollout_spec(A), step(stage)), rollout_view({A: removed}), NOW
        )
        assert failed.phase is RolloutPhase.PAUSED


def test_nothing_that_is_not_known_fails_while_a_source_is_silent() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DRAINING, drained_by_us=True))
    assert state_machine.advance(record, rollout_view({}, is_complete=False), NOW) == (record, ())


def test_a_start_time_must_be_known() -> None:
    changed, effects = state_machine.advance(
        rollout_with_steps(rollout_spec(A)), rollout_view({A: node_view(started_at=None)}), NOW
    )
    assert of(changed)[0] is Stage.FAILED
    assert effects == ()


@pytest.mark.parametrize(
    ("ask", "phases"),
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
def test_what_operators_may_do_when(ask: object, phases: set[RolloutPhase], phase: RolloutPhase) -> None:
    assert callable(ask)
    record = rollout_with_steps(WANTED, phase=phase, reason="a reason")
    if phase in phases:
        asked = ask(record, "bob", NOW)
        assert ask(asked, "carol", NOW + 1) is asked, "asked again, it stays as it is"
    else:
        with pytest.raises(RolloutRefused, match=f"it is {phase}"):
            ask(record, "bob", NOW)


def test_times_of_a_clock_that_was_ahead_are_cut() -> None:
    record = state_machine.clamp_timestamps(
        rollout_with_steps(WANTED, step(Stage.DRAINING), since=NOW, created=NOW), 10.0
    )
    assert (record.since, record.created, record.ended) == (10.0, 10.0, None)
    assert (record.steps[A].since, record.steps[A].drain_requested_at, record.steps[A].ended) == (
        10.0,
        10.0,
        None,
    )
    assert list(record.steps) == [A, B]


def test_progress_shows_while_a_node_is_drained() -> None:
    record = rollout_with_steps(WANTED, step(Stage.DRAINING))
    shown = state_machine.with_drain_progress(record, {A: (3, 1), B: (9, 9)})
    assert (shown.steps[A].moved, shown.steps[A].failed, shown.steps[B].moved) == (3, 1, 0)


def test_a_node_that_falls_again_and_again_is_late_some_time() -> None:
    """Each look finds it steady, and never for long enough."""
    record = rollout_with_steps(WANTED, step(Stage.RETURNING, since=NOW - 601, drained_by_us=True))
    since_before, since_after = (back(healthy_since=NOW + at) for at in (-2, 4))
    same, _ = state_machine.advance(record, rollout_view({A: since_before, B: node_view()}), NOW + 5)
    assert same.steps[A].stage is Stage.RETURNING
    changed, _ = state_machine.advance(record, rollout_view({A: since_after, B: node_view()}), NOW + 5)
    assert changed.steps[A].stage is Stage.FAILED
    assert "has not passed its checks for 10 s yet" in changed.steps[A].reason


def test_a_node_that_is_gone_when_it_is_tried_again_fails_again() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.PENDING, drained_by_us=True))
    gone = rollout_view({}, drained_by_us=frozenset({A}))
    missed, _ = state_machine.advance(record, gone, NOW)
    assert missed.steps[A].stage is Stage.PENDING
    changed, effects = state_machine.advance(missed, gone, NOW + 600)
    assert of(changed) == (Stage.FAILED, "it was gone when it was to be tried again")
    assert (changed.phase, effects) == (RolloutPhase.PAUSED, ())
    assert changed.steps[A].drained_by_us


def test_a_rollout_is_not_done_before_all_drains_are_taken_back() -> None:
    record = rollout_with_steps(rollout_spec(A), step(Stage.DONE))
    same, effects = state_machine.advance(record, rollout_view({}, drained_by_us=frozenset({A})), NOW)
    assert (same.phase, effects) == (RolloutPhase.RUNNING, (UndrainNode(A),))
    assert state_machine.advance(same, rollout_view({}), NOW)[0].phase is RolloutPhase.DONE


def test_an_abort_waits_for_an_action_on_a_node_that_an_operator_drained() -> None:
    record = state_machine.abort(
        rollout_with_steps(rollout_spec(A), step(Stage.STARTED, attempts=1)), "bob", NOW
    )
    nodes = rollout_view({A: drained_node_view(owner="")})
    assert state_machine.advance(record, nodes, NOW) == (record, ())
    over, _ = state_machine.advance(state_machine.action_finished(record, A, 1, "", NOW), nodes, NOW)
    assert over.phase is RolloutPhase.ABORTED
