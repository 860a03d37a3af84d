"""Rollouts that compare each node with an old one before they return it to service.

The real program replays captured reads on simulated TiDB servers; for failures there is a fake program.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

import psutil
import pytest

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.errors import RolloutRejected, UnknownVerification
from controlplane.model.comparison import Comparison, FindingKind, LatencySummary
from controlplane.model.rollout import Rollout, RolloutPhase, RolloutSpec, Stage, Verification
from controlplane.rollouts.actions import verification
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.controlplane.comparisons import SAME, SLOW, comparison_with, digest_comparison
from tests.support.controlplane.engine import run_engine
from tests.support.controlplane.rollout_cluster import (
    RolloutCluster,
    drained,
    run_registered_nodes,
    wait_all_active,
    wait_for_phase,
    wait_for_stage,
)
from tests.support.slow_relay import SlowStatementRelay
from tests.support.tidb_sim_clients import session_rules
from tests.support.traffic.capture_writer import Capture
from tests.support.traffic.replay_program import require_replay_program
from tests.support.waiting import wait_until

CAPTURE = "monday"
SESSIONS, STATEMENTS = 4, 20  # of each digest in each session
SLOW_TEXT = "order_count"
EQUAL = comparison_with(digest_comparison(SAME, 1.0))


def settings(cluster: RolloutCluster, **verification_settings: object) -> Settings:
    """Return settings with a directory of captures."""
    section = {"directory": str(cluster.directory / "captures"), "user": "root", "warm_up": 0}
    base = cluster.settings()
    rollouts = base.rollouts.model_dump(mode="json") | {"verification": section | verification_settings}
    return Settings.model_validate(base.model_dump(mode="json") | {"rollouts": rollouts})


def verified(spec: RolloutSpec, *nodes: str, max_ratio: float = 1.5) -> RolloutSpec:
    return replace(spec, nodes=nodes or spec.nodes, verify=f"replay:{CAPTURE}", verify_ratio=max_ratio)


# --- the real program ---


@pytest.fixture
async def relays(etcd: Etcd, mariadb: MariaDb, tmp_path: Path) -> AsyncIterator[list[SlowStatementRelay]]:
    """Yield the relays in front of two simulated servers."""
    async with AsyncExitStack() as stack:
        relays = []
        for _ in range(2):
            sim = await stack.enter_async_context(TidbSim(SimSettings(session_rules(mariadb))))
            relay = SlowStatementRelay(sim.sql_address, SLOW_TEXT.encode(), 0.02)
            relays.append(await stack.enter_async_context(relay))
        yield relays


@pytest.fixture
async def cluster(
    relays: list[SlowStatementRelay], etcd: Etcd, tmp_path: Path
) -> AsyncIterator[RolloutCluster]:
    """Yield the two servers, registered with the addresses of their relays, and a capture."""
    addresses = [relay.address for relay in relays]
    async with run_registered_nodes(etcd.url, tmp_path, addresses) as nodes:
        write_capture(tmp_path / "captures" / CAPTURE / "envoy-1")
        yield nodes


def write_capture(directory: Path) -> None:
    """Write sessions with two reads, and a write that must not be replayed."""
    capture = Capture()
    for number in range(SESSIONS * STATEMENTS):
        session = 1 + number % SESSIONS
        capture.add(session, f"select {number}").add(session, f"select {number} as {SLOW_TEXT}")
    capture.add(1, "create database must_not_exist")
    capture.write(directory)


async def test_upgraded_node_that_is_slow_for_one_digest_stays_drained(
    cluster: RolloutCluster, relays: list[SlowStatementRelay]
) -> None:
    require_replay_program()
    new, old = cluster.addresses
    async with run_engine(settings(cluster)) as engine, cluster.restarting_nodes():
        await wait_all_active(engine, cluster)
        relays[0].is_slow = True
        rollout = await engine.rollouts.start(verified(cluster.spec, new, max_ratio=5.0), "alice", force=True)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert paused.reason.startswith(f"{new} failed: it is worse than {old}: `select ? as `{SLOW_TEXT}``")
        assert drained(engine) == {new: rollout.id}
        report = engine.rollouts.verification(rollout.id, new)
        (finding,) = [each for each in report.findings if each.is_blocking]
        slow = report.comparison.digests[0]
        assert (finding.kind, finding.digest) == (FindingKind.SLOWER, slow.digest)
        assert (slow.pairs, report.comparison.totals.pairs) == (
            SESSIONS * STATEMENTS,
            2 * SESSIONS * STATEMENTS,
        )
        assert slow.new.median_us is not None
        assert slow.new.median_us > 20_000
        relays[0].is_slow = False
        await engine.rollouts.resume(rollout.id, "bob")
        done = await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert done.steps[new].verification is Verification.PASSED
        assert engine.rollouts.verification(rollout.id, new).has_passed
        assert cluster.action_runs == [f"{new} 1"], "the action is not repeated"
        results = cluster.directory / "state" / "verifications"
        await wait_until(lambda: not list(results.iterdir()))


# --- a fake program ---


class FakeProgram:
    """A program that runs `on_run` for each replay, and writes the comparisons that a test has set."""

    def __init__(self, directory: Path) -> None:
        self.path, self._log = directory / "fake-replay", directory / "replays"
        self._comparisons = directory / "comparisons"
        self._comparisons.mkdir()
        self.compare_with(EQUAL)

    def compare_with(self, *comparisons: Comparison) -> None:
        """Set the results of comparisons; the last one is that of all later ones."""
        for number, comparison in enumerate(comparisons):
            (self._comparisons / f"{number}.json").write_text(json.dumps(asdict(comparison)))

    def install(self, on_run: str = "true") -> None:
        """Write the program. In `on_run`, `$target` and `$output` are those of the replay."""
        self.path.write_text(
            f"""#!/bin/sh
