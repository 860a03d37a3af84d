"""The disk with the control plane's state and all logs is full, while clients run statements."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.migration.rolling_restart import parse_samples
from sandbox.local_cluster import LocalCluster
from sandbox.server import http_client
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.controlplane.api_server import problem_kind
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.tidb.drill_load import DrillLoad
from tests.support.tidb.node_operations import drain, undrain, wait_for_state
from tests.support.tidb.sessions import TrackedSessions, connect, query_rows, query_value, session_port
from tests.support.waiting import wait_until

DISK_BYTES = 8 * 1024 * 1024
_IDLE_SESSIONS = 12
_LOGS = ("control-plane.log", "envoy.log")


@dataclass
class FullDiskStack:
    """`disk` has the state directory, the access log, and the log files of the control plane and of Envoy."""

    stack: LocalCluster
    disk: SmallDisk

    @property
    def state(self) -> Path:
        return self.disk.path / "state"

    @property
    def access_log(self) -> Path:
        return self.disk.path / "sessions.log"


@pytest.fixture
async def on_small_disk(tmp_path: Path, cluster: TidbCluster) -> AsyncIterator[FullDiskStack]:
    directory = tmp_path / "stack"
    directory.mkdir()
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        for name in _LOGS:
            (directory / name).symlink_to(disk.path / name)
        settings = {
            "state_dir": str(disk.path / "state"),
            "sql": {"access_log": str(disk.path / "sessions.log")},
            # A server that has just started may seem to be short of CPU, and would get few sessions.
            "balance": {"policy": "connection"},
        }
        async with LocalCluster.start(directory, cluster=cluster, settings=settings) as stack:
            yield FullDiskStack(stack, disk)
            assert stack.violations() == []
            assert stack.bugs() == []


async def has_failed_saves(stack: LocalCluster) -> bool:
    """Return whether the metric behind the alert TidevoyPlanNotSaved counts failures."""
    page = (await stack.api.get("/metrics")).raise_for_status().text
    (failures,) = parse_samples(page, "tidevoy_plan_saves_failed")
    return failures.value > 0


def end_sessions(stack: LocalCluster) -> None:
    """Open and end sessions, so that Envoy writes more to its access log than fits into one page."""
    for _ in range(30):
        connect(stack.sql_port).close()


async def has_lost_access_log_lines(stack: LocalCluster) -> bool:
    return (await stack.envoy.stats("filesystem.write_failed"))["filesystem.write_failed"] > 0


async def overflow_logs(stack: LocalCluster, disk: SmallDisk) -> None:
    """Let Envoy log so much that nothing fits any more."""
    await post_to_envoy(stack, "/logging?level=debug")
    sizes: list[int] = []

    def is_full() -> bool:
        sizes.append((disk.path / "envoy.log").stat().st_size)
        return len(sizes) > 20 and len(set(sizes[-20:])) == 1

    await wait_until(is_full)
    await post_to_envoy(stack, "/logging?level=info")


async def post_to_envoy(stack: LocalCluster, path: str) -> None:
    async with http_client(stack.envoy.admin_url) as admin:
        (await admin.post(path)).raise_for_status()


@pytest.mark.timeout(240)
async def test_full_disk_stops_only_the_calls_of_operators(
    on_small_disk: FullDiskStack, database: str
) -> None:
    stack, disk = on_small_disk.stack, on_small_disk.disk
    drained, stopped, other = stack.tidb
    url = stack.control_plane.api_url
    with closing(TrackedSessions(stack, database)) as sessions:
        await drain(stack, drained)
        idle = [sessions.on_node(stopped) for _ in range(_IDLE_SESSIONS)]
        for number, session in enumerate(idle):
            query_rows(session, f"set @number = {number}")

        def ports() -> set[int]:
            return {session_port(session) for session in idle}

        async with DrillLoad(stack.sql_port, database, clients=6, statements_per_second=60) as load:
            disk.fill()
            full_since = time.monotonic()
            intents = (on_small_disk.state / "intents.json").read_bytes()

            # Operators' calls change nothing and say why.
            started_at = time.monotonic()
            refused = [
                await run_tidevoy(url, *command)
                for command in (("drain", other.address), ("undrain", drained.address))
            ]
            refusal_seconds = time.monotonic() - started_at
            for result in refused:
                assert (result.exit_code, result.stdout) == (1, "")
                assert len(result.stderr.splitlines()) == 1
                assert "nothing was changed" in result.stderr
                assert "No space left on device" in result.stderr
            response = await stack.api.post(f"/v1/nodes/{other.address}/drain")
            assert (response.status_code, problem_kind(response)) == (503, "unavailable")
            states = {drained.address: "drained", stopped.address: "active", other.address: "active"}
            assert states.items() <= (await stack.states()).items()
            assert (on_small_disk.state / "intents.json").read_bytes() == intents
            await overflow_logs(stack, disk)
            end_sessions(stack)

            # Health checks, discovery, plans and migrations go on.
            assert await stopped.terminate() == 0
            await wait_until(lambda: ports() == {other.port})
            await wait_until(lambda: has_failed_saves(stack))

            # A restart begins with the last saved intents and plan.
            await stack.control_plane.restart()
            await wait_for_state(stack, drained, "drained")
            await stopped.launch()
            await wait_for_state(stack, stopped, "active")

            async def has_sessions() -> bool:
                return bool((await stack.nodes())[stopped.address]["sessions"])

            await stack.wait_until(has_sessions, "sessions by rebalancing", 30.0)
            assert drained.port not in {session_port(sessions.through_envoy()) for _ in range(6)}
            await load.wait_for_statements()
            await wait_until(lambda: has_lost_access_log_lines(stack))
            full_seconds = time.monotonic() - full_since

            disk.free()
            envoy_logs = await check_recovery(on_small_disk, drained, other)
        assert [query_value(session, "select @number") for session in idle] == list(range(_IDLE_SESSIONS))
    print(
        f"\ndrill disk_full: the disk was full for {full_seconds:.0f} s; {load.statements} statements,"
        f" {len(load.errors)} errors, slowest {load.slowest_seconds:.2f} s; two refused commands took"
        f" {refusal_seconds:.1f} s: {refused[0].stderr.strip()!r}; afterwards Envoy logs"
        f" {'again' if envoy_logs else 'nothing'}"
    )
    assert load.errors == []


async def check_recovery(on_small_disk: FullDiskStack, drained: Tidb, other: Tidb) -> bool:
    """Check that calls, saves, logs and restarts work after space was freed.

    Return whether Envoy writes to its log again. That does not depend on Tidevoy.
    """
    stack, access_log = on_small_disk.stack, on_small_disk.access_log
    log, envoy_log = (on_small_disk.disk.path / name for name in _LOGS)
    freed_at, plan_file = time.time(), on_small_disk.state / "plan.json"
    log_bytes, access_log_bytes = log.stat().st_size, access_log.stat().st_size
    await undrain(stack, drained)
    await drain(stack, other)
    await wait_until(lambda: plan_file.stat().st_mtime > freed_at)
    await wait_until(lambda: log.stat().st_size > log_bytes)
    end_sessions(stack)
    envoy_log_bytes = envoy_log.stat().st_size
    await post_to_envoy(stack, "/runtime_modify?tidevoy.offload=false")  # Envoy logs this.
    await stack.control_plane.restart()
    await wait_for_state(stack, other, "drained")
    await wait_for_state(stack, drained, "active")
    await wait_until(lambda: access_log.stat().st_size > access_log_bytes)
    return envoy_log.stat().st_size > envoy_log_bytes
