"""Nodes that are compared with old ones before they return: the state machine, the choice of the old node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.config.rollouts import VerificationSettings
from controlplane.model.comparison import VerificationReport
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import NodePlan, Plan
from controlplane.model.rollout import Rollout, RolloutPhase, RolloutSpec, Stage, Step, Verification
from controlplane.rollouts import state_machine
from controlplane.rollouts.actions import verification
from controlplane.rollouts.observation import RolloutNodeView, VerificationResult
from controlplane.rollouts.state_machine import Effects, advance
from controlplane.rollouts.verification_baseline import (
    choose_baseline,
    find_changed_process,
    identify_processes,
)
from controlplane.storage.file_formats import ROLLOUT_CODEC
from controlplane.verification.verdict import judge, shorten_report
from tests.support.controlplane.comparisons import SAME, SLOW, comparison_with, digest_comparison
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

A, B, C, D, E = (f"10.0.0.{number}:4000" for number in range(1, 6))
SINCE = 1900.0
SPEC = rollout_spec(A, B, verify="replay:monday")


def step_of_a(stage: Stage, **overrides: Any) -> Step:
    """Return a step of A, which has restarted since."""
    fields: dict[str, Any] = {"since": SINCE, "drain_requested_at": SINCE, "owns_drain": True, **overrides}
    return Step(A, stage, "a reason", started_before=100.0, version_before=OLD_VERSION, **fields)


def report(ratio: float, node: str = A, at: float = NOW) -> VerificationReport:
    """Return a stored report with one digest, which takes `ratio` times as long on the new node."""
    comparison = comparison_with(digest_comparison(SLOW if ratio > 1.5 else SAME, ratio))
    return shorten_report(VerificationReport(node, B, at, "monday", 1.5, comparison, judge(comparison)))


def verifying(spec: RolloutSpec = SPEC, **overrides: Any) -> Rollout:
    return rollout_with_steps(spec, step_of_a(Stage.VERIFYING, **overrides))


def ended(rollout: Rollout, result: VerificationResult, since: float = SINCE) -> Rollout:
    return state_machine.verification_ended(rollout, A, since, result, NOW)


def advanced(rollout: Rollout, node: RolloutNodeView | None = None) -> tuple[Rollout, Effects]:
    return advance(rollout, rollout_view({A: node or returned_view(), B: node_view()}), NOW)


def failed_rollout() -> Rollout:
    """Return a rollout that has paused because A is slower."""
    return advanced(ended(verifying(), VerificationResult(report=report(2.1))))[0]


def test_returned_node_is_verified_while_it_is_still_drained() -> None:
    changed, effects = advanced(rollout_with_steps(SPEC, step_of_a(Stage.RETURNING)))
    assert changed.steps[A].stage is Stage.VERIFYING
    assert changed.steps[A].reason == "it is back; reads of the capture monday run on it and on an old node"
    assert changed.steps[B].stage is Stage.PENDING, "it counts as out of service"
    assert effects == Effects(verify=(A,))


def test_unfinished_verification_is_requested_in_each_pass() -> None:
    """So another control plane that takes over starts it again."""
    record = verifying()
    assert advanced(record) == (record, Effects(verify=(A,)))
    paused = replace(record, phase=RolloutPhase.PAUSED, reason="paused by bob")
    assert advanced(paused)[1] == Effects(verify=(A,))


def test_node_without_verification_returns_to_service_at_once() -> None:
    spec = replace(SPEC, verify="")
    changed, effects = advanced(rollout_with_steps(spec, step_of_a(Stage.RETURNING)))
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, Effects(undrain=(A,)))


def test_verified_node_returns_to_service_once_it_is_healthy() -> None:
    record = ended(verifying(), VerificationResult(report=report(1.01)))
    assert record.steps[A].verification is Verification.PASSED
    assert record.reports[A].baseline == B
    unhealthy, _ = advanced(record, returned_view(healthy_since=None, failure="fails"))
    assert unhealthy.steps[A].stage is Stage.RETURNING
    changed, effects = advanced(record)
    assert (changed.steps[A].stage, effects) == (Stage.WARMING, Effects(undrain=(A,)))
    drained_by_operator, _ = advanced(record, replace(returned_view(), drain=drained_node_view("").drain))
    assert drained_by_operator.steps[A].stage is Stage.DONE


def test_slower_node_pauses_the_rollout_in_spite_of_a_failure_budget() -> None:
    spec = replace(SPEC, failure_budget=1)
    changed, effects = advanced(ended(verifying(spec), VerificationResult(report=report(2.1))))
    assert (changed.phase, changed.steps[A].stage) == (RolloutPhase.PAUSED, Stage.FAILED)
    finding = "`select ? from 5` (digest 555555555555) takes 2.10 (2.00 to 2.20) times as long"
    assert changed.reason.startswith(f"{A} failed: it is worse than {B}: {finding}")
    assert "it stays drained" in changed.reason
    assert f"`tidevoy rollout verification {ROLLOUT_ID} {A}` shows the comparison" in changed.reason
    assert "with `--skip-verification` it returns to service as it is" in changed.reason
    assert effects == Effects()


def test_failed_replay_pauses_the_rollout_without_a_report() -> None:
    problem = "the replay of monday on 10.0.0.1:4000 ended with exit code 1: no such user"
    changed, _ = advanced(ended(verifying(), VerificationResult(problem=problem)))
    assert changed.steps[A].reason == f"it could not be verified: {problem}"
    assert (changed.phase, changed.reports) == (RolloutPhase.PAUSED, {})
    assert "shows the comparison" not in changed.reason


def test_resumed_rollout_verifies_the_node_again_without_another_action() -> None:
    resumed = state_machine.resume(failed_rollout(), "bob", NOW)
    assert resumed.steps[A].verification is Verification.NONE
    returning, effects = advanced(resumed)
    assert (returning.steps[A].stage, effects) == (Stage.RETURNING, Effects())
    again, effects = advanced(returning)
    assert (again.steps[A].stage, effects) == (Stage.VERIFYING, Effects(verify=(A,)))
    passed = state_machine.verification_ended(
        again, A, NOW, VerificationResult(report=report(1.0, at=NOW + 1)), NOW
    )
    assert passed.reports[A].has_passed


def test_operator_may_accept_a_failed_verification() -> None:
    resumed = state_machine.resume(failed_rollout(), "bob", NOW, skip_verification=True)
    accepted, _ = advanced(advanced(resumed)[0])
    assert (accepted.steps[A].stage, accepted.steps[A].verification) == (Stage.WARMING, Verification.SKIPPED)
    other = rollout_with_steps(SPEC, step_of_a(Stage.FAILED), phase=RolloutPhase.PAUSED, reason="failed")
    retried = state_machine.resume(other, "bob", NOW, skip_verification=True)
    assert retried.steps[A].verification is Verification.NONE, "it has not failed a verification"


def test_new_action_needs_a_new_verification() -> None:
    resumed = state_machine.resume(failed_rollout(), "bob", NOW, skip_verification=True)
    changed, _ = advanced(resumed, returned_view(healthy_since=None))
    assert (changed.steps[A].stage, changed.steps[A].verification) == (Stage.DRAINING, Verification.NONE)


def test_result_of_an_earlier_verification_is_ignored() -> None:
    record = verifying()
    assert ended(record, VerificationResult(report=report(2.1)), since=SINCE - 1) is record
    done = rollout_with_steps(SPEC, step_of_a(Stage.DONE))
    assert ended(done, VerificationResult(report=report(2.1))) is done


def test_abort_and_removal_end_the_verification() -> None:
    aborting = state_machine.abort(verifying(), "bob", NOW)
    aborted, effects = advanced(aborting)
    assert aborted.steps[A].reason == "the rollout was aborted before the node was verified"
    assert effects == Effects(undrain=(A,))
    removed, effects = advanced(verifying(), returned_view(is_removed=True))
    assert (removed.phase, removed.steps[A].stage) == (RolloutPhase.PAUSED, Stage.FAILED)
    assert not effects.verify


def test_last_reports_survive_in_the_record() -> None:
    nodes = [f"10.0.1.{number}:4000" for number in range(12)]
    record = rollout_with_steps(rollout_spec(*nodes, verify="replay:monday"))
    for at, node in enumerate(nodes):
        steps = Step(node, Stage.VERIFYING, since=SINCE)
        record = state_machine.verification_ended(
            record.with_steps(steps), node, SINCE, VerificationResult(report=report(2.1, node, at)), NOW
        )
    assert list(record.reports) == nodes[2:]
    assert ROLLOUT_CODEC.decode(ROLLOUT_CODEC.encode(record)) == record


def test_directory_that_cannot_be_read_is_a_problem_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verification, "find_replay_program", lambda: tmp_path)
    settings = VerificationSettings(directory=tmp_path)
    monkeypatch.setattr(Path, "is_dir", refuse)
    problem = verification.find_verification_problem("monday", settings)
    expected = f"{tmp_path}/monday cannot be read on the machine of this control plane: Permission denied"
    assert problem == expected
    verification.remove_results(tmp_path, [])


def planned(
    address: str, state: State = State.ACTIVE, group: str = "", version: str = OLD_VERSION
) -> NodePlan:
    return NodePlan(Node(address, Source.PD), state, "a reason", 0.0, group=group, version=version)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([planned(B), planned(C), planned(D)], C),  # the node of the rollout whose turn comes last
        ([planned(B), planned(C, State.UNHEALTHY), planned(D)], B),
        ([planned(B, State.DRAINED), planned(D), planned(E)], D),  # outside the rollout, with the old version
        ([planned(D, version=NEW_VERSION), planned(E)], E),
        ([planned(B, group="batch"), planned(D, group="batch")], None),
        ([planned(D, version=NEW_VERSION)], None),
        ([], None),
    ],
)
def test_old_node_is_in_service_and_of_the_same_group(others: list[NodePlan], expected: str | None) -> None:
    spec = rollout_spec(A, B, C, verify="replay:monday")
    rollout = rollout_with_steps(spec, step_of_a(Stage.VERIFYING))
    plan = Plan({each.node.address: each for each in [planned(A, State.DRAINED), *others]})
    assert choose_baseline(rollout, A, plan) == expected


def test_nodes_that_the_rollout_has_changed_are_not_old() -> None:
    steps = [step_of_a(Stage.VERIFYING), Step(B, Stage.DONE), Step(C, Stage.FAILED)]
    rollout = rollout_with_steps(rollout_spec(A, B, C), *steps)
    plan = Plan({address: planned(address) for address in (A, B, C)})
    assert choose_baseline(rollout, A, plan) is None
    to_be_retried = Step(B, Stage.PENDING, drain_requested_at=SINCE, started_before=100.0)
    assert choose_baseline(rollout.with_steps(to_be_retried), A, plan) is None, "an operator undrained it"


def test_node_that_already_has_the_new_version_is_not_old() -> None:
    rollout = rollout_with_steps(rollout_spec(A, B, C), step_of_a(Stage.VERIFYING))
    upgraded = planned(A, State.DRAINED, version=NEW_VERSION)
    mixed = Plan({A: upgraded, B: planned(B), C: planned(C, version=NEW_VERSION)})
    assert choose_baseline(rollout, A, mixed) == B
    restarted = Plan({A: planned(A, State.DRAINED), B: planned(B), C: planned(C)})
    assert choose_baseline(rollout, A, restarted) == C, "the rollout changes no version"
    assert choose_baseline(rollout, A, Plan({})) is None


def test_replacement_of_a_compared_node_is_noticed() -> None:
    plan = Plan({address: planned(address) for address in (A, B, C)})
    processes = identify_processes(plan, [A, B])
    assert find_changed_process(processes, plan) == ""
    others = Plan({A: planned(A), B: planned(B)})
    assert find_changed_process(processes, others) == "", "C is not compared"
    for changed in (
        planned(B, version=NEW_VERSION),
        replace(planned(B), node=replace(plan.nodes[B].node, started_at=5.0)),
    ):
        text = find_changed_process(processes, Plan({A: planned(A), B: changed}))
        assert text == f"{B} was restarted or removed during the replay"
    assert find_changed_process(processes, Plan({B: planned(B)})).startswith(A)


def test_no_node_starts_while_another_one_is_compared() -> None:
    """It may be the old node of the comparison."""
    spec = replace(SPEC, max_unavailable=2)
    nodes = {A: returned_view(), B: node_view()}
    compared, effects = advance(verifying(spec), rollout_view(nodes), NOW)
    assert (compared.steps[B].stage, effects.drain) == (Stage.PENDING, ())
    done = rollout_with_steps(spec, step_of_a(Stage.DONE))
    started, _ = advance(done, rollout_view(nodes), NOW)
    assert started.steps[B].stage is Stage.DRAINING
