"""Rollouts under arbitrary events: crashes at any point, operator actions, misbehaving nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.errors import RolloutRejected
from controlplane.intents import changes as intent_changes
from controlplane.model.comparison import Comparison, Finding, FindingKind, VerificationReport
from controlplane.model.rollout import IN_PROGRESS, MANUAL, Rollout, RolloutPhase, Stage, Verification
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import RolloutView, VerificationResult
from tests.support.controlplane.rollout_simulator import (
    NEW_VERSION,
    OLD_VERSION,
    ROLLOUT_ID,
    RolloutSimulation,
    SimulatedServer,
    rollout_spec,
)

NODES = tuple(f"10.0.0.{number}:4000" for number in range(1, 6))
UNRELATED_NODE = "10.0.0.9:4000"  # a node outside the rollout
INDEXES = st.integers(0, 7)
OperatorAction = Callable[[Rollout, str, float], Rollout]  # gets the record, the operator and the time
_SLOWER = Finding(FindingKind.SLOWER, "5" * 64, "it is slower")
PASSED, WORSE = (
    VerificationResult(report=VerificationReport("a", "b", 1.0, "monday", 1.5, Comparison(), findings))
    for findings in ((), (_SLOWER,))
)
VERIFICATION_RESULTS = (PASSED, WORSE, VerificationResult(problem="the replay ended with exit code 1"))
DURATIONS = st.sampled_from([0.5, 3.0, 12.0, 100.0, 700.0])  # seconds


class RolloutStateMachine(RuleBasedStateMachine):
    """A simulation in which any event may happen at any time."""

    @initialize(
        max_unavailable=st.integers(1, 3),
        budget=st.integers(0, 2),
        manual=st.booleans(),
        forced=st.booleans(),
        version=st.sampled_from([NEW_VERSION, ""]),
        verify=st.sampled_from(["", "replay:monday"]),
    )
    def create_rollout(
        self, max_unavailable: int, budget: int, manual: bool, forced: bool, version: str, verify: str
    ) -> None:
        limits = {"max_unavailable": max_unavailable, "failure_budget": budget}
        spec = rollout_spec(*NODES, **limits, version=version, verify=verify)
        if manual:
            spec = replace(spec, action=MANUAL)
        servers = {address: SimulatedServer() for address in (*NODES, UNRELATED_NODE)}
        record = state_machine.create(
            ROLLOUT_ID, spec, "alice", 1000.0, start_times=dict.fromkeys(NODES, 100.0), forced=forced
        )
        self.simulation = RolloutSimulation(record, servers)
        self.last_checked_record = record
        self.resume_count = 0

    @rule(seconds=DURATIONS)
    def time_passes(self, seconds: float) -> None:
        self.simulation.advance_time(seconds)

    @rule()
    def run_pass(self) -> None:
        before, view = self.simulation.record, self.simulation.view()
        self.simulation.run_once()
        self._check_started_safely(before, view)
        self._check_returned_nodes(before)
        failures = [s for s in self.simulation.record.steps.values() if s.stage is Stage.FAILED]
        if self.simulation.record.phase is RolloutPhase.RUNNING:
            assert len(failures) <= self.simulation.record.spec.failure_budget
            assert not any(step.interrupted for step in failures)
            assert not any(step.verification is Verification.FAILED for step in failures)

    def _check_started_safely(self, before: Rollout, view: RolloutView) -> None:
        """Check that started steps respect max_unavailable and, unless forced, leave a node in service."""
        steps, spec = self.simulation.record.steps, before.spec
        in_progress = {a for a, step in steps.items() if step.stage in IN_PROGRESS}
        started = {a for a in in_progress if before.steps[a].stage is Stage.PENDING}
        exempt = {a for a, step in steps.items() if step.stage is Stage.FAILED or step.owns_drain}
        if started:
            assert len(in_progress | (view.unavailable.keys() - exempt)) <= spec.max_unavailable
        if started & view.active.keys() and not before.forced:
            assert view.active.keys() - in_progress

    def _check_returned_nodes(self, before: Rollout) -> None:
        """Check that only restarted, healthy nodes with the right version get clients again."""
        for address, step in self.simulation.record.steps.items():
            previous_step = before.steps[address]
            if (previous_step.stage, step.stage) in (
                (Stage.RETURNING, Stage.WARMING),
                (Stage.RETURNING, Stage.DONE),
            ):
                server = self.simulation.servers[address]
                assert previous_step.started_before is not None
                assert server.started_at > previous_step.started_before
                assert server.healthy
                assert server.version == before.spec.version or not before.spec.version
                if before.spec.verify:
                    assert step.verification in (Verification.PASSED, Verification.SKIPPED)

    @rule(passes=st.integers(1, 4), finish_actions=st.booleans())
    def run_several_passes(self, passes: int, finish_actions: bool) -> None:
        for _ in range(passes):
            self.simulation.advance_time(12.0)
            self.run_pass()
            self.no_attempt_starts_twice()
            self.max_unavailable_is_respected()
        if finish_actions:
            self._finish_actions_successfully()

    @precondition(lambda self: self.simulation.running_verifications)
    @rule(index=INDEXES, result=st.sampled_from(VERIFICATION_RESULTS))
    def verification_finishes(self, index: int, result: VerificationResult) -> None:
        keys = sorted(self.simulation.running_verifications)
        self.simulation.finish_verification(keys[index % len(keys)], result)

    def _finish_actions_successfully(self) -> None:
        for key in list(self.simulation.running_actions):
            self.simulation.restart_server(key[0])
            self.simulation.finish_action(key)
        for verification in list(self.simulation.running_verifications):
            self.simulation.finish_verification(verification, PASSED)

    @rule()
    def crash_during_pass(self) -> None:
        self.simulation.run_once(crashes=True)

    @rule()
    def crash(self) -> None:
        self.simulation.crash()

    @precondition(lambda self: self.simulation.running_actions)
    @rule(index=INDEXES, ok=st.booleans(), restarts=st.booleans(), right_version=st.booleans())
    def action_finishes(self, index: int, ok: bool, restarts: bool, right_version: bool) -> None:
        keys = sorted(self.simulation.running_actions)
        key = keys[index % len(keys)]
        self.simulation.advance_time(1.0)
        if restarts:
            self.simulation.restart_server(key[0], NEW_VERSION if right_version else OLD_VERSION)
        self.simulation.finish_action(key, "" if ok else "ended with exit code 1")

    @rule(index=INDEXES, healthy=st.booleans())
    def health_changes(self, index: int, healthy: bool) -> None:
        server = self.simulation.servers[(*NODES, UNRELATED_NODE)[index % 6]]
        if server.healthy is not healthy:
            server.healthy, server.steady_since = healthy, self.simulation.now

    @rule()
    def all_nodes_but_one_fail(self) -> None:
        for server in list(self.simulation.servers.values())[1:]:
            server.healthy = False

    @rule(index=INDEXES, right_version=st.booleans())
    def node_restarts_by_itself(self, index: int, right_version: bool) -> None:
        self.simulation.advance_time(1.0)
        self.simulation.restart_server(NODES[index % 5], NEW_VERSION if right_version else OLD_VERSION)

    @rule(index=INDEXES)
    def operator_drains(self, index: int) -> None:
        self.simulation.intents = intent_changes.drain(
            self.simulation.intents, NODES[index % 5], self.simulation.now, 60.0
        )

    @rule(index=INDEXES)
    def operator_undrains(self, index: int) -> None:
        self.simulation.intents = intent_changes.undrain(self.simulation.intents, NODES[index % 5])

    @rule()
    def operator_pauses(self) -> None:
        self._apply_operator_action(state_machine.pause)

    @rule(skips_verification=st.booleans())
    def operator_resumes(self, skips_verification: bool) -> None:
        if self.simulation.record.phase is RolloutPhase.PAUSED:
            self.resume_count += 1
        self._apply_operator_action(partial(state_machine.resume, skip_verification=skips_verification))

    @precondition(lambda self: self.simulation.intents.drains)
    @rule(number=st.integers(0, 5))
    def operator_aborts(self, number: int) -> None:
        if number == 0:  # rarely, since an abort ends the rollout
            self._apply_operator_action(state_machine.abort)

    def _apply_operator_action(self, action: OperatorAction) -> None:
        """Apply an operation; it may be rejected only if the rollout is over or aborting."""
        try:
            self.simulation.record = action(self.simulation.record, "bob", self.simulation.now)
        except RolloutRejected:
            assert (
                self.simulation.record.phase.is_over or self.simulation.record.phase is RolloutPhase.ABORTING
            )

    @invariant()
    def no_attempt_starts_twice(self) -> None:
        actions = self.simulation.started_actions
        assert len(set(actions)) == len(actions)
        for address, attempt in actions:
            assert attempt <= self.simulation.record.steps[address].attempts
        # Only a resume by an operator allows another attempt.
        assert all(s.attempts <= 1 + self.resume_count for s in self.simulation.record.steps.values())

    @invariant()
    def max_unavailable_is_respected(self) -> None:
        in_progress = [s for s in self.simulation.record.steps.values() if s.stage in IN_PROGRESS]
        assert len(in_progress) <= self.simulation.record.spec.max_unavailable

    @invariant()
    def states_have_reasons(self) -> None:
        """Check that a rollout that does not run, and each step that is not pending, has a reason."""
        record = self.simulation.record
        assert record.phase is RolloutPhase.RUNNING or record.reason
        assert all(step.reason for step in record.steps.values() if step.stage is not Stage.PENDING)

    @invariant()
    def ended_rollout_leaves_no_drains_or_open_steps(self) -> None:
        record = self.simulation.record
        if record.phase.is_over:
            assert not [a for a, drain in self.simulation.intents.drains.items() if drain.owner == ROLLOUT_ID]
            assert not any(s.stage in IN_PROGRESS or s.stage is Stage.PENDING for s in record.steps.values())
        if record.phase is RolloutPhase.DONE:
            assert all(s.stage in (Stage.DONE, Stage.SKIPPED) for s in record.steps.values())

    @invariant()
    def paused_rollout_starts_no_actions(self) -> None:
        before, after = self.last_checked_record, self.simulation.record
        started = [a for a, s in after.steps.items() if s.attempts > before.steps[a].attempts]
        if before.phase is RolloutPhase.PAUSED and after.phase is RolloutPhase.PAUSED:
            assert not started, "an action was started while the rollout was paused"
        self.last_checked_record = after

    def teardown(self) -> None:
        """Check that any rollout ends if nodes stay healthy, actions succeed and operators resume it."""
        simulation = getattr(self, "simulation", None)
        if simulation is None:
            return
        for server in simulation.servers.values():
            server.healthy = True
        for _ in range(400):
            if simulation.record.phase.is_over:
                break
            if simulation.record.phase is RolloutPhase.PAUSED:
                self.operator_resumes(skips_verification=False)
            simulation.advance_time(12.0)
            self._finish_actions_successfully()
            for address, step in simulation.record.steps.items():
                if simulation.record.spec.action == MANUAL and step.stage is Stage.RETURNING:
                    needs_restart = (
                        not step.started_before
                        or simulation.servers[address].started_at <= step.started_before
                    )
                    if needs_restart or simulation.servers[address].version != NEW_VERSION:
                        simulation.restart_server(address)
            simulation.run_once()
        assert simulation.record.phase.is_over, simulation.record
        self.no_attempt_starts_twice()
        self.ended_rollout_leaves_no_drains_or_open_steps()


RolloutStateMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestRolloutStateMachine = RolloutStateMachine.TestCase
