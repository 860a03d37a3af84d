"""Rollouts in a running engine: real etcd in PD's place, real commands, and what survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import RolloutRefused, StateUnavailable, UnknownRollout
from controlplane.etcd.client import EtcdClient
from controlplane.intents import changes as intent_changes
from controlplane.model.nodes import State
from controlplane.model.rollout import MANUAL, Rollout, RolloutPhase, RolloutSpec, Stage
from controlplane.storage.file_store import FileStore
from sandbox.etcd import Etcd
from tests.support.controlplane.engine import (
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.waiting import wait_until

OLD, NEW = "v8.5.3", "v8.5.4"


@dataclass
class Cluster:
    """Nodes that register themselves in etcd; a command asks for a restart by a line in `asked`."""

    client: EtcdClient
    directory: Path
    url: str
    addresses: dict[str, str] = field(default_factory=dict)  # SQL address -> status address
    started: int = 1_700_000_000

    @property
    def asked(self) -> list[str]:
        """A line for each time that the action was run: node and attempt."""
        log = self.directory / "asked"
        return log.read_text().splitlines() if log.exists() else []

    def settings(self, script: str = "exit 0", **more: Any) -> Settings:
        """`restart` writes a line to `asked` and then does this."""
        line = f"echo {{address}} {{attempt}} >> {shlex.quote(str(self.directory / 'asked'))}; {script}"
        actions = {"restart": {"command": ["sh", "-c", line], "timeout": 30}}
        said: dict[str, Any] = {"pd": {"urls": [self.url]}, "rollouts": {"actions": actions}, **more}
        return settings(self.directory, **said)

    async def register(self, address: str, version: str = OLD) -> None:
        """As a server does that has just started."""
        self.started += 1
        port = addresses.split(self.addresses[address])[1]
        info = {
            "version": version,
            "git_hash": "abc",
            "ip": "127.0.0.1",
            "status_port": port,
            "labels": None,
            "start_timestamp": self.started,
        }
        await self.client.put(f"/topology/tidb/{address}/info", json.dumps(info).encode())
        await self.client.put(f"/topology/tidb/{address}/ttl", b"1767225630123456789")

    async def obey(self, version: str = NEW) -> None:
        """Restart each node that the action names, from now on, until cancelled."""
        for number in itertools.count():
            await wait_until(partial(self._has_asked, number), 60)
            await self.register(self.asked[number].split()[0], version)

    def _has_asked(self, number: int) -> bool:
        return len(self.asked) > number

    @contextlib.asynccontextmanager
    async def obeying(self, version: str = NEW) -> AsyncIterator[None]:
        task = asyncio.create_task(self.obey(version))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    @property
    def order(self) -> RolloutSpec:
        """All nodes, one after the other, quickly."""
        return RolloutSpec(
            tuple(self.addresses),
            "restart",
            version=NEW,
            healthy_for=0.2,
            drain_deadline=5.0,
            return_deadline=20.0,
        )


@pytest.fixture
async def cluster(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        client = EtcdClient([etcd.url])
        stack.push_async_callback(client.close)
        cluster = Cluster(client, tmp_path, etcd.url)
        for _ in range(3):
            sql, status = await stack.enter_async_context(healthy_node())
            cluster.addresses[sql] = status
            await cluster.register(sql)
        yield cluster


async def in_service(engine: Engine, cluster: Cluster) -> None:
    for address in cluster.addresses:
        await wait_for_state(engine, address, "active")


async def is_in(engine: Engine, name: str, phase: RolloutPhase, seconds: float = 30.0) -> Rollout:
    await wait_until(lambda: engine.rollouts.get(name).phase is phase, seconds)
    return engine.rollouts.get(name)


async def reaches(engine: Engine, name: str, address: str, stage: Stage, seconds: float = 30.0) -> None:
    await wait_until(lambda: engine.rollouts.get(name).steps[address].stage is stage, seconds)


def drained(engine: Engine) -> dict[str, str]:
    return {v.plan.node.address: v.drain.owner for v in engine.nodes() if v.drain is not None}


async def test_all_nodes_are_restarted_one_after_the_other(cluster: Cluster) -> None:
    wanted = cluster.settings()
    async with run_engine(wanted) as engine, FakeEnvoy(engine.xds_port), cluster.obeying():
        await in_service(engine, cluster)
        told = EventRecorder(engine)
        begun = await engine.rollouts.start(cluster.order, "alice", force=True)
        assert (begun.phase, begun.by) == (RolloutPhase.RUNNING, "alice")
        over = await is_in(engine, begun.id, RolloutPhase.DONE)
        assert over.reason == "3 of 3 nodes done"
        assert cluster.asked == [f"{address} 1" for address in cluster.addresses]
        assert not drained(engine)
        for step in over.steps.values():
            assert (step.stage, step.version_before, step.version_after) == (Stage.DONE, OLD, NEW)
            assert step.ended is not None
        await told.wait_for("rollout.done")
        kinds = [event.kind for event in told.recorded if event.kind.startswith("rollout.")]
        assert kinds[0] == "rollout.started"
        assert kinds.count("rollout.step") == 5 * 3
        drains = [event.message for event in told.recorded if event.kind == "intent.drain"]
        assert drains[0].startswith(f"the rollout {begun.id} drains ")
        sample = engine.registry.get_sample_value
        assert sample("tidevoy_rollouts", {"phase": "done"}) == 1
        assert sample("tidevoy_rollout_steps_total", {"result": "done"}) == 3
        labels = {"action": "restart", "result": "ok"}
        assert sample("tidevoy_rollout_actions_total", labels) == 3
        assert engine.rollouts.all() == [over]
    async with run_engine(wanted) as engine:
        assert engine.rollouts.all() == [over]


async def test_an_action_that_fails_pauses_with_what_it_said(cluster: Cluster) -> None:
    async with run_engine(cluster.settings("echo no such unit; exit 5")) as engine:
        await in_service(engine, cluster)
        first = next(iter(cluster.addresses))
        begun = await engine.rollouts.start(cluster.order, "alice", force=True)
        paused = await is_in(engine, begun.id, RolloutPhase.PAUSED)
        why = "the action `restart` ended with exit code 5: no such unit"
        assert paused.steps[first].reason == why
        assert paused.reason.startswith(f"{first} failed: {why}; it stays drained. Once it is mended")
        assert drained(engine) == {first: begun.id}
        assert engine.node(first).plan.reason == f"drained by the rollout {begun.id}"
        await engine.rollouts.resume(begun.id, "bob")
        await wait_until(lambda: len(cluster.asked) == 2)
        await is_in(engine, begun.id, RolloutPhase.PAUSED)
        assert cluster.asked == [f"{first} 1", f"{first} 2"]
        await engine.rollouts.abort(begun.id, "bob")
        aborted = await is_in(engine, begun.id, RolloutPhase.ABORTED)
        assert aborted.reason == "aborted by bob; 0 of 3 nodes done, 1 failed, 2 skipped"
        assert not drained(engine)
        with pytest.raises(RolloutRefused, match="it is aborted"):
            await engine.rollouts.resume(begun.id, "bob")
        with pytest.raises(UnknownRollout):
            await engine.rollouts.pause("r0", "bob")


async def test_a_wrong_version_pauses_and_the_right_one_goes_on(cluster: Cluster) -> None:
    async with run_engine(cluster.settings()) as engine:
        await in_service(engine, cluster)
        first = next(iter(cluster.addresses))
        wanted = replace(cluster.order, nodes=(first,))
        async with cluster.obeying(OLD):
            begun = await engine.rollouts.start(wanted, "alice", force=True)
            paused = await is_in(engine, begun.id, RolloutPhase.PAUSED)
        assert paused.steps[first].reason == f"it came back, but has version {OLD} instead of {NEW}"
        await cluster.register(first, NEW)
        await wait_until(lambda: engine.node(first).plan.version == NEW)
        await engine.rollouts.resume(begun.id, "alice")
        await is_in(engine, begun.id, RolloutPhase.DONE)
        assert cluster.asked == [f"{first} 1"], "it is not run again for a node that is right"
        assert not drained(engine)


async def test_a_node_that_never_comes_back_pauses(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.rollouts.node_step._MIN_OBSERVATION_SECONDS", 1.0)
    async with run_engine(cluster.settings()) as engine:
        await in_service(engine, cluster)
        wanted = replace(cluster.order, return_deadline=0.5)
        begun = await engine.rollouts.start(wanted, "alice", force=True)
        paused = await is_in(engine, begun.id, RolloutPhase.PAUSED)
        assert "it was not back within 0.5 s: it has not registered with a newer start time" in paused.reason


async def test_a_manual_one_waits_for_whoever_restarts_the_node(cluster: Cluster) -> None:
    async with run_engine(cluster.settings()) as engine:
        await in_service(engine, cluster)
        first, second, third = cluster.addresses
        wanted = replace(cluster.order, action=MANUAL)
        begun = await engine.rollouts.start(wanted, "alice", force=True)
        await reaches(engine, begun.id, first, Stage.RETURNING)
        assert drained(engine) == {first: begun.id}
        await cluster.register(third, NEW)  # out of its turn
        await cluster.register(first, NEW)
        await reaches(engine, begun.id, second, Stage.RETURNING)
        await cluster.register(second, NEW)
        over = await is_in(engine, begun.id, RolloutPhase.DONE)
        assert over.steps[third].stage is Stage.DONE
        assert cluster.asked == []


async def test_an_action_that_runs_is_not_run_again_after_a_restart(cluster: Cluster) -> None:
    wanted = cluster.settings("sleep 600")
    first = next(iter(cluster.addresses))
    order = replace(cluster.order, nodes=(first,))
    async with run_engine(wanted) as engine:
        await in_service(engine, cluster)
        begun = await engine.rollouts.start(order, "alice", force=True)
        await wait_until(lambda: len(cluster.asked) == 1)
        assert engine.rollouts.get(begun.id).steps[first].stage is Stage.STARTED
    left = [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
    assert not left, "the command outlived the control plane"
    async with run_engine(wanted) as engine:
        await reaches(engine, begun.id, first, Stage.RETURNING)
        assert "may have been cut off" in engine.rollouts.get(begun.id).steps[first].reason
        assert drained(engine) == {first: begun.id}
        await cluster.register(first, NEW)
        await is_in(engine, begun.id, RolloutPhase.DONE)
        assert cluster.asked == [f"{first} 1"]


async def test_who_loses_the_lead_ends_its_action_and_begins_no_other(cluster: Cluster) -> None:
    class Lead:
        term: int | None = 3

    first = next(iter(cluster.addresses))
    async with run_engine(cluster.settings("sleep 600")) as engine:
        lead = Lead()
        engine.leadership = lead
        await in_service(engine, cluster)
        begun = await engine.rollouts.start(cluster.order, "alice", force=True)
        await wait_until(lambda: len(cluster.asked) == 1)
        lead.term = None
        sample = engine.registry.get_sample_value
        labels = {"action": "restart", "result": "cut_off"}
        await wait_until(lambda: sample("tidevoy_rollout_actions_total", labels) == 1)
        assert not [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
        await cluster.register(first, NEW)
        await engine.rollouts.pause(begun.id, "bob")  # whoever leads heeds it
        assert engine.rollouts.get(begun.id).steps[first].stage is Stage.STARTED
        lead.term = 5
        await reaches(engine, begun.id, first, Stage.DONE)
        assert engine.rollouts.get(begun.id).phase is RolloutPhase.PAUSED
        assert cluster.asked == [f"{first} 1"]


async def test_a_drain_that_an_operator_takes_back_pauses(cluster: Cluster) -> None:
    async with run_engine(cluster.settings()) as engine, FakeEnvoy(engine.xds_port) as envoy:
        await in_service(engine, cluster)
        first = next(iter(cluster.addresses))
        envoy.sessions[first] = 2
        await wait_until(lambda: engine.node(first).sessions == 2)
        begun = await engine.rollouts.start(cluster.order, "alice", force=True)
        await wait_until(lambda: engine.rollouts.get(begun.id).steps[first].drained_by_us)
        assert engine.rollouts.get(begun.id).steps[first].sessions == 2
        await engine.undrain(first)
        paused = await is_in(engine, begun.id, RolloutPhase.PAUSED)
        assert "taken back by an operator" in paused.reason
        assert (cluster.asked, drained(engine)) == ([], {})


async def test_checks_speak_before_anything_is_done(cluster: Cluster) -> None:
    async with run_engine(cluster.settings()) as engine, FakeEnvoy(engine.xds_port):
        await in_service(engine, cluster)
        assert engine.rollouts.select_nodes("all") == tuple(sorted(cluster.addresses))
        assert engine.rollouts.action_names() == ["restart", MANUAL]
        await wait_until(lambda: bool(engine.envoys()))
        found = await engine.rollouts.check(cluster.order)
        assert [text[:40] for text in found.problems] == ["sessions cannot move in Envoys without Ti"[:40]]
        with pytest.raises(RolloutRefused, match="without Tidevoy's module"):
            await engine.rollouts.start(cluster.order, "alice")
        with pytest.raises(RolloutRefused, match="no action is named 'rm'"):
            await engine.rollouts.start(replace(cluster.order, action="rm"), "alice", force=True)
        assert engine.rollouts.all() == []
        await engine.rollouts.start(cluster.order, "alice", force=True)
        with pytest.raises(RolloutRefused, match="is not over and has"):
            await engine.rollouts.start(cluster.order, "bob", force=True)


async def test_a_drain_that_nobody_stands_for_is_taken_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.rollouts.controller._ORPHANED_DRAIN_SECONDS", 0.5)
    first = next(iter(cluster.addresses))
    wanted = cluster.settings()
    async with run_engine(wanted) as engine:
        await in_service(engine, cluster)
    file = cluster.directory / "state" / "intents.json"
    async with run_engine(wanted) as engine:
        await engine.drain(first)
        await wait_for_state(engine, first, State.DRAINED.value)
    assert '"owner":""' in file.read_text()
    state = FileStore(cluster.directory / "state")
    async with state.lock():
        kept = (await state.load()).intents
        stray = intent_changes.drain(
            intent_changes.undrain(kept.value, first), first, 1.0, 600.0, owner="r-of-old"
        )
        await state.save_intents(stray, kept.version)
    async with run_engine(wanted) as engine:
        assert drained(engine) == {first: "r-of-old"}
        await wait_until(lambda: not drained(engine))


async def test_two_rollouts_take_turns(cluster: Cluster) -> None:
    """Each lets one node be out at a time, and so one is out for both."""
    first, second, third = cluster.addresses
    async with run_engine(cluster.settings()) as engine, cluster.obeying():
        await in_service(engine, cluster)
        turns = []
        for nodes in ((first, second), (third,)):
            turns.append(
                await engine.rollouts.start(replace(cluster.order, nodes=nodes), "alice", force=True)
            )
        over = [await is_in(engine, begun.id, RolloutPhase.DONE) for begun in turns]
        spans = sorted(
            (s.drain_requested_at or 0.0, s.ended or 0.0) for rollout in over for s in rollout.steps.values()
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), spans


async def test_a_start_of_which_nobody_knows_whether_it_is_kept_runs_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is carried out, and its answer is lost: whoever looks next cannot know that nothing ran."""
    first, lost = next(iter(cluster.addresses)), list[str]()
    real = FileStore.save_rollout

    async def save(store: FileStore, rollout: Rollout, version: int, term: int | None = None) -> int:
        written = await real(store, rollout, version, term)
        if rollout.steps[first].stage is Stage.STARTED and not lost:
            lost.append(first)
            raise StateUnavailable("PD", "it did not answer", is_certain=False)
        return written

    monkeypatch.setattr(FileStore, "save_rollout", save)
    async with run_engine(cluster.settings()) as engine:
        await in_service(engine, cluster)
        wanted = replace(cluster.order, nodes=(first,))
        begun = await engine.rollouts.start(wanted, "alice", force=True)
        await reaches(engine, begun.id, first, Stage.RETURNING)
        step = engine.rollouts.get(begun.id).steps[first]
        assert (step.interrupted, step.attempts, cluster.asked) == (True, 1, [])
        await cluster.register(first, NEW)
        await is_in(engine, begun.id, RolloutPhase.DONE)
        assert (cluster.asked, lost, drained(engine)) == ([], [first], {})
