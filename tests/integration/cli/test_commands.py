"""`tidevoy` as its users call it, against a real `tidevoy serve`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.control_plane import ControlPlane
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.cli_process import configuration, finish, start, tidevoy


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ControlPlane]:
    async with ControlPlane(tmp_path, configuration(tmp_path, ports, node)) as plane:
        yield plane


async def active(plane: ControlPlane, node: str) -> None:
    async with asyncio.timeout(30):
        while json.loads((await tidevoy(plane.api, "nodes", node, "--json")).out)["state"] != "active":
            pass


async def test_a_day_of_an_operator(plane: ControlPlane, node: str) -> None:
    await active(plane, node)
    shown = await tidevoy(plane.api, "nodes")
    head, row = shown.out.splitlines()
    assert head.split()[:3] == ["ADDRESS", "STATE", "SESSIONS"]
    assert row.split()[:2] == [node, "active"]
    assert "\x1b" not in shown.out

    added = await tidevoy(plane.api, "add", "[fd00::1]:4000", "--weight", "7", "--label", "zone=a")
    assert (added.code, added.out.split()[:2]) == (0, ["[fd00::1]:4000", "added:"])
    again = await tidevoy(plane.api, "add", "[fd00::1]:4000")
    assert (again.code, again.out, again.err.count("\n")) == (1, "", 1)
    assert again.err.startswith("tidevoy: the node [fd00::1]:4000 is there already")

    assert (await tidevoy(plane.api, "weight", "[fd00::1]:4000", "9")).code == 0
    one = json.loads((await tidevoy(plane.api, "nodes", "[fd00::1]:4000", "--json")).out)
    assert (one["weight"], one["labels"]) == (9, {"zone": "a"})

    assert (await tidevoy(plane.api, "drain", node)).code == 0
    drained = json.loads((await tidevoy(plane.api, "nodes", "--json")).out)["nodes"]
    assert {entry["address"]: entry["advice"] for entry in drained}[node] == "DRAINING"
    assert (await tidevoy(plane.api, "undrain", node)).code == 0
    await active(plane, node)

    assert (await tidevoy(plane.api, "remove", "[fd00::1]:4000")).code == 0
    unknown = await tidevoy(plane.api, "drain", "127.0.0.1:1")
    assert (unknown.code, unknown.err.count("\n")) == (1, 1)
    closing = await tidevoy(plane.api, "drain", node, "--on-deadline", "close", "--json")
    assert (closing.code, json.loads(closing.out)["drain"]["on_deadline"]) == (0, "close")


async def test_drain_waits_until_no_session_is_left(
    plane: ControlPlane, node: str, envoy_process: StartEnvoy
) -> None:
    await active(plane, node)
    asked = ("bootstrap", "--config", str(plane.config_file), "--id", "envoy-1", "--admin", "127.0.0.1:0")
    await envoy_process((await tidevoy(plane.api, *asked)).out)
    waited = await tidevoy(plane.api, "drain", node, "--wait", "--deadline", "1m")
    assert waited.code == 0
    assert waited.out.startswith(f"{node} is drained after 0:")
    again = await tidevoy(plane.api, "drain", node, "--wait", "--json")
    assert (again.code, json.loads(again.out.splitlines()[-1])["left"]) == (0, 0)
    refused = await tidevoy(plane.api, "drain", node, "--on-deadline", "close")
    assert refused.code == 1
    assert "takes Tidevoy's module in every Envoy, and it is not in use in envoy-1;" in refused.err


async def test_following_needs_a_control_plane_to_begin_with() -> None:
    outcome = await tidevoy("http://127.0.0.1:1", "events", "--follow")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)


async def test_events_follow_over_a_restart(plane: ControlPlane, node: str) -> None:
    await active(plane, node)
    process = await start(plane.api, "events", "--follow", "--json")
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
    assert (await tidevoy(plane.api, "add", "127.0.0.1:1")).code == 0
    second = await until("node.discovered")
    while second["subject"] != "127.0.0.1:1":
        second = await until("node.discovered")
    assert second["id"] > first["id"]
    process.send_signal(signal.SIGINT)
    outcome = await finish(process)
    assert outcome.code == 0
    assert outcome.err.count("does not answer") <= 1


async def test_events_without_follow_end(plane: ControlPlane, node: str) -> None:
    await active(plane, node)
    shown = await tidevoy(plane.api, "events")
    assert shown.code == 0
    assert f"{node} is active" in shown.out


async def test_configuration_commands(plane: ControlPlane) -> None:
    assert (await tidevoy(plane.api, "config", "check", str(plane.config_file))).code == 0
    shown = await tidevoy(plane.api, "config", "show", "--json")
    assert json.loads(shown.out)["state_dir"] == plane.settings["state_dir"]
    assert (await tidevoy(plane.api, "reload")).out == "nothing has changed\n"
    plane.config_file.write_text("sql: {listen: nowhere}\n")
    bad = await tidevoy(plane.api, "reload")
    assert (bad.code, bad.out) == (2, "")
    assert "sql.listen" in bad.err


async def test_no_envoy_yet(plane: ControlPlane) -> None:
    assert json.loads((await tidevoy(plane.api, "envoys", "--json")).out) == {"envoys": []}
    assert (await tidevoy(plane.api, "envoys")).out.split()[0] == "ID"


async def test_the_url_may_stand_in_front(plane: ControlPlane) -> None:
    assert (await tidevoy("http://127.0.0.1:1", "--url", plane.api, "nodes")).code == 0
    assert (await tidevoy("http://127.0.0.1:1", "nodes", "--url", plane.api)).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serve_ends_cleanly(plane: ControlPlane, number: signal.Signals) -> None:
    following = await start(plane.api, "events", "--follow", "--json")
    assert following.stdout is not None
    async with asyncio.timeout(30):
        await following.stdout.readline()
    plane.process.send(number)
    async with asyncio.timeout(10):
        assert await plane.process.wait() == 0
    assert "Traceback" not in plane.process.output()
    following.send_signal(signal.SIGINT)
    assert (await finish(following)).code == 0


async def test_hangup_reloads(plane: ControlPlane) -> None:
    plane.process.send(signal.SIGHUP)
    async with asyncio.timeout(30):
        while "config.reloaded" not in (await tidevoy(plane.api, "events")).out:
            pass


async def test_hangup_with_a_bad_file_changes_nothing(plane: ControlPlane) -> None:
    before = (await tidevoy(plane.api, "config", "show", "--json")).out
    plane.config_file.write_text("sql: {listen: nowhere}\nlog: {level: loud}\n")
    plane.process.send(signal.SIGHUP)
    async with asyncio.timeout(30):
        while "config.rejected" not in (await tidevoy(plane.api, "events")).out:
            pass
    assert (await tidevoy(plane.api, "config", "show", "--json")).out == before
    assert plane.process.returncode is None
    (line,) = [line for line in plane.process.output().splitlines() if "config.rejected" in line]
    told = json.loads(line)
    assert "the old configuration stays in force" in told["event"]
    assert "sql.listen" in told["event"]
    assert "log.level" in told["event"]
    assert "Traceback" not in plane.process.output()


@pytest.mark.parametrize("key", ["api", "xds"])
async def test_a_port_in_use(plane: ControlPlane, ports: Ports, tmp_path: Path, key: str) -> None:
    other = configuration(tmp_path / "other", ports)
    other[key] = plane.settings[key]
    file = tmp_path / "other.yaml"
    file.write_text(json.dumps(other))
    outcome = await tidevoy(plane.api, "serve", "--config", str(file))
    assert outcome.code == 1
    told = [line for line in outcome.err.splitlines() if line.startswith("tidevoy: ")]
    assert len(told) == 1
    assert f"{key}.listen: cannot listen on {other[key]['listen']}: address already in use" in told[0]


async def test_serve_refuses_to_be_open_to_all(ports: Ports, tmp_path: Path) -> None:
    wanted = configuration(tmp_path, ports) | {"api": {"listen": f"0.0.0.0:{ports.take()}"}}
    file = tmp_path / "open.yaml"
    file.write_text(json.dumps(wanted))
    outcome = await tidevoy("http://127.0.0.1:1", "serve", "--config", str(file))
    assert (outcome.code, outcome.out) == (2, "")
    assert "allow_unauthenticated" in outcome.err
