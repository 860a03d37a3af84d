"""One rollout, step by step: each way on, each failure, each thing that an operator may do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.errors import RolloutRefused
from controlplane.model.intents import Drain as Asked
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Phase, Rollout, Stage, Step
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import Login, Seen
from controlplane.rollouts.state_machine import Act, Drain, LogIn, Undrain
from tests.support.controlplane.rollout_simulator import ID, NEW, OLD, drained, order, rollout, seen, sight

A, B, C = "10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"
NOW = 2000.0
WANTED = order(A, B)


def step(stage: Stage, **more: object) -> Step:
    """A's step, begun lately; its node had started at 100."""
    said: dict[str, object] = {"since": NOW - 5, "begun": NOW - 50, "started_before": 100.0, **more}
    return Step(A, stage, "a reason", **said)  # type: ignore[arg-type]


def back(**more: object) -> Seen:
    """A, drained by the rollout, back with the new version and steady for long enough."""
    said: dict[str, object] = {"started_at": NOW - 30, "version": NEW, "steady_since": NOW - 20, **more}
    return drained(ID, **said)


def of(changed: Rollout, address: str = A) -> tuple[Stage, str]:
    return changed.steps[address].stage, changed.steps[address].reason


def test_the_first_node_is_drained_and_the_second_waits() -> None:
    changed, effects = state_machine.advance(rollout(WANTED), sight({A: seen(), B: seen()}), NOW)
    assert of(changed) == (Stage.DRAINING, "its sessions move to other nodes")
    assert changed.steps[A] == replace(
        changed.steps[A], begun=NOW, sessions=5, started_before=100.0, version_before=OLD
    )
    assert changed.steps[B].stage is Stage.PENDING
    assert effects == (Drain(A),)


def test_a_drain_that_was_not_carried_out_is_asked_for_again() -> None:
    record = rollout(WANTED, step(Stage.DRAINING))
    same, effects = state_machine.advance(record, sight({A: seen(), B: seen()}), NOW)
    assert same is record
    assert effects == (Drain(A),)


def test_an_empty_node_is_acted_on_once() -> None:
    record = rollout(WANTED, step(Stage.DRAINING))
    node = drained(moved=7, failed=1)
    changed, effects = state_machine.advance(record, sight({A: node, B: seen()}), NOW)
    assert effects == (Act(A, 1),)
    started = changed.steps[A]
    assert of(changed) == (Stage.STARTED, "the action `restart` runs")
    assert (started.attempts, started.moved, started.failed, started.closed) == (1, 7, 1, 0)
    assert started.drained_by_us
    assert state_machine.advance(changed, sight({A: node, B: seen()}), NOW + 999) == (changed, ())


@pytest.mark.parametrize(("past", "acts"), [(599.0, False), (600.0, True)])
def test_sessions_that_are_left_at_the_deadline_are_counted(past: float, acts: bool) -> None:
    record = rollout(WANTED, step(Stage.DRAINING, since=NOW - past, drained_by_us=True))
    node = drained(state=State.DRAINING, empty=False, sessions=3)
    changed, effects = state_machine.advance(record, sight({A: node, B: seen()}), NOW)
    assert effects == ((Act(A, 1),) if acts else ())
    assert changed.steps[A].closed == (3 if acts else 0)


@pytest.mark.parametrize(("past", "acts"), [(600.0, False), (614.0, False), (615.0, True)])
def test_sessions_that_are_ended_have_time_for_it(past: float, acts: bool) -> None:
    wanted = replace(WANTED, on_deadline=OnDeadline.CLOSE)
    record = rollout(wanted, step(Stage.DRAINING, since=NOW - past, drained_by_us=True))
    node = drained(state=State.DRAINING, empty=False, sessions=3)
    changed, effects = state_machine.advance(record, sight({A: node, B: seen()}), NOW)
    assert effects == ((Act(A, 1),) if acts else ())
    assert changed.steps[A].closed == 3


def test_a_drain_that_an_operator_took_back_fails_and_pauses() -> None:
    record = rollout(WANTED, step(Stage.DRAINING, drained_by_us=True))
    changed, effects = state_machine.advance(record, sight({A: seen(), B: seen()}), NOW)
    assert of(changed) == (
        Stage.FAILED,
        "its drain was taken back by an operator before the action was run",
    )
    assert changed.phase is Phase.PAUSED
    assert effects == ()