if [ "$1" = compare ]; then
  cd {quote(str(self._comparisons))}
  next=$(ls *.json | head -n 1)
  cp $next "$5"
  test $(ls *.json | wc -l) = 1 || rm $next
  exit
fi
for argument; do
  case "$last" in --target) target=$argument;; --output) output=$argument;; esac
  last=$argument
done
echo "$target" >> {quote(str(self._log))}
mkdir -p "$output"
{on_run}
"""
        )
        self.path.chmod(0o755)

    @property
    def targets(self) -> list[str]:
        """The targets of all replays so far."""
        return self._log.read_text().split() if self._log.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Return the running replays."""
        children = psutil.Process().children(recursive=True)
        return [process for process in children if "sleep" in process.name()]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProgram:
    fake = FakeProgram(tmp_path)
    fake.install()
    monkeypatch.setattr(verification, "find_replay_program", lambda: fake.path)
    return fake


@pytest.fixture
async def fake_nodes(etcd: Etcd, tmp_path: Path) -> AsyncIterator[RolloutCluster]:
    """Yield three nodes that only greet."""
    async with run_registered_nodes(etcd.url, tmp_path) as nodes:
        (tmp_path / "captures" / CAPTURE).mkdir(parents=True)
        yield nodes


async def start(engine: Engine, cluster: RolloutCluster, *nodes: str) -> Rollout:
    await wait_all_active(engine, cluster)
    return await engine.rollouts.start(verified(cluster.spec, *nodes), "alice", force=True)


def is_verifying(engine: Engine, program: FakeProgram, name: str, node: str) -> Callable[[], bool]:
    """Return a condition: both replays run."""

    def condition() -> bool:
        stage = engine.rollouts.get(name).steps[node].stage
        return stage is Stage.VERIFYING and len(program.processes()) == 2

    return condition


async def test_last_node_is_compared_with_results_of_an_old_node(
    fake_nodes: RolloutCluster, program: FakeProgram
) -> None:
    first, second, third = fake_nodes.addresses
    async with run_engine(settings(fake_nodes)) as engine, fake_nodes.restarting_nodes():
        rollout = await start(engine, fake_nodes)
        done = await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert {step.verification for step in done.steps.values()} == {Verification.PASSED}
        targets = program.targets
        assert set(targets[:2]) == {first, third}
        assert set(targets[2:4]) == {second, third}
        assert targets[4:] == [third], "no old node is left"
        assert [report.baseline for report in done.reports.values()] == [third] * 3
        assert engine.rollouts.verification(rollout.id, first).capture == CAPTURE
        with pytest.raises(UnknownVerification):
            engine.rollouts.verification(rollout.id, "10.0.0.9:4000")


async def test_failed_replay_pauses_the_rollout_until_an_operator_accepts_it(
    fake_nodes: RolloutCluster, program: FakeProgram
) -> None:
    first = next(iter(fake_nodes.addresses))
    # The failure ends the other replay.
    program.install(f"test $target = {first} || sleep 600; echo 'error 1045: access denied' >&2; exit 1")
    async with run_engine(settings(fake_nodes)) as engine, fake_nodes.restarting_nodes():
        rollout = await start(engine, fake_nodes, first)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        reason = f"the replay of {CAPTURE} on {first} ended with exit code 1: error 1045: access denied"
        assert paused.steps[first].reason == f"it could not be verified: {reason}"
        assert drained(engine) == {first: rollout.id}
        await engine.rollouts.resume(rollout.id, "bob", skip_verification=True)
        done = await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert done.steps[first].verification is Verification.SKIPPED
        assert program.targets.count(first) == 1, "it was not verified again"
        assert not drained(engine)


