"""The `tidevoy` command against a real `tidevoy serve`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.conftest import StartEnvoy
from tests.support.controlplane.cli_process import (
    minimal_configuration,
    run_tidevoy,
    start_tidevoy,
    wait_for_node_state,
    wait_for_result,
)
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts
from tests.support.waiting import wait_until


@pytest.fixture
async def control_plane(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ControlPlaneProcess]:
    async with ControlPlaneProcess(tmp_path, minimal_configuration(tmp_path, ports, node)) as control_plane:
        yield control_plane


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_control_plane(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ControlPlaneProcess]:
    """Yield a control plane for tests that change nothing in it."""
    directory = tmp_path_factory.mktemp("shared")
    with Ports() as ports:
        async with (
            run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as node,
            ControlPlaneProcess(
                directory, minimal_configuration(directory, ports, node.endpoint)
            ) as control_plane,
        ):
            yield control_plane


in_module = pytest.mark.asyncio(loop_scope="module")


async def wait_for_event(control_plane: ControlPlaneProcess, kind: str) -> None:
    async with http_client(control_plane.api_url) as api:

        async def has_event() -> bool:
            return kind in (await api.get("/v1/events?follow=false", headers={"last-event-id": "0"})).text

        await wait_until(has_event, 30)


async def test_operator_commands_change_nodes(control_plane: ControlPlaneProcess, node: str) -> None:
    await wait_for_node_state(control_plane.api_url, node, "active")
    listing = await run_tidevoy(control_plane.api_url, "nodes")
    header, row = listing.stdout.splitlines()
    assert header.split()[:3] == ["ADDRESS", "STATE", "SESSIONS"]
    assert row.split()[:2] == [node, "active"]
    assert "\x1b" not in listing.stdout

    added = await run_tidevoy(
        control_plane.api_url, "add", "[fd00::1]:4000", "--weight", "7", "--label", "zone=a"
    )
    assert (added.exit_code, added.stdout.split()[:2]) == (0, ["[fd00::1]:4000", "added:"])
    repeated = await run_tidevoy(control_plane.api_url, "add", "[fd00::1]:4000")
    assert (repeated.exit_code, repeated.stdout, repeated.stderr.count("\n")) == (1, "", 1)
    assert repeated.stderr.startswith("tidevoy: the node [fd00::1]:4000 exists already")

    assert (await run_tidevoy(control_plane.api_url, "weight", "[fd00::1]:4000", "9")).exit_code == 0
    added_node = json.loads(
        (await run_tidevoy(control_plane.api_url, "nodes", "[fd00::1]:4000", "--json")).stdout
    )
    assert (added_node["weight"], added_node["labels"]) == (9, {"zone": "a"})

    assert (await run_tidevoy(control_plane.api_url, "drain", node)).exit_code == 0
    drained = json.loads((await run_tidevoy(control_plane.api_url, "nodes", "--json")).stdout)["nodes"]
    assert {entry["address"]: entry["eds_health"] for entry in drained}[node] == "DRAINING"
    assert (await run_tidevoy(control_plane.api_url, "undrain", node)).exit_code == 0
    await wait_for_node_state(control_plane.api_url, node, "active")

    assert (await run_tidevoy(control_plane.api_url, "remove", "[fd00::1]:4000")).exit_code == 0
    unknown = await run_tidevoy(control_plane.api_url, "drain", "127.0.0.1:1")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1)
    closing = await run_tidevoy(control_plane.api_url, "drain", node, "--on-deadline", "close", "--json")
    assert (closing.exit_code, json.loads(closing.stdout)["drain"]["on_deadline"]) == (0, "close")


async def test_drain_wait_returns_without_sessions(
    control_plane: ControlPlaneProcess, node: str, envoy_process: StartEnvoy
) -> None:
    await wait_for_node_state(control_plane.api_url, node, "active")
    bootstrap = ("bootstrap", "--config", str(control_plane.config_file))
    options = ("--id", "envoy-1", "--admin", "127.0.0.1:0")
    await envoy_process((await run_tidevoy(control_plane.api_url, *bootstrap, *options)).stdout)
    drained = await run_tidevoy(control_plane.api_url, "drain", node, "--wait", "--deadline", "1m")
    assert drained.exit_code == 0
    assert drained.stdout.startswith(f"{node} is drained after 0:")
    repeated = await run_tidevoy(control_plane.api_url, "drain", node, "--wait", "--json")
    assert (repeated.exit_code, json.loads(repeated.stdout.splitlines()[-1])["left"]) == (0, 0)
    rejected = await run_tidevoy(control_plane.api_url, "drain", node, "--on-deadline", "close")
    assert rejected.exit_code == 1
    assert "and these Envoys do not use it: envoy-1;" in rejected.stderr


async def test_events_follow_fails_without_a_control_plane() -> None:
    outcome = await run_tidevoy("http://127.0.0.1:1", "events", "--follow")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)


async def test_events_follow_survives_a_restart(control_plane: ControlPlaneProcess, node: str) -> None:
    await wait_for_node_state(control_plane.api_url, node, "active")
    process = await start_tidevoy(control_plane.api_url, "events", "--follow", "--json")
    assert process.stdout is not None

    async def next_event(kind: str) -> dict[str, Any]:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while line := await process.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == kind:
                    return event
        raise AssertionError(f"the command ended before event {kind}")

    first = await next_event("node.state")
    await control_plane.restart()
    assert (await run_tidevoy(control_plane.api_url, "add", "127.0.0.1:1")).exit_code == 0
    second = await next_event("node.discovered")
    while second["subject"] != "127.0.0.1:1":
        second = await next_event("node.discovered")
    assert second["id"] > first["id"]
    process.send_signal(signal.SIGINT)
    outcome = await wait_for_result(process)
    assert outcome.exit_code == 0
    assert outcome.stderr.count("does not answer") <= 1


@in_module
async def test_events_without_follow_returns(shared_control_plane: ControlPlaneProcess) -> None:
    node = shared_control_plane.settings["nodes"][0]["address"]
    await wait_for_node_state(shared_control_plane.api_url, node, "active")
    events = await run_tidevoy(shared_control_plane.api_url, "events")
    assert events.exit_code == 0
    assert f"{node} is active" in events.stdout


async def test_config_commands_check_show_and_reload(control_plane: ControlPlaneProcess) -> None:
    assert (
        await run_tidevoy(control_plane.api_url, "config", "check", str(control_plane.config_file))
    ).exit_code == 0
    config = await run_tidevoy(control_plane.api_url, "config", "show", "--json")
    assert json.loads(config.stdout)["state_dir"] == control_plane.settings["state_dir"]
    assert (await run_tidevoy(control_plane.api_url, "reload")).stdout == "nothing has changed\n"
    sql = {**control_plane.settings.get("sql", {}), "max_connections": 7}
    control_plane.settings = {**control_plane.settings, "sql": sql, "log": {"level": "debug"}}
    await control_plane.prepare()
    check = ("config", "check", str(control_plane.config_file), "--diff")
    diff = await run_tidevoy(control_plane.api_url, *check)
    lines = [line.strip() for line in diff.stdout.splitlines()]
    assert lines[1:3] == ["a reload would change:", "applied now: log.level"]
    assert lines[3].startswith("applied now; ")
    assert lines[3].endswith(": sql.max_connections")
    diff = await run_tidevoy(control_plane.api_url, *check, "--json")
    assert json.loads(diff.stdout)["applied_by_module"] == ["sql.max_connections"]
    control_plane.config_file.write_text("sql: {listen: nowhere}\n")
    rejected = await run_tidevoy(control_plane.api_url, "reload")
    assert (rejected.exit_code, rejected.stdout) == (2, "")
    assert "sql.listen" in rejected.stderr


@in_module
async def test_envoys_prints_an_empty_list(shared_control_plane: ControlPlaneProcess) -> None:
    url = shared_control_plane.api_url
    assert json.loads((await run_tidevoy(url, "envoys", "--json")).stdout) == {"envoys": []}
    assert (await run_tidevoy(url, "envoys")).stdout.split()[0] == "ID"


@in_module
async def test_url_option_works_before_and_after_the_command(
    shared_control_plane: ControlPlaneProcess,
) -> None:
    url = shared_control_plane.api_url
    assert (await run_tidevoy("http://127.0.0.1:1", "--url", url, "nodes")).exit_code == 0
    assert (await run_tidevoy("http://127.0.0.1:1", "nodes", "--url", url)).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serve_stops_cleanly_on_a_signal(
    control_plane: ControlPlaneProcess, number: signal.Signals
) -> None:
    follower = await start_tidevoy(control_plane.api_url, "events", "--follow", "--json")
    assert follower.stdout is not None
    async with asyncio.timeout(30):
        await follower.stdout.readline()
    control_plane.process.send_signal(number)
    async with asyncio.timeout(10):
        assert await control_plane.process.wait() == 0
    assert "Traceback" not in control_plane.process.output()
    follower.send_signal(signal.SIGINT)
    assert (await wait_for_result(follower)).exit_code == 0


async def test_sighup_reloads_the_configuration(control_plane: ControlPlaneProcess) -> None:
    control_plane.process.send_signal(signal.SIGHUP)
    await wait_for_event(control_plane, "config.reloaded")


async def test_sighup_with_an_invalid_file_changes_nothing(control_plane: ControlPlaneProcess) -> None:
    before = (await run_tidevoy(control_plane.api_url, "config", "show", "--json")).stdout
    control_plane.config_file.write_text("sql: {listen: nowhere}\nlog: {level: loud}\n")
    control_plane.process.send_signal(signal.SIGHUP)
    await wait_for_event(control_plane, "config.rejected")
    assert (await run_tidevoy(control_plane.api_url, "config", "show", "--json")).stdout == before
    assert control_plane.process.returncode is None
    (line,) = [line for line in control_plane.process.output().splitlines() if "config.rejected" in line]
    entry = json.loads(line)
    assert "the old configuration stays in force" in entry["event"]
    assert "sql.listen" in entry["event"]
    assert "log.level" in entry["event"]
    assert "Traceback" not in control_plane.process.output()


@in_module
@pytest.mark.parametrize("key", ["api", "xds"])
async def test_serve_reports_a_port_in_use(
    shared_control_plane: ControlPlaneProcess, ports: Ports, tmp_path: Path, key: str
) -> None:
    other = minimal_configuration(tmp_path / "other", ports)
    other[key] = shared_control_plane.settings[key]
    file = tmp_path / "other.yaml"
    file.write_text(json.dumps(other))
    outcome = await run_tidevoy(shared_control_plane.api_url, "serve", "--config", str(file))
    assert outcome.exit_code == 1
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("tidevoy: ")]
    assert len(errors) == 1
    assert f"{key}.listen: cannot listen on {other[key]['listen']}: address already in use" in errors[0]


async def test_serve_rejects_unauthenticated_public_access(ports: Ports, tmp_path: Path) -> None:
    settings = minimal_configuration(tmp_path, ports) | {"api": {"listen": f"0.0.0.0:{ports.allocate()}"}}
    file = tmp_path / "open.yaml"
    file.write_text(json.dumps(settings))
    outcome = await run_tidevoy("http://127.0.0.1:1", "serve", "--config", str(file))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "allow_unauthenticated" in outcome.stderr
