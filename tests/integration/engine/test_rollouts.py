"""Rollouts in a running engine, with etcd in place of PD, real commands and restarts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controlplane.engine.engine import Engine
from controlplane.errors import RolloutRejected, StateUnavailable, UnknownRollout
from controlplane.intents import changes as intent_changes
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, Stage
from controlplane.storage.file_store import FileStore
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    run_engine,
    wait_for_state,
)
from tests.support.controlplane.rollout_cluster import (
    NEW,
    OLD,
    RolloutCluster,
    drained,
    run_registered_nodes,
    wait_all_active,
    wait_for_phase,
    wait_for_stage,
)
from tests.support.waiting import wait_until


@pytest.fixture
async def cluster(etcd: Etcd, tmp_path: Path) -> AsyncIterator[RolloutCluster]:
    async with run_registered_nodes(etcd.url, tmp_path) as nodes:
        yield nodes


async def test_all_nodes_are_restarted_one_by_one(cluster: RolloutCluster) -> None:
    config = cluster.settings()
    async with run_engine(config) as engine, FakeEnvoy(engine.xds_port), cluster.restarting_nodes():
        await wait_all_active(engine, cluster)
        recorder = EventRecorder(engine)
        rollout = await engine.rollouts.start(cluster.spec, "alice", force=True)
        assert (rollout.phase, rollout.created_by) == (RolloutPhase.RUNNING, "alice")
        finished = await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert finished.reason == "3 of 3 nodes done"
        assert cluster.action_runs == [f"{address} 1" for address in cluster.addresses]
        assert not drained(engine)
        for step in finished.steps.values():
            assert (step.stage, step.version_before, step.version_after) == (Stage.DONE, OLD, NEW)
            assert step.ended_at is not None
        await recorder.wait_for("rollout.done")
        kinds = [event.kind for event in recorder.recorded if event.kind.startswith("rollout.")]
        assert kinds[0] == "rollout.started"
        assert kinds.count("rollout.step") == 5 * 3
        drains = [event.message for event in recorder.recorded if event.kind == "intent.drain"]
        assert drains[0].startswith(f"the rollout {rollout.id} drains ")
        sample = engine.registry.get_sample_value
        assert sample("tidevoy_rollouts", {"phase": "done"}) == 1
        assert sample("tidevoy_rollout_steps_total", {"result": "done"}) == 3
        labels = {"action": "restart", "result": "ok"}
        assert sample("tidevoy_rollout_actions_total", labels) == 3
        assert engine.rollouts.all() == [finished]
    async with run_engine(config) as engine:
        assert engine.rollouts.all() == [finished]


async def test_failed_action_pauses_with_its_output(cluster: RolloutCluster) -> None:
    async with run_engine(cluster.settings("echo no such unit; exit 5")) as engine:
        await wait_all_active(engine, cluster)
        first = next(iter(cluster.addresses))
        rollout = await engine.rollouts.start(cluster.spec, "alice", force=True)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        reason = "the action `restart` ended with exit code 5: no such unit"
        assert paused.steps[first].reason == reason
        assert paused.reason.startswith(f"{first} failed: {reason}; it stays drained. Once it is fixed")
        assert drained(engine) == {first: rollout.id}
        assert engine.cluster.node(first).plan.reason == f"drained by the rollout {rollout.id}"
        await engine.rollouts.resume(rollout.id, "bob")
        await wait_until(lambda: len(cluster.action_runs) == 2)
        await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert cluster.action_runs == [f"{first} 1", f"{first} 2"]
        await engine.rollouts.abort(rollout.id, "bob")
        aborted = await wait_for_phase(engine, rollout.id, RolloutPhase.ABORTED)
        assert aborted.reason == "aborted by bob; 0 of 3 nodes done, 1 failed, 2 skipped"
        assert not drained(engine)
        with pytest.raises(RolloutRejected, match="it is aborted"):
            await engine.rollouts.resume(rollout.id, "bob")
        with pytest.raises(UnknownRollout):
            await engine.rollouts.pause("r0", "bob")


async def test_wrong_version_pauses_until_the_right_version_runs(cluster: RolloutCluster) -> None:
    async with run_engine(cluster.settings()) as engine:
        await wait_all_active(engine, cluster)
        first = next(iter(cluster.addresses))
        spec = replace(cluster.spec, nodes=(first,))
        async with cluster.restarting_nodes(OLD):
            rollout = await engine.rollouts.start(spec, "alice", force=True)
            paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert paused.steps[first].reason == f"it came back, but has version {OLD} instead of {NEW}"
        await cluster.register(first, NEW)
        await wait_until(lambda: engine.cluster.node(first).plan.version == NEW)
        await engine.rollouts.resume(rollout.id, "alice")
        await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert cluster.action_runs == [f"{first} 1"], "the action is not run again for a node that is back"
        assert not drained(engine)


async def test_node_that_never_returns_pauses_the_rollout(
    cluster: RolloutCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.rollouts.node_step._MIN_OBSERVATION_SECONDS", 1.0)
    async with run_engine(cluster.settings()) as engine:
        await wait_all_active(engine, cluster)
        spec = replace(cluster.spec, return_deadline=0.5)
        rollout = await engine.rollouts.start(spec, "alice", force=True)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert "it was not back within 0.5 s: it has not registered with a newer start time" in paused.reason


async def test_manual_rollout_waits_for_external_restarts(cluster: RolloutCluster) -> None:
    async with run_engine(cluster.settings()) as engine:
        await wait_all_active(engine, cluster)
        first, second, third = cluster.addresses
        spec = replace(cluster.spec, action=MANUAL)
        rollout = await engine.rollouts.start(spec, "alice", force=True)
        await wait_for_stage(engine, rollout.id, first, Stage.RETURNING)
        assert drained(engine) == {first: rollout.id}
        await cluster.register(third, NEW)  # before the rollout reaches this node
        await cluster.register(first, NEW)
        await wait_for_stage(engine, rollout.id, second, Stage.RETURNING)
        await cluster.register(second, NEW)
        finished = await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert finished.steps[third].stage is Stage.DONE
        assert cluster.action_runs == []


async def test_running_action_is_not_repeated_after_a_restart(cluster: RolloutCluster) -> None:
    config = cluster.settings("sleep 600")
    first = next(iter(cluster.addresses))
    spec = replace(cluster.spec, nodes=(first,))
    async with run_engine(config) as engine:
        await wait_all_active(engine, cluster)
        rollout = await engine.rollouts.start(spec, "alice", force=True)
        await wait_until(lambda: len(cluster.action_runs) == 1)
        assert engine.rollouts.get(rollout.id).steps[first].stage is Stage.STARTED
    remaining = [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
    assert not remaining, "the command outlived the control plane"
    async with run_engine(config) as engine:
        await wait_for_stage(engine, rollout.id, first, Stage.RETURNING)
        assert "may have been interrupted" in engine.rollouts.get(rollout.id).steps[first].reason
        assert drained(engine) == {first: rollout.id}
        await cluster.register(first, NEW)
        await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert cluster.action_runs == [f"{first} 1"]


async def test_lost_leadership_stops_the_action_and_starts_none(
    cluster: RolloutCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(iter(cluster.addresses))
    async with run_engine(cluster.settings("sleep 600")) as engine:
        monkeypatch.setattr(Engine, "valid_term", 3)
        await wait_all_active(engine, cluster)
        rollout = await engine.rollouts.start(cluster.spec, "alice", force=True)
        await wait_until(lambda: len(cluster.action_runs) == 1)
        monkeypatch.setattr(Engine, "valid_term", None)
        sample = engine.registry.get_sample_value
        labels = {"action": "restart", "result": "interrupted"}
        await wait_until(lambda: sample("tidevoy_rollout_actions_total", labels) == 1)
        assert not [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
        await cluster.register(first, NEW)
        await engine.rollouts.pause(rollout.id, "bob")  # only a leader applies the pause
        assert engine.rollouts.get(rollout.id).steps[first].stage is Stage.STARTED
        monkeypatch.setattr(Engine, "valid_term", 5)
        await wait_for_stage(engine, rollout.id, first, Stage.DONE)
        assert engine.rollouts.get(rollout.id).phase is RolloutPhase.PAUSED
        assert cluster.action_runs == [f"{first} 1"]


async def test_canceled_drain_pauses_the_rollout(cluster: RolloutCluster) -> None:
    async with run_engine(cluster.settings()) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await wait_all_active(engine, cluster)
        first = next(iter(cluster.addresses))
        envoy.sessions[first] = 2
        await wait_until(lambda: engine.cluster.node(first).sessions == 2)
        rollout = await engine.rollouts.start(cluster.spec, "alice", force=True)
        await wait_until(lambda: engine.rollouts.get(rollout.id).steps[first].owns_drain)
        assert engine.rollouts.get(rollout.id).steps[first].sessions == 2
        await engine.operations.undrain(first)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert "an operator canceled its drain" in paused.reason
        assert (cluster.action_runs, drained(engine)) == ([], {})


async def test_preflight_rejects_a_rollout_before_it_starts(cluster: RolloutCluster) -> None:
    async with run_engine(cluster.settings()) as engine, FakeEnvoy(engine.xds_port):
        await wait_all_active(engine, cluster)
        assert engine.rollouts.select_nodes("all") == tuple(sorted(cluster.addresses))
        assert engine.rollouts.action_names() == ["restart", MANUAL]
        await wait_until(lambda: bool(engine.cluster.envoys()))
        preflight = engine.rollouts.check(cluster.spec)
        assert [text[:40] for text in preflight.problems] == [
            "Envoys without Tidevoy's module cannot mi"[:40]
        ]
        with pytest.raises(RolloutRejected, match="without Tidevoy's module"):
            await engine.rollouts.start(cluster.spec, "alice")
        with pytest.raises(RolloutRejected, match="no action is named 'rm'"):
            await engine.rollouts.start(replace(cluster.spec, action="rm"), "alice", force=True)
        assert engine.rollouts.all() == []
        await engine.rollouts.start(cluster.spec, "alice", force=True)
        with pytest.raises(RolloutRejected, match="is still active and also has"):
            await engine.rollouts.start(cluster.spec, "bob", force=True)


async def test_orphaned_drain_is_released(cluster: RolloutCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.rollouts.service._ORPHANED_DRAIN_SECONDS", 0.5)
    first = next(iter(cluster.addresses))
    config = cluster.settings()
    async with run_engine(config) as engine:
        await wait_all_active(engine, cluster)
    file = cluster.directory / "state" / "intents.json"
    async with run_engine(config) as engine:
        await engine.operations.drain(first)
        await wait_for_state(engine, first, State.DRAINED.value)
    assert '"owner":""' in file.read_text()
    state = FileStore(cluster.directory / "state")
    async with state.lock():
        stored_intents = (await state.load()).intents
        orphaned = intent_changes.drain(
            intent_changes.undrain(stored_intents.value, first), first, 1.0, 600.0, owner="r-old"
        )
        await state.save_intents(orphaned, stored_intents.version)
    async with run_engine(config) as engine:
        assert drained(engine) == {first: "r-old"}
        await wait_until(lambda: not drained(engine))


async def test_two_rollouts_drain_one_node_at_a_time(cluster: RolloutCluster) -> None:
    """Each rollout may take one node out of service, but both rollouts together may not take two."""
    first, second, third = cluster.addresses
    async with run_engine(cluster.settings()) as engine, cluster.restarting_nodes():
        await wait_all_active(engine, cluster)
        rollouts = []
        for nodes in ((first, second), (third,)):
            rollouts.append(
                await engine.rollouts.start(replace(cluster.spec, nodes=nodes), "alice", force=True)
            )
        finished = [await wait_for_phase(engine, rollout.id, RolloutPhase.DONE) for rollout in rollouts]
        intervals = sorted(
            (s.drain_requested_at or 0.0, s.ended_at or 0.0)
            for rollout in finished
            for s in rollout.steps.values()
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals)), intervals


async def test_uncertain_write_of_a_started_step_runs_no_action(
    cluster: RolloutCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write succeeds, but its response is lost: the rollout cannot know whether the action ran."""
    first, lost_responses = next(iter(cluster.addresses)), list[str]()
    original_save = FileStore.save_rollout

    async def save(store: FileStore, rollout: Rollout, version: int, term: int | None = None) -> int:
        new_version = await original_save(store, rollout, version, term)
        if rollout.steps[first].stage is Stage.STARTED and not lost_responses:
            lost_responses.append(first)
            raise StateUnavailable("PD", "it did not answer", is_certain=False)
        return new_version

    monkeypatch.setattr(FileStore, "save_rollout", save)
    async with run_engine(cluster.settings()) as engine:
        await wait_all_active(engine, cluster)
        spec = replace(cluster.spec, nodes=(first,))
        rollout = await engine.rollouts.start(spec, "alice", force=True)
        await wait_for_stage(engine, rollout.id, first, Stage.RETURNING)
        step = engine.rollouts.get(rollout.id).steps[first]
        assert (step.interrupted, step.attempts, cluster.action_runs) == (True, 1, [])
        await cluster.register(first, NEW)
        await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert (cluster.action_runs, lost_responses, drained(engine)) == ([], [first], {})
