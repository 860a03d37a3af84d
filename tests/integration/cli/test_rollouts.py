"""`tidevoy rollout` as its users call it, against a real `tidevoy serve` and a real etcd."""

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
from tests.support.controlplane.cli_process import (
    TIDEVOY,
    CliResult,
    minimal_configuration,
    run_tidevoy,
    start_tidevoy,
    wait_for_result,
)
from tests.support.controlplane.registered_nodes import SQL_CHECKS_ONLY, RegisteredNode, registered_node
from tests.support.waiting import wait_until

HURRY = ("--drain-deadline", "1s", "--healthy-for", "0s", "--return-deadline", "20s")


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
        async with ControlPlaneProcess(directory, settings) as plane:
            yield plane


@pytest_asyncio.fixture(loop_scope="module")
async def plane(
    running: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> AsyncIterator[ControlPlaneProcess]:
    """All nodes are in service, and no rollout goes on; at the end those of the test are ended."""
    for node in nodes:
        await is_in_state(running, node, "active")
    yield running
    for rollout in await rollouts(running):
        if rollout["phase"] not in ("done", "aborted"):
            assert (await run_tidevoy(running.api_url, "rollout", "abort", rollout["id"])).exit_code == 0


async def rollouts(plane: ControlPlaneProcess) -> list[dict[str, Any]]:
    """All, the newest first."""
    shown = await run_tidevoy(plane.api_url, "rollout", "status", "--json")
    listed: list[dict[str, Any]] = json.loads(shown.stdout)["rollouts"]
    return listed


async def is_in_state(plane: ControlPlaneProcess, node: RegisteredNode, state: str) -> None:
    async def looked() -> bool:
        shown = await run_tidevoy(plane.api_url, "nodes", node.address, "--json")
        return shown.exit_code == 0 and bool(json.loads(shown.stdout)["state"] == state)

    await wait_until(looked)


@asynccontextmanager
async def watching(plane: ControlPlaneProcess, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that goes on beside the block, and is killed at its end if it has not ended."""
    process = await start_tidevoy(plane.api_url, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def newest(plane: ControlPlaneProcess) -> str:
    """The id of the rollout that goes on, once there is one."""
    names: list[str] = []

    async def looked() -> bool:
        names.extend(one["id"] for one in await rollouts(plane) if one["phase"] == "running")
        return bool(names)

    await wait_until(looked)
    return names[0]


async def begun(plane: ControlPlaneProcess, *arguments: str) -> str:
    """Start a rollout without waiting; its id."""
    shown = await run_tidevoy(plane.api_url, "rollout", "start", *HURRY, *arguments, "--json")
    assert shown.exit_code == 0, shown
    name: str = json.loads(shown.stdout)["id"]
    return name


async def status(plane: ControlPlaneProcess, name: str) -> dict[str, Any]:
    shown = await run_tidevoy(plane.api_url, "rollout", "status", name, "--json")
    assert shown.exit_code == 0, shown
    answer: dict[str, Any] = json.loads(shown.stdout)
    return answer


async def waits_for_restart(plane: ControlPlaneProcess, name: str, node: RegisteredNode) -> None:
    """Returns when the rollout has drained the node, and somebody is to restart it."""

    async def looked() -> bool:
        stages = {step["address"]: step["stage"] for step in (await status(plane, name))["steps"]}
        return bool(stages[node.address] == "returning")

    await wait_until(looked)


async def written_until(watched: asyncio.subprocess.Process, line: str) -> str:
    """What a command has written to its standard error, up to the first line that begins so."""
    assert watched.stderr is not None
    lines = [""]
    async with asyncio.timeout(30):
        while not lines[-1].startswith(line):
            lines.append((await watched.stderr.readline()).decode())
            assert lines[-1], f"the command ended before {line!r}: {lines}"
    return "".join(lines)


async def test_a_rollout_is_watched_to_its_end(
    plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    node = nodes[0]
    asked = ("rollout", "start", "--nodes", node.address, "--version", "v8.5.4", "--wait", *HURRY)
    async with watching(plane, *asked) as watched:
        name = await newest(plane)
        shown = await written_until(watched, f"tidevoy: {node.address} returning")
        await node.restart("v8.5.4")
        outcome = await wait_for_result(watched)
    assert outcome.exit_code == 0, outcome
    assert "\x1b" not in outcome.stdout + shown + outcome.stderr
    head, row, last = outcome.stdout.splitlines()
    assert head.split()[:3] == ["ADDRESS", "STAGE", "DURATION"]
    assert row.startswith(f"{node.address}  done ")
    assert "v8.5.3 -> v8.5.4" in row
    assert last.startswith(f"rollout {name} (manual to v8.5.4, {node.address}, by anonymous) is done")
    listed = (await run_tidevoy(plane.api_url, "rollout", "status")).stdout.splitlines()
    assert listed[1].split()[:5] == [name, "done", "1/1", "0", "manual"]


async def test_an_interrupt_leaves_the_rollout_alone(
    plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    name = await begun(plane, "--nodes", nodes[0].address)
    async with watching(plane, "rollout", "status", name, "--follow") as watched:
        assert watched.stderr is not None
        async with asyncio.timeout(30):
            await watched.stderr.readline()
        watched.send_signal(signal.SIGINT)
        outcome = await wait_for_result(watched)
    assert outcome.exit_code == 1
    assert f"the rollout {name} goes on: `tidevoy rollout status {name} --follow` shows it" in outcome.stderr
    assert (await status(plane, name))["phase"] == "running"


async def test_a_failure_ends_the_watching_and_says_how_to_go_on(
    plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    asked = ("rollout", "start", "--nodes", nodes[0].address, "--action", "fail", "--wait", *HURRY)
    outcome = await run_tidevoy(plane.api_url, *asked)
    assert outcome.exit_code == 1, outcome
    last = outcome.stderr.splitlines()[-1]
    assert "is paused: " in last
    assert "no disk" in last
    assert "tidevoy rollout resume" in last
    assert f"{nodes[0].address}  failed" in outcome.stdout


async def test_pause_resume_abort(plane: ControlPlaneProcess, nodes: list[RegisteredNode]) -> None:
    name = await begun(plane, "--nodes", f"{nodes[1].address},{nodes[0].address}")
    await waits_for_restart(plane, name, nodes[1])
    for command, phase in (("pause", "paused"), ("resume", "running")):
        told = await run_tidevoy(plane.api_url, "rollout", command, name)
        assert told.exit_code == 0, told
        assert f"rollout {name} " in told.stdout
        assert f" is {phase}" in told.stdout
    assert (await run_tidevoy(plane.api_url, "rollout", "abort", name)).exit_code == 0
    ended = await run_tidevoy(plane.api_url, "rollout", "status", name, "--follow", "--json")
    assert ended.exit_code == 1
    assert "was aborted" in ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert (last["id"], last["phase"], last["of"]) == (name, "aborted", 2)
    await is_in_state(plane, nodes[1], "active")
    again = await run_tidevoy(plane.api_url, "rollout", "resume", name)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "it is aborted" in again.stderr


async def test_a_dry_run_prints_the_plan_and_what_is_against_it(
    plane: ControlPlaneProcess, nodes: list[RegisteredNode]
) -> None:
    asked = ("rollout", "start", "--dry-run", "--nodes")
    shown = await run_tidevoy(plane.api_url, *asked, nodes[0].address)
    assert shown.exit_code == 0, shown
    assert shown.stdout.splitlines()[0] == f"1 node, 1 at a time: {nodes[0].address}"
    before = await rollouts(plane)
    bad = await run_tidevoy(plane.api_url, *asked, "all", "--max-unavailable", "3")
    assert bad.exit_code == 1
    assert "tidevoy: it would be refused: " in bad.stderr
    refused = await run_tidevoy(plane.api_url, "rollout", "start", "--nodes", "all", "--max-unavailable", "3")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert await rollouts(plane) == before


WRONG: list[tuple[str, ...]] = [
    ("start",),
    ("start", "--nodes", "nothing"),
    ("start", "--nodes", "all", "--drain-deadline", "soon"),
    ("start", "--nodes", "all", "--max-unavailable", "0"),
    ("status", "--follow"),
    ("pause",),
]


async def test_wrong_usage(plane: ControlPlaneProcess) -> None:
    for arguments in WRONG:
        outcome = await run_tidevoy(plane.api_url, "rollout", *arguments)
        assert (outcome.exit_code, outcome.stdout) == (2, ""), outcome


async def test_an_unknown_rollout(plane: ControlPlaneProcess) -> None:
    for command in ("status", "pause", "resume", "abort"):
        outcome = await run_tidevoy(plane.api_url, "rollout", command, "none")
        assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
        assert "no rollout has the id none" in outcome.stderr


@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}], ids=["colours", "NO_COLOR"])
async def test_on_a_terminal_it_waits_and_shows_a_bar(
    plane: ControlPlaneProcess, nodes: list[RegisteredNode], environ: dict[str, str]
) -> None:
    node = nodes[0]
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    written = bytearray()
    process = await asyncio.create_subprocess_exec(
        *(TIDEVOY, "--url", plane.api_url, "rollout", "start", "--nodes", node.address, *HURRY),
        env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "200", **environ},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)

    def take() -> None:
        try:
            written.extend(os.read(ours, 65_536))
        except OSError:  # the other side is closed
            loop.remove_reader(ours)

    loop = asyncio.get_running_loop()
    loop.add_reader(ours, take)
    try:
        await wait_until(lambda: f"{node.address} returning".encode() in written)
        await node.restart()
        async with asyncio.timeout(30):
            code = await process.wait()
        await wait_until(lambda: b" is done" in written)
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
    outcome = CliResult(code, written.decode(errors="replace"), "")
    assert outcome.exit_code == 0, outcome
    assert "0/1" in outcome.stdout  # the bar
    assert ("\x1b[32m" in outcome.stdout) is not bool(environ)  # green, of a state