async def test_digest_that_was_slower_once_does_not_pause_the_rollout(
    fake_nodes: RolloutCluster, program: FakeProgram
) -> None:
    program.compare_with(comparison_with(digest_comparison(SLOW, 2.1)), EQUAL)
    first = next(iter(fake_nodes.addresses))
    async with run_engine(settings(fake_nodes)) as engine, fake_nodes.restarting_nodes():
        rollout = await start(engine, fake_nodes, first)
        await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
        assert engine.rollouts.verification(rollout.id, first).findings == ()
        assert program.targets.count(first) == 2


async def test_reads_that_fail_on_both_nodes_prove_nothing(
    fake_nodes: RolloutCluster, program: FakeProgram
) -> None:
    failing = comparison_with(digest_comparison(SAME, None))
    denied = replace(failing.totals, old=LatencySummary(errors=60), new=LatencySummary(errors=60))
    program.compare_with(replace(failing, totals=denied))
    first = next(iter(fake_nodes.addresses))
    async with run_engine(settings(fake_nodes)) as engine, fake_nodes.restarting_nodes():
        rollout = await start(engine, fake_nodes, first)
        paused = await wait_for_phase(engine, rollout.id, RolloutPhase.PAUSED)
        assert "60 of 100 reads failed on" in paused.reason
        assert "check the privileges of the user root" in paused.reason


async def test_abort_ends_the_replays(fake_nodes: RolloutCluster, program: FakeProgram) -> None:
    program.install("sleep 600")
    first = next(iter(fake_nodes.addresses))
    async with run_engine(settings(fake_nodes)) as engine, fake_nodes.restarting_nodes():
        rollout = await start(engine, fake_nodes)
        await wait_until(is_verifying(engine, program, rollout.id, first))
        await engine.rollouts.abort(rollout.id, "bob")
        aborted = await wait_for_phase(engine, rollout.id, RolloutPhase.ABORTED)
        await wait_until(lambda: not program.processes())
        assert aborted.steps[first].reason == "the rollout was aborted before the node was verified"
        assert not drained(engine)


async def test_next_leader_starts_the_verification_again(
    fake_nodes: RolloutCluster, program: FakeProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.install("sleep 600")
    first = next(iter(fake_nodes.addresses))
    config = settings(fake_nodes)
    async with run_engine(config) as engine, fake_nodes.restarting_nodes():
        monkeypatch.setattr(Engine, "valid_term", 3)
        rollout = await start(engine, fake_nodes, first)
        await wait_until(is_verifying(engine, program, rollout.id, first))
        monkeypatch.setattr(Engine, "valid_term", None)
        await wait_until(lambda: not program.processes())
        assert engine.rollouts.get(rollout.id).steps[first].stage is Stage.VERIFYING
        monkeypatch.setattr(Engine, "valid_term", 5)
        await wait_until(is_verifying(engine, program, rollout.id, first))
    assert not program.processes(), "the replays outlived the control plane"
    program.install()
    monkeypatch.undo()
    monkeypatch.setattr(verification, "find_replay_program", lambda: program.path)
    async with run_engine(config) as engine:
        await wait_for_phase(engine, rollout.id, RolloutPhase.DONE)
    assert (program.targets.count(first), len(program.targets)) == (3, 6)


async def test_unknown_capture_is_a_problem_of_the_preflight(
    fake_nodes: RolloutCluster, program: FakeProgram
) -> None:
    first = next(iter(fake_nodes.addresses))
    async with run_engine(settings(fake_nodes)) as engine:
        await wait_all_active(engine, fake_nodes)
        spec = replace(verified(fake_nodes.spec, first), verify="replay:tuesday")
        assert "has no capture named tuesday" in engine.rollouts.check(spec).problems[-1]
        with pytest.raises(RolloutRejected, match="has no capture named tuesday"):
            await engine.rollouts.start(spec, "alice")
        rollout = await engine.rollouts.start(spec, "alice", force=True)  # another control plane may have it
        await wait_for_stage(engine, rollout.id, first, Stage.RETURNING)