def test_a_node_that_an_operator_drained_is_acted_on_and_stays_drained() -> None:
    record = rollout(WANTED, step(Stage.DRAINING))
    changed, effects = state_machine.advance(record, sight({A: drained(by=""), B: seen()}), NOW)
    assert effects == (Act(A, 1),)
    changed = state_machine.act_ended(changed, A, 1, "", NOW + 1)
    came = replace(back(), drain=Asked(0.0, 60.0))
    changed, effects = state_machine.advance(changed, sight({A: came, B: seen()}), NOW + 2)
    assert of(changed) == (Stage.DONE, "it is back, and stays drained, for an operator drained it")
    assert effects == (Drain(B),)


@pytest.mark.parametrize(
    ("node", "lacks"),
    [
        (drained(), "has not registered with a newer start time"),
        (None, "is not known any more"),
        (back(steady_since=None, ailing="is not registered"), "is not registered"),
        (back(greeted_at=NOW - 21), "has not greeted on its SQL port since"),
    ],
)
def test_a_node_that_does_not_come_back_in_time_fails(node: Seen | None, lacks: str) -> None:
    nodes = {B: seen()} if node is None else {A: node, B: seen()}
    waiting = rollout(WANTED, step(Stage.RETURNING, since=NOW - 599, drained_by_us=node is not None))
    same, _ = state_machine.advance(waiting, sight(nodes), NOW)
    assert same.steps[A].stage is Stage.RETURNING
    late = rollout(WANTED, step(Stage.RETURNING, since=NOW - 600, drained_by_us=node is not None))
    changed, effects = state_machine.advance(late, sight(nodes), NOW)
    assert of(changed) == (Stage.FAILED, f"it was not back within 600 s: it {lacks}")
    assert changed.phase is Phase.PAUSED
    kept = "; it stays drained" if node is not None else ""
    assert changed.reason == (
        f"{A} failed: it was not back within 600 s: it {lacks}{kept}. Once it is mended, `tidevoy rollout"
        f" resume {ID}` goes on with it; `tidevoy rollout abort {ID}` undrains it and ends"
    )
    assert effects == ()


def test_nobody_is_late_before_it_could_be_seen() -> None:
    record = rollout(WANTED, step(Stage.RETURNING, since=NOW - 6000, drained_by_us=True))
    nodes = {A: drained(), B: seen()}
    assert state_machine.advance(record, sight(nodes, since=NOW - 14), NOW)[0] is record
    assert state_machine.advance(record, sight(nodes, since=NOW - 15), NOW)[0].phase is Phase.PAUSED


def test_a_node_that_is_steady_at_its_deadline_may_go_on() -> None:
    record = rollout(WANTED, step(Stage.RETURNING, since=NOW - 600, drained_by_us=True))
    same, _ = state_machine.advance(record, sight({A: back(steady_since=NOW - 9), B: seen()}), NOW)
    assert same.steps[A].stage is Stage.RETURNING
    changed, effects = state_machine.advance(record, sight({A: back(steady_since=NOW - 10), B: seen()}), NOW)
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == (Undrain(A),)


@pytest.mark.parametrize("version", [OLD, ""])
def test_a_wrong_version_fails_as_soon_as_it_is_steady(version: str) -> None:
    record = rollout(WANTED, step(Stage.RETURNING, drained_by_us=True))
    early, _ = state_machine.advance(
        record, sight({A: back(version=version, steady_since=NOW - 9), B: seen()}), NOW
    )
    assert early.steps[A].stage is Stage.RETURNING
    changed, effects = state_machine.advance(record, sight({A: back(version=version), B: seen()}), NOW)
    assert of(changed) == (
        Stage.FAILED,
        f"it came back, but has version {version or 'unknown'} instead of {NEW}",
    )
    assert changed.steps[A].version_after == version
    assert (changed.phase, effects) == (Phase.PAUSED, ())


def test_a_session_is_opened_when_all_else_is_well() -> None:
    record = rollout(WANTED, step(Stage.RETURNING, drained_by_us=True, version_after=NEW))
    same, effects = state_machine.advance(record, sight({A: back(), B: seen()}, asks_login=True), NOW)
    assert (same, effects) == (record, (LogIn(A),))
    refused = back(login=Login(NOW - 2, "cannot be logged in to"))
    assert state_machine.advance(record, sight({A: refused, B: seen()}, asks_login=True), NOW)[0] is record
    before = back(login=Login(NOW - 21))
    assert state_machine.advance(record, sight({A: before, B: seen()}, asks_login=True), NOW)[0] is record
    welcome = back(login=Login(NOW - 2))
    changed, _ = state_machine.advance(record, sight({A: welcome, B: seen()}, asks_login=True), NOW)
    assert changed.steps[A].stage is Stage.WARMING


