"""Rollouts under whatever may happen: deaths at any point, operators, nodes that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.errors import RolloutRefused
from controlplane.intents import changes as intent_changes
from controlplane.model.rollout import IN_PROGRESS, MANUAL, Rollout, RolloutPhase, Stage
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import RolloutView
from tests.support.controlplane.rollout_simulator import (
    NEW_VERSION,
    OLD_VERSION,
    ROLLOUT_ID,
    RolloutSimulation,
    SimulatedServer,
    rollout_spec,
)

NODES = tuple(f"10.0.0.{number}:4000" for number in range(1, 6))
STRANGER = "10.0.0.9:4000"  # a node that is in no step
PICKS = st.integers(0, 7)
Step = Callable[[Rollout, str, float], Rollout]
SPANS = st.sampled_from([0.5, 3.0, 12.0, 100.0, 700.0])


class Rollouts(RuleBasedStateMachine):
    """A world in which anything may happen at any time."""

    @initialize(
        most=st.integers(1, 3),
        budget=st.integers(0, 2),
        manual=st.booleans(),
        forced=st.booleans(),
        version=st.sampled_from([NEW_VERSION, ""]),
    )
    def begin(self, most: int, budget: int, manual: bool, forced: bool, version: str) -> None:
        wanted = rollout_spec(*NODES, max_unavailable=most, failure_budget=budget, version=version)
        if manual:
            wanted = replace(wanted, action=MANUAL)
        servers = {address: SimulatedServer() for address in (*NODES, STRANGER)}
        record = state_machine.create(
            ROLLOUT_ID, wanted, "alice", 1000.0, start_times=dict.fromkeys(NODES, 100.0), forced=forced
        )
        self.world = RolloutSimulation(record, servers)
        self.before = record
        self.resumed = 0

    @rule(seconds=SPANS)
    def time_passes(self, seconds: float) -> None:
        self.world.advance_time(seconds)

    @rule()
    def a_look(self) -> None:
        before, sight = self.world.record, self.world.view()
        self.world.run_once()
        self._was_begun_safely(before, sight)
        self._was_judged_rightly(before)
        failures = [s for s in self.world.record.steps.values() if s.stage is Stage.FAILED]
        if self.world.record.phase is RolloutPhase.RUNNING:
            assert len(failures) <= self.world.record.spec.failure_budget
            assert not any(step.interrupted for step in failures)

    def _was_begun_safely(self, before: Rollout, sight: RolloutView) -> None:
        """Who begins with a node leaves no more out of service than may be, and one in service."""
        steps, order = self.world.record.steps, before.spec
        taken = {a for a, step in steps.items() if step.stage in IN_PROGRESS}
        begun = {a for a in taken if before.steps[a].stage is Stage.PENDING}
        ours = {a for a, step in steps.items() if step.stage is Stage.FAILED or step.drained_by_us}
        if begun:
            assert len(taken | (sight.unavailable.keys() - ours)) <= order.max_unavailable
        if begun & sight.active.keys() and not before.forced:
            assert sight.active.keys() - taken

    def _was_judged_rightly(self, before: Rollout) -> None:
        """Clients are led to no node that was not restarted, or has another version, or is not well."""
        for address, step in self.world.record.steps.items():
            was = before.steps[address]
            if (was.stage, step.stage) in ((Stage.RETURNING, Stage.WARMING), (Stage.RETURNING, Stage.DONE)):
                server = self.world.servers[address]
                assert was.started_before is not None
                assert server.started_at > was.started_before
                assert server.healthy
                assert server.version == before.spec.version or not before.spec.version

    @rule(looks=st.integers(1, 4), end=st.booleans())
    def a_while_in_which_all_is_well(self, looks: int, end: bool) -> None:
        for _ in range(looks):
            self.world.advance_time(12.0)
            self.a_look()
            self.no_attempt_is_begun_twice()
            self.never_too_many_are_taken()
        if end:
            self._actions_end_well()

    def _actions_end_well(self) -> None:
        for key in list(self.world.running_actions):
            self.world.restart_server(key[0])
            self.world.finish_action(key)

    @rule()
    def a_look_that_is_cut_short(self) -> None:
        self.world.run_once(crashes=True)

    @rule()
    def a_death(self) -> None:
        self.world.crash()

    @precondition(lambda self: self.world.running_actions)
    @rule(pick=PICKS, ok=st.booleans(), restarts=st.booleans(), right=st.booleans())
    def an_action_ends(self, pick: int, ok: bool, restarts: bool, right: bool) -> None:
        keys = sorted(self.world.running_actions)
        key = keys[pick % len(keys)]
        self.world.advance_time(1.0)
        if restarts:
            self.world.restart_server(key[0], NEW_VERSION if right else OLD_VERSION)
        self.world.finish_action(key, "" if ok else "ended with exit code 1")

    @rule(pick=PICKS, healthy=st.booleans())
    def health_changes(self, pick: int, healthy: bool) -> None:
        server = self.world.servers[(*NODES, STRANGER)[pick % 6]]
        if server.healthy is not healthy:
            server.healthy, server.steady_since = healthy, self.world.now

    @rule()
    def all_but_one_fall(self) -> None:
        for server in list(self.world.servers.values())[1:]:
            server.healthy = False

    @rule(pick=PICKS, right=st.booleans())
    def a_node_restarts_by_itself(self, pick: int, right: bool) -> None:
        self.world.advance_time(1.0)
        self.world.restart_server(NODES[pick % 5], NEW_VERSION if right else OLD_VERSION)

    @rule(pick=PICKS)
    def an_operator_drains(self, pick: int) -> None:
        self.world.intents = intent_changes.drain(self.world.intents, NODES[pick % 5], self.world.now, 60.0)

    @rule(pick=PICKS)
    def an_operator_undrains(self, pick: int) -> None:
        self.world.intents = intent_changes.undrain(self.world.intents, NODES[pick % 5])

    @rule()
    def an_operator_pauses(self) -> None:
        self._step(state_machine.pause)

    @rule()
    def an_operator_resumes(self) -> None:
        self.resumed += self.world.record.phase is RolloutPhase.PAUSED
        self._step(state_machine.resume)

    @precondition(lambda self: self.world.intents.drains)
    @rule(really=st.integers(0, 5))
    def an_operator_aborts(self, really: int) -> None:
        if not really:
            self._step(state_machine.abort)

    def _step(self, step: Step) -> None:
        try:
            self.world.record = step(self.world.record, "bob", self.world.now)
        except RolloutRefused:
            assert self.world.record.phase.is_over or self.world.record.phase is RolloutPhase.ABORTING

    @invariant()
    def no_attempt_is_begun_twice(self) -> None:
        acts = self.world.started_actions
        assert len(set(acts)) == len(acts)
        for address, attempt in acts:
            assert attempt <= self.world.record.steps[address].attempts
        # Only an operator who resumes lets an action be run again.
        assert all(s.attempts <= 1 + self.resumed for s in self.world.record.steps.values())

    @invariant()
    def never_too_many_are_taken(self) -> None:
        taken = [s for s in self.world.record.steps.values() if s.stage in IN_PROGRESS]
        assert len(taken) <= self.world.record.spec.max_unavailable

    @invariant()
    def what_stands_still_says_why(self) -> None:
        record = self.world.record
        assert record.phase is RolloutPhase.RUNNING or record.reason
        assert all(step.reason for step in record.steps.values() if step.stage is not Stage.PENDING)

    @invariant()
    def what_is_over_has_given_all_back(self) -> None:
        record = self.world.record
        if record.phase.is_over:
            assert not [a for a, drain in self.world.intents.drains.items() if drain.owner == ROLLOUT_ID]
            assert not any(s.stage in IN_PROGRESS or s.stage is Stage.PENDING for s in record.steps.values())
        if record.phase is RolloutPhase.DONE:
            assert all(s.stage in (Stage.DONE, Stage.SKIPPED) for s in record.steps.values())

    @invariant()
    def nothing_is_begun_while_it_is_paused(self) -> None:
        before, after = self.before, self.world.record
        begun = [a for a, s in after.steps.items() if s.attempts > before.steps[a].attempts]
        if before.phase is RolloutPhase.PAUSED is after.phase:
            assert not begun, "an action was begun while the rollout was paused"
        self.before = after

    def teardown(self) -> None:
        """From wherever it is, it comes to its end when all behave."""
        world = getattr(self, "world", None)
        if world is None:
            return
        for server in world.servers.values():
            server.healthy = True
        for _ in range(400):
            if world.record.phase.is_over:
                break
            if world.record.phase is RolloutPhase.PAUSED:
                self.an_operator_resumes()
            world.advance_time(12.0)
            self._actions_end_well()
            for address, step in world.record.steps.items():
                if world.record.spec.action == MANUAL and step.stage is Stage.RETURNING:
                    waits = not step.started_before or world.servers[address].started_at <= step.started_before
                    if waits or world.servers[address].version != NEW_VERSION:
                        world.restart_server(address)
            world.run_once()
        assert world.record.phase.is_over, world.record
        self.no_attempt_is_begun_twice()
        self.what_is_over_has_given_all_back()


Rollouts.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestAnythingMayHappen = Rollouts.TestCase
