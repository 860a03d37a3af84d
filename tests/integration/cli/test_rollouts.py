"""`tidevoy rollout` against a real `tidevoy serve` and a real etcd."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.support.controlplane.cli_process import (
    TIDEVOY,
    CliResult,
    minimal_configuration,
    run_tidevoy,
    start_tidevoy,
    wait_for_node_state,
    wait_for_result,
)
from tests.support.controlplane.registered_nodes import SQL_CHECKS_ONLY, RegisteredNode, registered_node
from tests.support.waiting import wait_until

SHORT_TIMES = ("--drain-deadline", "1s", "--healthy-for", "0s", "--return-deadline", "20s")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    async with Etcd.start(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(etcd: Etcd) -> AsyncIterator[list[RegisteredNode]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(registered_node(etcd, f"zone-{index}")) for index in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, nodes: list[RegisteredNode]
) -> AsyncIterator[ControlPlaneProcess]:
    directory = tmp_path_factory.mktemp("plane")
    with Ports() as ports:
        settings = minimal_configuration(directory, ports) | {
            "pd": {"urls": [etcd.url]},
            "health": SQL_CHECKS_ONLY,
            "balance": {"slow_start": 0},
            "rollouts": {"actions": {"fail": {"command": ["/bin/sh", "-c", "echo no disk; exit 3"]}}},
        }
        async with ControlPlaneProcess(directory, settings) as control_plane:
            yield control_plane


@pytest_asyncio.fixture(loop_scope="module")
async def control_plane(
    running: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> AsyncIterator[ControlPlaneProcess]:
    """Yield a control plane with active nodes and no active rollout. After the test, abort its rollouts."""
    for node in nodes:
        await wait_for_node_state(running.api_url, node.address, "active")
    yield running
    async with http_client(running.api_url) as api:
        for rollout in (await api.get("/v1/rollouts")).json()["rollouts"]:
            if rollout["phase"] not in ("done", "aborted"):
                (await api.post(f"/v1/rollouts/{rollout['id']}/abort")).raise_for_status()


async def list_rollouts(control_plane: ControlPlaneProcess) -> list[dict[str, Any]]:
    """Return all rollouts, newest first."""
    result = await run_tidevoy(control_plane.api_url, "rollout", "status", "--json")
    rollouts: list[dict[str, Any]] = json.loads(result.stdout)["rollouts"]
    return rollouts


@asynccontextmanager
async def running_command(
    control_plane: ControlPlaneProcess, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command during the block, and kill it at the end if it still runs."""
    process = await start_tidevoy(control_plane.api_url, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def wait_for_running_rollout(control_plane: ControlPlaneProcess) -> str:
    """Wait for a running rollout and return its id."""
    ids: list[str] = []
    async with http_client(control_plane.api_url) as api:

        async def is_running() -> bool:
            rollouts = (await api.get("/v1/rollouts")).json()["rollouts"]
            ids.extend(rollout["id"] for rollout in rollouts if rollout["phase"] == "running")
            return bool(ids)

        await wait_until(is_running)
    return ids[0]


async def start_rollout(control_plane: ControlPlaneProcess, *arguments: str) -> str:
    """Start a rollout without waiting, and return its id."""
    result = await run_tidevoy(control_plane.api_url, "rollout", "start", *SHORT_TIMES, *arguments, "--json")
    assert result.exit_code == 0, result
    name: str = json.loads(result.stdout)["id"]
    return name


async def get_rollout(control_plane: ControlPlaneProcess, name: str) -> dict[str, Any]:
    result = await run_tidevoy(control_plane.api_url, "rollout", "status", name, "--json")
    assert result.exit_code == 0, result
    rollout: dict[str, Any] = json.loads(result.stdout)
    return rollout


async def wait_until_returning(control_plane: ControlPlaneProcess, name: str, node: RegisteredNode) -> None:
    """Wait until the rollout has drained the node and waits for the node's restart."""
    async with http_client(control_plane.api_url) as api:

        async def is_returning() -> bool:
            rollout = (await api.get(f"/v1/rollouts/{name}")).json()
            stages = {step["address"]: step["stage"] for step in rollout["steps"]}
            return bool(stages[node.address] == "returning")

        await wait_until(is_returning)


async def read_stderr_until(command: asyncio.subprocess.Process, line: str) -> str:
    """Return a command's standard error up to the first line that starts with `line`."""
    assert command.stderr is not None
    lines = [""]
    async with asyncio.timeout(30):
        while not lines[-1].startswith(line):
            lines.append((await command.stderr.readline()).decode())
            assert lines[-1], f"the command ended before {line!r}: {lines}"
    return "".join(lines)


async def test_start_wait_shows_progress_and_a_report(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    node = nodes[0]
    arguments = ("rollout", "start", "--nodes", node.address, "--version", "v8.5.4", "--wait", *SHORT_TIMES)
    async with running_command(control_plane, *arguments) as command:
        name = await wait_for_running_rollout(control_plane)
        progress = await read_stderr_until(command, f"tidevoy: {node.address} returning")
        await node.restart("v8.5.4")
        outcome = await wait_for_result(command)
    assert outcome.exit_code == 0, outcome
    assert "\x1b" not in outcome.stdout + progress + outcome.stderr
    header, row, last = outcome.stdout.splitlines()
    assert header.split()[:3] == ["ADDRESS", "STAGE", "DURATION"]
    assert row.startswith(f"{node.address}  done ")
    assert "v8.5.3 -> v8.5.4" in row
    assert last.startswith(f"rollout {name} (manual to v8.5.4, {node.address}, by anonymous) is done")
    lines = (await run_tidevoy(control_plane.api_url, "rollout", "status")).stdout.splitlines()
    assert lines[1].split()[:5] == [name, "done", "1/1", "0", "manual"]


async def test_ctrl_c_does_not_stop_the_rollout(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    name = await start_rollout(control_plane, "--nodes", nodes[0].address)
    async with running_command(control_plane, "rollout", "status", name, "--follow") as command:
        assert command.stderr is not None
        async with asyncio.timeout(30):
            await command.stderr.readline()
        command.send_signal(signal.SIGINT)
        outcome = await wait_for_result(command)
    assert outcome.exit_code == 1
    expected = f"the rollout {name} continues: `tidevoy rollout status {name} --follow` shows it"
    assert expected in outcome.stderr
    assert (await get_rollout(control_plane, name))["phase"] == "running"


async def test_failed_node_ends_the_wait_with_advice(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    arguments = ("rollout", "start", "--nodes", nodes[0].address, "--action", "fail", "--wait", *SHORT_TIMES)
    outcome = await run_tidevoy(control_plane.api_url, *arguments)
    assert outcome.exit_code == 1, outcome
    last = outcome.stderr.splitlines()[-1]
    assert "is paused: " in last
    assert "no disk" in last
    assert "tidevoy rollout resume" in last
    assert f"{nodes[0].address}  failed" in outcome.stdout


async def test_pause_resume_and_abort_change_the_phase(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    name = await start_rollout(control_plane, "--nodes", f"{nodes[1].address},{nodes[0].address}")
    await wait_until_returning(control_plane, name, nodes[1])
    for command, phase in (("pause", "paused"), ("resume", "running")):
        result = await run_tidevoy(control_plane.api_url, "rollout", command, name)
        assert result.exit_code == 0, result
        assert f"rollout {name} " in result.stdout
        assert f" is {phase}" in result.stdout
    assert (await run_tidevoy(control_plane.api_url, "rollout", "abort", name)).exit_code == 0
    aborted = await run_tidevoy(control_plane.api_url, "rollout", "status", name, "--follow", "--json")
    assert aborted.exit_code == 1
    assert "was aborted" in aborted.stderr
    last = json.loads(aborted.stdout.splitlines()[-1])
    assert (last["id"], last["phase"], last["of"]) == (name, "aborted", 2)
    await wait_for_node_state(control_plane.api_url, nodes[1].address, "active")
    resumed = await run_tidevoy(control_plane.api_url, "rollout", "resume", name)
    assert (resumed.exit_code, resumed.stdout) == (1, "")
    assert "it is aborted" in resumed.stderr


async def test_dry_run_prints_the_plan_and_its_problems(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    dry_run = ("rollout", "start", "--dry-run", "--nodes")
    allowed = await run_tidevoy(control_plane.api_url, *dry_run, nodes[0].address)
    assert allowed.exit_code == 0, allowed
    assert allowed.stdout.splitlines()[0] == f"1 node, 1 at a time: {nodes[0].address}"
    before = await list_rollouts(control_plane)
    too_many = ("all", "--max-unavailable", "3")
    impossible = await run_tidevoy(control_plane.api_url, *dry_run, *too_many)
    assert impossible.exit_code == 1
    assert "tidevoy: the rollout would be rejected: " in impossible.stderr
    rejected = await run_tidevoy(control_plane.api_url, "rollout", "start", "--nodes", *too_many)
    assert (rejected.exit_code, rejected.stdout) == (1, "")
    assert await list_rollouts(control_plane) == before


WRONG_USAGES: list[tuple[str, ...]] = [
    ("start",),
    ("start", "--nodes", "nothing"),
    ("start", "--nodes", "all", "--drain-deadline", "soon"),
    ("start", "--nodes", "all", "--max-unavailable", "0"),
    ("status", "--follow"),
    ("pause",),
]


async def test_wrong_usage_exits_with_2(control_plane: ControlPlaneProcess) -> None:
    for arguments in WRONG_USAGES:
        outcome = await run_tidevoy(control_plane.api_url, "rollout", *arguments)
        assert (outcome.exit_code, outcome.stdout) == (2, ""), outcome


async def test_unknown_rollout_is_reported(control_plane: ControlPlaneProcess) -> None:
    for command in ("status", "pause", "resume", "abort"):
        outcome = await run_tidevoy(control_plane.api_url, "rollout", command, "none")
        assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
        assert "no rollout has the id none" in outcome.stderr


@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}], ids=["colors", "NO_COLOR"])
async def test_start_on_a_terminal_waits_with_a_progress_bar(
    control_plane: ControlPlaneProcess, nodes: list[RegisteredNode], environ: dict[str, str]
) -> None:
    node = nodes[0]
    terminal, child_terminal = pty.openpty()
    os.set_blocking(terminal, False)
    written = bytearray()
    process = await asyncio.create_subprocess_exec(
        *(TIDEVOY, "--url", control_plane.api_url, "rollout", "start", "--nodes", node.address, *SHORT_TIMES),
        env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "200", **environ},
        stdin=child_terminal,
        stdout=child_terminal,
        stderr=child_terminal,
    )
    os.close(child_terminal)

    def read_terminal() -> None:
        try:
            written.extend(os.read(terminal, 65_536))
        except OSError:  # the other side is closed
            loop.remove_reader(terminal)

    loop = asyncio.get_running_loop()
    loop.add_reader(terminal, read_terminal)
    try:
        await wait_until(lambda: f"{node.address} returning".encode() in written)
        await node.restart()
        async with asyncio.timeout(30):
            code = await process.wait()
        await wait_until(lambda: b" is done" in written)
    finally:
        loop.remove_reader(terminal)
        os.close(terminal)
        if process.returncode is None:
            process.kill()
            await process.wait()
    outcome = CliResult(code, written.decode(errors="replace"), "")
    assert outcome.exit_code == 0, outcome
    assert "0/1" in outcome.stdout  # the bar
    assert ("\x1b[32m" in outcome.stdout) is not bool(environ)  # the color green of a state