def test_a_node_is_done_when_it_is_warm_and_then_the_next_one_begins() -> None:
    record = rollout(WANTED, step(Stage.WARMING))
    cold = seen(started_at=NOW, version=NEW, warm=False)
    assert state_machine.advance(record, sight({A: cold, B: seen()}), NOW) == (record, ())
    changed, effects = state_machine.advance(record, sight({A: replace(cold, warm=True), B: seen()}), NOW)
    assert of(changed) == (Stage.DONE, "it is in service again")
    assert effects == (Drain(B),)


def test_an_undrain_that_was_not_carried_out_is_asked_for_again() -> None:
    record = rollout(WANTED, step(Stage.WARMING))
    assert state_machine.advance(record, sight({A: back(), B: seen()}), NOW) == (record, (Undrain(A),))


def test_a_node_that_does_not_stay_in_service_fails() -> None:
    record = rollout(WANTED, step(Stage.WARMING, since=NOW - 600))
    node = seen(state=State.UNHEALTHY, reason="it refuses connections")
    changed, _ = state_machine.advance(record, sight({A: node, B: seen()}), NOW)
    assert of(changed) == (
        Stage.FAILED,
        "it was back, but did not stay in service: it is unhealthy: it refuses connections",
    )


def test_a_rollout_is_done_when_all_are() -> None:
    record = rollout(order(A), step(Stage.DONE))
    changed, _ = state_machine.advance(record, sight({A: seen()}), NOW)
    assert (changed.phase, changed.reason, changed.ended) == (Phase.DONE, "1 of 1 nodes done", NOW)


def test_failures_within_the_budget_pause_at_the_end_alone() -> None:
    wanted = order(A, B, failure_budget=1)
    record = rollout(wanted, step(Stage.FAILED, drained_by_us=True))
    nodes = {A: drained(), B: seen()}
    changed, effects = state_machine.advance(record, sight(nodes), NOW)
    assert (changed.phase, effects) == (Phase.RUNNING, (Drain(B),))
    ended = replace(changed, steps=changed.with_step(Step(B, Stage.DONE, "done")))
    ended, effects = state_machine.advance(ended, sight(nodes), NOW)
    assert (ended.phase, effects) == (Phase.PAUSED, ())


def test_a_failure_that_may_be_cut_off_pauses_whatever_the_budget() -> None:
    record = rollout(order(A, B, failure_budget=1), step(Stage.STARTED, attempts=1, drained_by_us=True))
    changed = state_machine.cut_off(record, A, NOW)
    assert changed.steps[A].stage is Stage.RETURNING
    late, effects = state_machine.advance(changed, sight({A: drained(), B: seen()}), NOW + 600)
    assert late.phase is Phase.PAUSED
    assert "may have been cut off, and it was not back within 600 s" in late.reason
    assert effects == ()


def test_what_was_cut_off_goes_on_when_the_node_is_back() -> None:
    record = state_machine.cut_off(rollout(WANTED, step(Stage.STARTED, attempts=1)), A, NOW - 1)
    changed, effects = state_machine.advance(record, sight({A: back(), B: seen()}), NOW)
    assert changed.steps[A].stage is Stage.WARMING
    assert effects == (Undrain(A),)


def test_an_action_that_fails_pauses_and_is_run_again_after_resume() -> None:
    record = rollout(WANTED, step(Stage.STARTED, attempts=1, drained_by_us=True))
    told = state_machine.act_ended(record, A, 1, "ended with exit code 3: no such unit", NOW)
    assert of(told) == (Stage.FAILED, "the action `restart` ended with exit code 3: no such unit")
    assert state_machine.act_ended(told, A, 1, "", NOW) is told
    nodes = sight({A: drained(), B: seen()})
    paused, effects = state_machine.advance(told, nodes, NOW)
    assert (paused.phase, effects) == (Phase.PAUSED, ())
    resumed = state_machine.resume(paused, "bob", NOW + 1)
    assert resumed.steps[A].stage is Stage.PENDING
    begun, effects = state_machine.advance(resumed, nodes, NOW + 2)
    assert (begun.steps[A].stage, effects) == (Stage.DRAINING, ())
    again, effects = state_machine.advance(begun, nodes, NOW + 3)
    assert (again.steps[A].attempts, effects) == (2, (Act(A, 2),))


