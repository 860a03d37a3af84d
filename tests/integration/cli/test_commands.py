"""`tidevoy` as its users call it, against a real `tidevoy serve`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.cli_process import (
    minimal_configuration,
    run_tidevoy,
    start_tidevoy,
    wait_for_result,
)


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ControlPlaneProcess]:
    async with ControlPlaneProcess(tmp_path, minimal_configuration(tmp_path, ports, node)) as plane:
        yield plane


async def active(plane: ControlPlaneProcess, node: str) -> None:
    async with asyncio.timeout(30):
        while (
            json.loads((await run_tidevoy(plane.api_url, "nodes", node, "--json")).stdout)["state"]
            != "active"
        ):
            pass


async def test_a_day_of_an_operator(plane: ControlPlaneProcess, node: str) -> None:
    await active(plane, node)
    shown = await run_tidevoy(plane.api_url, "nodes")
    head, row = shown.stdout.splitlines()
    assert head.split()[:3] == ["ADDRESS", "STATE", "SESSIONS"]
    assert row.split()[:2] == [node, "active"]
    assert "\x1b" not in shown.stdout

    added = await run_tidevoy(plane.api_url, "add", "[fd00::1]:4000", "--weight", "7", "--label", "zone=a")
    assert (added.exit_code, added.stdout.split()[:2]) == (0, ["[fd00::1]:4000", "added:"])
    again = await run_tidevoy(plane.api_url, "add", "[fd00::1]:4000")
    assert (again.exit_code, again.stdout, again.stderr.count("\n")) == (1, "", 1)
    assert again.stderr.startswith("tidevoy: the node [fd00::1]:4000 is there already")

    assert (await run_tidevoy(plane.api_url, "weight", "[fd00::1]:4000", "9")).exit_code == 0
    one = json.loads((await run_tidevoy(plane.api_url, "nodes", "[fd00::1]:4000", "--json")).stdout)
    assert (one["weight"], one["labels"]) == (9, {"zone": "a"})

    assert (await run_tidevoy(plane.api_url, "drain", node)).exit_code == 0
    drained = json.loads((await run_tidevoy(plane.api_url, "nodes", "--json")).stdout)["nodes"]
    assert {entry["address"]: entry["advice"] for entry in drained}[node] == "DRAINING"
    assert (await run_tidevoy(plane.api_url, "undrain", node)).exit_code == 0
    await active(plane, node)

    assert (await run_tidevoy(plane.api_url, "remove", "[fd00::1]:4000")).exit_code == 0
    unknown = await run_tidevoy(plane.api_url, "drain", "127.0.0.1:1")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1)
    closing = await run_tidevoy(plane.api_url, "drain", node, "--on-deadline", "close", "--json")
    assert (closing.exit_code, json.loads(closing.stdout)["drain"]["on_deadline"]) == (0, "close")


async def test_drain_waits_until_no_session_is_left(
    plane: ControlPlaneProcess, node: str, envoy_process: StartEnvoy
) -> None:
    await active(plane, node)
    asked = ("bootstrap", "--config", str(plane.config_file), "--id", "envoy-1", "--admin", "127.0.0.1:0")
    await envoy_process((await run_tidevoy(plane.api_url, *asked)).stdout)
    waited = await run_tidevoy(plane.api_url, "drain", node, "--wait", "--deadline", "1m")
    assert waited.exit_code == 0
    assert waited.stdout.startswith(f"{node} is drained after 0:")
    again = await run_tidevoy(plane.api_url, "drain", node, "--wait", "--json")
    assert (again.exit_code, json.loads(again.stdout.splitlines()[-1])["left"]) == (0, 0)
    refused = await run_tidevoy(plane.api_url, "drain", node, "--on-deadline", "close")
    assert refused.exit_code == 1
    assert "takes Tidevoy's module in every Envoy, and it is not in use in envoy-1;" in refused.stderr


async def test_following_needs_a_control_plane_to_begin_with() -> None:
    outcome = await run_tidevoy("http://127.0.0.1:1", "events", "--follow")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)


async def test_events_follow_over_a_restart(plane: ControlPlaneProcess, node: str) -> None:
    await active(plane, node)
    process = await start_tidevoy(plane.api_url, "events", "--follow", "--json")
    assert process.stdout is not None

    async def until(kind: str) -> dict[str, Any]:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while line := await process.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == kind:
                    return event
        raise AssertionError(f"the command ended without {kind}")

    first = await until("node.state")
    await plane.restart()
    assert (await run_tidevoy(plane.api_url, "add", "127.0.0.1:1")).exit_code == 0
    second = await until("node.discovered")
    while second["subject"] != "127.0.0.1:1":
        second = await until("node.discovered")
    assert second["id"] > first["id"]
    process.send_signal(signal.SIGINT)
    outcome = await wait_for_result(process)
    assert outcome.exit_code == 0
    assert outcome.stderr.count("does not answer") <= 1


async def test_events_without_follow_end(plane: ControlPlaneProcess, node: str) -> None:
    await active(plane, node)
    shown = await run_tidevoy(plane.api_url, "events")
    assert shown.exit_code == 0
    assert f"{node} is active" in shown.stdout


async def test_configuration_commands(plane: ControlPlaneProcess) -> None:
    assert (await run_tidevoy(plane.api_url, "config", "check", str(plane.config_file))).exit_code == 0
    shown = await run_tidevoy(plane.api_url, "config", "show", "--json")
    assert json.loads(shown.stdout)["state_dir"] == plane.settings["state_dir"]
    assert (await run_tidevoy(plane.api_url, "reload")).stdout == "nothing has changed\n"
    plane.config_file.write_text("sql: {listen: nowhere}\n")
    bad = await run_tidevoy(plane.api_url, "reload")
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "sql.listen" in bad.stderr


async def test_no_envoy_yet(plane: ControlPlaneProcess) -> None:
    assert json.loads((await run_tidevoy(plane.api_url, "envoys", "--json")).stdout) == {"envoys": []}
    assert (await run_tidevoy(plane.api_url, "envoys")).stdout.split()[0] == "ID"


async def test_the_url_may_stand_in_front(plane: ControlPlaneProcess) -> None:
    assert (await run_tidevoy("http://127.0.0.1:1", "--url", plane.api_url, "nodes")).exit_code == 0
    assert (await run_tidevoy("http://127.0.0.1:1", "nodes", "--url", plane.api_url)).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serve_ends_cleanly(plane: ControlPlaneProcess, number: signal.Signals) -> None:
    following = await start_tidevoy(plane.api_url, "events", "--follow", "--json")
    assert following.stdout is not None
    async with asyncio.timeout(30):
        await following.stdout.readline()
    plane.process.send_signal(number)
    async with asyncio.timeout(10):
        assert await plane.process.wait() == 0
    assert "Traceback" not in plane.process.output()
    following.send_signal(signal.SIGINT)
    assert (await wait_for_result(following)).exit_code == 0


async def test_hangup_reloads(plane: ControlPlaneProcess) -> None:
    plane.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(30):
        while "config.reloaded" not in (await run_tidevoy(plane.api_url, "events")).stdout:
            pass


async def test_hangup_with_a_bad_file_changes_nothing(plane: ControlPlaneProcess) -> None:
    before = (await run_tidevoy(plane.api_url, "config", "show", "--json")).stdout
    plane.config_file.write_text("sql: {listen: nowhere}\nlog: {level: loud}\n")
    plane.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(30):
        while "config.rejected" not in (await run_tidevoy(plane.api_url, "events")).stdout:
            pass
    assert (await run_tidevoy(plane.api_url, "config", "show", "--json")).stdout == before
    assert plane.process.returncode is None
    (line,) = [line for line in plane.process.output().splitlines() if "config.rejected" in line]
    told = json.loads(line)
    assert "the old configuration stays in force" in told["event"]
    assert "sql.listen" in told["event"]
    assert "log.level" in told["event"]
    assert "Traceback" not in plane.process.output()


@pytest.mark.parametrize("key", ["api", "xds"])
async def test_a_port_in_use(plane: ControlPlaneProcess, ports: Ports, tmp_path: Path, key: str) -> None:
    other = minimal_configuration(tmp_path / "other", ports)
    other[key] = plane.settings[key]
    file = tmp_path / "other.yaml"
    file.write_text(json.dumps(other))
    outcome = await run_tidevoy(plane.api_url, "serve", "--config", str(file))
    assert outcome.exit_code == 1
    told = [line for line in outcome.stderr.splitlines() if line.startswith("tidevoy: ")]
    assert len(told) == 1
    assert f"{key}.listen: cannot listen on {other[key]['listen']}: address already in use" in told[0]


async def test_serve_refuses_to_be_open_to_all(ports: Ports, tmp_path: Path) -> None:
    wanted = minimal_configuration(tmp_path, ports) | {"api": {"listen": f"0.0.0.0:{ports.allocate()}"}}
    file = tmp_path / "open.yaml"
    file.write_text(json.dumps(wanted))
    outcome = await run_tidevoy("http://127.0.0.1:1", "serve", "--config", str(file))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "allow_unauthenticated" in outcome.stderr