def test_the_outcome_of_another_attempt_is_passed_over() -> None:
    record = rollout(WANTED, step(Stage.STARTED, attempts=2))
    assert state_machine.act_ended(record, A, 1, "failed", NOW) is record


@pytest.mark.parametrize(
    ("node", "stage"),
    [
        (back(), Stage.RETURNING),
        (back(version=OLD), Stage.DRAINING),
        (back(steady_since=None, ailing="does not pass"), Stage.DRAINING),
        (drained(), Stage.DRAINING),
    ],
)
def test_a_node_that_is_back_and_right_meanwhile_is_not_acted_on_again(node: Seen, stage: Stage) -> None:
    failed = rollout(WANTED, step(Stage.FAILED, attempts=1, drained_by_us=True), phase=Phase.PAUSED)
    changed, _ = state_machine.advance(
        state_machine.resume(failed, "bob", NOW), sight({A: node, B: seen()}), NOW
    )
    assert changed.steps[A].stage is stage


def test_resumed_failures_are_tried_one_after_the_other_and_stay_drained() -> None:
    wanted = order(A, B, C, failure_budget=2)
    failures = [replace(step(Stage.FAILED, drained_by_us=True), address=a) for a in (B, C)]
    record = rollout(wanted, *failures, phase=Phase.PAUSED)
    nodes = sight({A: seen(), B: drained(), C: drained()})
    changed, effects = state_machine.advance(state_machine.resume(record, "bob", NOW), nodes, NOW)
    assert [changed.steps[a].stage for a in (A, B, C)] == [Stage.PENDING, Stage.DRAINING, Stage.PENDING]
    assert effects == ()


def test_a_paused_rollout_begins_nothing_but_brings_back() -> None:
    both = order(A, B, max_unavailable=2)
    record = rollout(
        both,
        step(Stage.RETURNING, drained_by_us=True),
        Step(B, Stage.DRAINING, "drained", begun=1.0, started_before=100.0),
        phase=Phase.PAUSED,
        reason="paused by bob",
    )
    changed, effects = state_machine.advance(record, sight({A: back(), B: drained()}), NOW)
    assert [changed.steps[a].stage for a in (A, B)] == [Stage.WARMING, Stage.DRAINING]
    assert effects == (Undrain(A),)
    assert changed.reason == "paused by bob"


def test_an_aborted_rollout_gives_back_its_own_drains_alone() -> None:
    record = rollout(order(A, B, C), step(Stage.DRAINING, drained_by_us=True))
    aborting = state_machine.abort(record, "bob", NOW)
    nodes = {A: drained(), B: drained(by=""), C: seen()}
    changed, effects = state_machine.advance(aborting, sight(nodes), NOW)
    assert effects == (Undrain(A),)
    assert changed.phase is Phase.ABORTING
    assert {s.stage for s in changed.steps.values()} == {Stage.SKIPPED}
    over, effects = state_machine.advance(changed, sight({**nodes, A: seen()}), NOW + 1)
    assert (over.phase, over.reason, effects) == (
        Phase.ABORTED,
        "aborted by bob; 0 of 3 nodes done, 3 skipped",
        (),
    )


def test_an_aborted_rollout_waits_for_an_action_that_runs() -> None:
    record = rollout(WANTED, step(Stage.STARTED, attempts=1, drained_by_us=True))
    nodes = sight({A: drained(), B: seen()})
    waiting, effects = state_machine.advance(state_machine.abort(record, "bob", NOW), nodes, NOW)
    assert (waiting.phase, effects) == (Phase.ABORTING, ())
    ended = state_machine.act_ended(waiting, A, 1, "", NOW + 1)
    changed, effects = state_machine.advance(ended, nodes, NOW + 1)
    assert (of(changed)[0], effects) == (Stage.SKIPPED, (Undrain(A),))


def test_a_manual_one_waits_for_a_restart_by_others() -> None:
    wanted = replace(WANTED, action=MANUAL)
    record = rollout(wanted, step(Stage.DRAINING))
    changed, effects = state_machine.advance(record, sight({A: drained(), B: seen()}), NOW)
    assert of(changed) == (Stage.RETURNING, "it can be restarted now; the rollout waits until it is back")
    assert (changed.steps[A].attempts, effects) == (0, ())
    early, _ = state_machine.advance(record, sight({A: back(empty=False), B: seen()}), NOW)
    assert of(early) == (Stage.RETURNING, "it was restarted; it is to pass its checks")


def test_a_manual_one_that_was_restarted_before_its_turn_is_not_drained() -> None:
    wanted = replace(order(A), action=MANUAL)
    record = state_machine.create(ID, wanted, "alice", NOW, started={A: 100.0})
    node = seen(started_at=NOW - 30, version=NEW, steady_since=NOW - 20)
    changed, effects = state_machine.advance(record, sight({A: node}), NOW)
    assert of(changed) == (Stage.RETURNING, "it was restarted meanwhile, so it is not restarted again")
    assert effects == ()
    changed, effects = state_machine.advance(changed, sight({A: node}), NOW + 1)
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, ())


def test_another_node_that_is_out_of_service_holds_it_up() -> None:
    out = {C: f"{C} is unhealthy: it refuses connections"}
    waiting, effects = state_machine.advance(rollout(WANTED), sight({A: seen(), B: seen()}, out=out), NOW)
    assert effects == ()
    assert waiting.reason == (
        f"waits: a node is out of service already: {C} is unhealthy: it refuses connections"
    )
    assert state_machine.advance(waiting, sight({A: seen(), B: seen()}, out=out), NOW + 1)[0] is waiting
    going, effects = state_machine.advance(waiting, sight({A: seen(), B: seen()}), NOW + 2)
    assert (going.reason, effects) == ("", (Drain(A),))


def test_a_node_that_is_out_of_service_itself_comes_first() -> None:
    ill = seen(state=State.UNHEALTHY, steady_since=None)
    nodes = sight({A: seen(), B: ill}, out={B: f"{B} is unhealthy: it refuses connections"})
    assert state_machine.advance(rollout(WANTED), nodes, NOW)[1] == (Drain(B),)


def test_the_last_node_in_service_is_not_drained_unless_forced() -> None:
    last = sight({A: seen(), B: seen()}, active={A: "olap", B: "oltp", "other": "oltp"})
    waiting, effects = state_machine.advance(rollout(order(A)), last, NOW)
    assert (waiting.reason, effects) == (
        f"waits: {A} is the only node of the group olap in service",
        (),
    )
    assert state_machine.advance(rollout(order(A), forced=True), last, NOW)[1] == (Drain(A),)


def test_two_at_a_time_never_leave_a_group_without_any() -> None:
    pair = sight({A: seen(), B: seen()}, active={A: "", B: ""})
    changed, effects = state_machine.advance(rollout(order(A, B, max_unavailable=2)), pair, NOW)
    assert effects == (Drain(A),)
    assert changed.steps[B].stage is Stage.PENDING


def test_a_node_that_another_rollout_has_in_hand_is_waited_for() -> None:
    nodes = sight({A: seen(), B: seen()}, busy={A: "r0", B: "r0"})
    waiting, effects = state_machine.advance(rollout(WANTED), nodes, NOW)
    assert (waiting.reason, effects) == (f"waits: the rollout r0 has {A} in hand", ())


def test_a_node_that_is_not_known_is_waited_for_and_then_skipped() -> None:
    record = rollout(order(A))
    assert state_machine.advance(record, sight({}, complete=False), NOW) == (record, ())
    missed, _ = state_machine.advance(record, sight({}), NOW)
    assert missed.steps[A].stage is Stage.PENDING
    there, _ = state_machine.advance(missed, sight({A: seen()}), NOW + 1)
    assert there.steps[A].stage is Stage.DRAINING
    gone, _ = state_machine.advance(missed, sight({}), NOW + 600)
    assert of(gone) == (Stage.SKIPPED, "it was gone before its turn")
    assert (gone.phase, gone.reason) == (Phase.DONE, "0 of 1 nodes done, 1 skipped")


def test_a_node_that_is_removed_is_skipped_or_fails() -> None:
    removed = seen(removed=True)
    assert of(state_machine.advance(rollout(order(A)), sight({A: removed}), NOW)[0])[0] is Stage.SKIPPED
    for stage in (Stage.DRAINING, Stage.RETURNING):
        failed, _ = state_machine.advance(rollout(order(A), step(stage)), sight({A: removed}), NOW)
        assert failed.phase is Phase.PAUSED


def test_nothing_that_is_not_known_fails_while_a_source_is_silent() -> None:
    record = rollout(order(A), step(Stage.DRAINING, drained_by_us=True))
    assert state_machine.advance(record, sight({}, complete=False), NOW) == (record, ())


def test_a_start_time_must_be_known() -> None:
    changed, effects = state_machine.advance(rollout(order(A)), sight({A: seen(started_at=None)}), NOW)
    assert of(changed)[0] is Stage.FAILED
    assert effects == ()


@pytest.mark.parametrize(
    ("ask", "phases"),
    [
        (state_machine.pause, {Phase.RUNNING, Phase.PAUSED}),
        (state_machine.resume, {Phase.RUNNING, Phase.PAUSED}),
        (state_machine.abort, {Phase.RUNNING, Phase.PAUSED, Phase.ABORTING, Phase.ABORTED}),
    ],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_what_operators_may_do_when(ask: object, phases: set[Phase], phase: Phase) -> None:
    assert callable(ask)
    record = rollout(WANTED, phase=phase, reason="a reason")
    if phase in phases:
        asked = ask(record, "bob", NOW)
        assert ask(asked, "carol", NOW + 1) is asked, "asked again, it stays as it is"
    else:
        with pytest.raises(RolloutRefused, match=f"it is {phase}"):
            ask(record, "bob", NOW)


def test_times_of_a_clock_that_was_ahead_are_cut() -> None:
    record = state_machine.until(rollout(WANTED, step(Stage.DRAINING), since=NOW, created=NOW), 10.0)
    assert (record.since, record.created, record.ended) == (10.0, 10.0, None)
    assert (record.steps[A].since, record.steps[A].begun, record.steps[A].ended) == (10.0, 10.0, None)
    assert list(record.steps) == [A, B]


def test_progress_shows_while_a_node_is_drained() -> None:
    record = rollout(WANTED, step(Stage.DRAINING))
    shown = state_machine.progress(record, {A: (3, 1), B: (9, 9)})
    assert (shown.steps[A].moved, shown.steps[A].failed, shown.steps[B].moved) == (3, 1, 0)


def test_a_node_that_falls_again_and_again_is_late_some_time() -> None:
    """Each look finds it steady, and never for long enough."""
    record = rollout(WANTED, step(Stage.RETURNING, since=NOW - 601, drained_by_us=True))
    since_before, since_after = (back(steady_since=NOW + at) for at in (-2, 4))
    same, _ = state_machine.advance(record, sight({A: since_before, B: seen()}), NOW + 5)
    assert same.steps[A].stage is Stage.RETURNING
    changed, _ = state_machine.advance(record, sight({A: since_after, B: seen()}), NOW + 5)
    assert changed.steps[A].stage is Stage.FAILED
    assert "has not passed its checks for 10 s yet" in changed.steps[A].reason


def test_a_node_that_is_gone_when_it_is_tried_again_fails_again() -> None:
    record = rollout(order(A), step(Stage.PENDING, drained_by_us=True))
    gone = sight({}, ours=frozenset({A}))
    missed, _ = state_machine.advance(record, gone, NOW)
    assert missed.steps[A].stage is Stage.PENDING
    changed, effects = state_machine.advance(missed, gone, NOW + 600)
    assert of(changed) == (Stage.FAILED, "it was gone when it was to be tried again")
    assert (changed.phase, effects) == (Phase.PAUSED, ())
    assert changed.steps[A].drained_by_us


def test_a_rollout_is_not_done_before_all_drains_are_taken_back() -> None:
    record = rollout(order(A), step(Stage.DONE))
    same, effects = state_machine.advance(record, sight({}, ours=frozenset({A})), NOW)
    assert (same.phase, effects) == (Phase.RUNNING, (Undrain(A),))
    assert state_machine.advance(same, sight({}), NOW)[0].phase is Phase.DONE


def test_an_abort_waits_for_an_action_on_a_node_that_an_operator_drained() -> None:
    record = state_machine.abort(rollout(order(A), step(Stage.STARTED, attempts=1)), "bob", NOW)
    nodes = sight({A: drained(by="")})
    assert state_machine.advance(record, nodes, NOW) == (record, ())
    over, _ = state_machine.advance(state_machine.act_ended(record, A, 1, "", NOW), nodes, NOW)
    assert over.phase is Phase.ABORTED
