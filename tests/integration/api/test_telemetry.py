"""What a module's telemetry looks like over HTTP, from a stream that a test sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.main import run
from controlplane import address as addresses
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.telemetry_messages import (
    MetricsStream,
    all_families,
    metric_family,
    module_info_family,
    open_metrics_stream,
    sessions_family,
)
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts

TRAFFIC = {
    *("sessions_by_state", "pinned", "logins", "login_failures", "connect_failures", "commands", "latency"),
    *("bytes", "errors", "migrations"),
}


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [node])) as plane:
        await plane.wait_for_state(node, "active")
        yield plane


def xds_port(plane: ApiServer) -> int:
    return addresses.split(plane.next_settings.xds.listen)[1]


async def envoys(plane: ApiServer, count: int = 1) -> list[dict[str, Any]]:
    """The fleet, once there are so many."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(15):
        while len(found) != count:
            found = (await plane.http.get("/v1/envoys")).json()["envoys"]
    return found


async def logged_in(plane: ApiServer, node: str, count: int) -> dict[str, Any]:
    """The node, once so many logins are shown."""
    async with asyncio.timeout(15):
        while (shown := await plane.node(node))["logins"] != count:
            pass
    return shown


async def refused(plane: ApiServer, extension: str) -> dict[str, Any]:
    """The refusal of the one Envoy, once it is of that extension."""
    async with asyncio.timeout(15):
        while not (refusal := (await envoys(plane))[0]["refusal"]) or refusal["extension"] != extension:
            pass
    shown: dict[str, Any] = refusal
    return shown


async def test_before_a_module_tells_anything_all_is_null(plane: ApiServer, node: str) -> None:
    shown = await plane.node(node)
    assert {name: shown[name] for name in TRAFFIC} == dict.fromkeys(TRAFFIC)
    assert next(iter(shown)) == "address"
    async with FakeEnvoy(xds_port(plane)):
        (envoy,) = await envoys(plane)
    assert {name: envoy[name] for name in TRAFFIC} == dict.fromkeys(TRAFFIC)
    assert envoy["refusal"] is None
    assert next(iter(envoy)) == "id"


async def test_a_node_shows_the_sum_over_envoys_and_each_envoy_its_own(plane: ApiServer, node: str) -> None:
    port = xds_port(plane)
    async with FakeEnvoy(port, "one"), FakeEnvoy(port, "two"), open_metrics_stream(port) as one:
        await one.send(*all_families(node), envoy="one")
        async with open_metrics_stream(port) as two:
            await two.send(metric_family("tidevoy.logins", 1, node=node), module_info_family(), envoy="two")
            shown = await logged_in(plane, node, 10)
        assert shown["sessions_by_state"] == {"login": 0, "idle": 3, "busy": 0, "transaction": 2, "opaque": 0}
        assert shown["pinned"] == {
            "transaction": 2,
            "cursor": 0,
            "long_data": 0,
            "opaque": 0,
            "endless_transactions": 0,
        }
        assert (shown["login_failures"]["denied"], shown["login_failures"]["bad_packet"]) == (4, 0)
        assert {why: count for why, count in shown["connect_failures"].items() if count} == {"tls": 5}
        assert set(shown["connect_failures"]) == {*("connect", "closed", "error", "invalid", "tls", "full")}
        assert (shown["commands"]["query"], shown["errors"]["deadlock"]) == (100, 6)
        assert shown["bytes"] == {"to_node": 700, "to_client": 0}
        moves = shown["migrations"]
        assert (moves["moved"], moves["lost"]) == (8, 0)
        assert {why: count for why, count in moves["stayed"].items() if count} == {"slow": 3}
        assert shown["latency"] is None  # nobody knows how old the commands of the first message are
        assert not shown["sessions"]  # nothing is whole yet, and load reports tell of none
        first, second = await envoys(plane, 2)
        assert (first["id"], first["logins"], first["login_failures"]["bad_packet"]) == ("one", 9, 1)
        assert (second["id"], second["logins"]) == ("two", 1)
        text = (await plane.http.get("/metrics")).text
        assert f'tidevoy_sessions{{envoy="one",node="{node}",state="idle"}} 3.0' in text.splitlines()


async def test_ejections_of_a_node_are_shown_everywhere_with_reason_and_time(
    plane: ApiServer, node: str
) -> None:
    since = int(time.time()) - 60

    def ejected(at: int) -> bytes:
        return metric_family("tidevoy.ejected_since", at, gauge=True, node=node, reason="closed")

    async def ejections(stream: MetricsStream, at: int, **first: str) -> list[dict[str, Any]]:
        await stream.send(module_info_family(), ejected(at), **first)
        async with asyncio.timeout(15):
            while bool(found := (await plane.node(node))["ejected_by"]) is not bool(at):
                pass
        shown: list[dict[str, Any]] = found
        return shown

    async def page(path: str) -> str:
        return (await plane.http.get(path, headers={"Accept": "text/html"})).text

    port = xds_port(plane)
    async with FakeEnvoy(port, "one"), open_metrics_stream(port) as stream:
        (shown,) = await ejections(stream, since, envoy="one")
        assert (shown["envoy"], shown["reason"]) == ("one", "closed")
        assert abs(datetime.fromisoformat(shown["since"]).timestamp() - since) <= 1
        listed = (await plane.http.get("/v1/nodes")).json()["nodes"]
        assert [each["ejected_by"] for each in listed] == [[shown]]
        for command in (("nodes",), ("nodes", node)):
            told = await run_tidevoy(plane.url, *command)
            assert f"{node}: ejected by Envoy one since " in told.stderr
            assert ", reason closed" in told.stderr
        assert "ejected by 1 Envoy" in await page("/")
        assert "Envoy one has ejected it since " in await page(f"/console/nodes/{node}")
        text = (await plane.http.get("/metrics")).text
        assert f'tidevoy_node_ejected_since{{envoy="one",node="{node}",reason="closed"}}' in text
        assert await ejections(stream, 0) == []
        assert (await run_tidevoy(plane.url, "nodes")).stderr == ""
        assert "ejected by" not in await page("/")
        assert "tidevoy_node_ejected_since{" not in (await plane.http.get("/metrics")).text


async def test_what_becomes_of_a_nodes_sessions_is_shown_and_told(plane: ApiServer, node: str) -> None:
    port = xds_port(plane)

    async def told(stream: MetricsStream, left: int, moved: int, *more: bytes) -> dict[str, Any]:
        """The node, once it is known that so many are left."""
        moves = metric_family("tidevoy.migrations", moved, node=node, result="moved", reason="ok")
        await stream.send(module_info_family(), sessions_family(left, node), moves, *more)
        async with asyncio.timeout(15):
            while (shown := await plane.node(node))["sessions"] != left:
                pass
        return shown

    async with FakeEnvoy(port, "one", module=VERSION), open_metrics_stream(port) as stream:
        await stream.send(module_info_family(), sessions_family(10, node), envoy="one")
        assert (await told(stream, 10, 500))["departure"] is None
        await plane.http.post(f"/v1/nodes/{node}/drain", json={})
        failed = metric_family("tidevoy.migrations", 2, node=node, result="stayed", reason="refused")
        pinned = metric_family("tidevoy.sessions_pinned", 1, gauge=True, node=node, reason="cursor")
        departure = (await told(stream, 4, 506, failed, pinned))["departure"]
        assert {**departure, "since": None, "seconds_left": None} == {
            "since": None,
            "left": 4,
            "moved": 6,
            "failed": {"refused": 2},
            "lost": 0,
            "not_movable": {"cursor": 1},
            "seconds_left": None,
        }
        assert departure["seconds_left"] is not None
        shown = await run_tidevoy(plane.url, "drain", node, "--json")
        assert json.loads(shown.stdout)["departure"]["moved"] == 6
        await told(stream, 3, 507)
        await plane.http.post(f"/v1/nodes/{node}/undrain")
        assert (await plane.node(node))["departure"] is None
        kept = await plane.http.get("/v1/events", params={"follow": "false"}, headers={"last-event-id": "0"})
        lines = [line for line in kept.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        (summary,) = [event for event in events if event["kind"] == "node.departure"]
        assert summary["message"].startswith(f"{node}: 7 sessions moved to other nodes in ")
        assert summary["message"].endswith(", 2 tries to move one failed (refused 2), 3 sessions are left")


async def test_sessions_that_are_asked_to_move_are_shown(
    tmp_path: Path, ports: Ports, node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"per_second": 2}  # so that the round is not over before all have looked
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as other,
        run_api_server(settings(tmp_path, ports, [node, other.endpoint], rebalance=slow)) as plane,
        FakeEnvoy(xds_port(plane), "one", module=VERSION),
        open_metrics_stream(xds_port(plane)) as stream,
    ):
        await plane.wait_for_state(node, "active")
        await plane.wait_for_state(other.endpoint, "active")
        for _ in range(3):  # all is told once the second flush is there, and of all nodes with the third
            there = sessions_family(20, node), sessions_family(0, other.endpoint)
            await stream.send(*there, module_info_family("00c0ffee00c0ffee"), envoy="one")
        async with asyncio.timeout(15):
            while (await plane.node(node))["rebalance"] != 10:
                pass
        assert (await plane.node(other.endpoint))["rebalance"] == 0
        assert await asyncio.to_thread(run, ["nodes", "--url", plane.url]) == 0
        shown = capsys.readouterr().err.splitlines()
        assert f"tidevoy: {node}: 10 sessions are asked to move to other nodes" in shown


async def test_a_refusal_is_told_and_shown(plane: ApiServer) -> None:
    port = xds_port(plane)
    text = "unknown key `x`: remove it"
    async with FakeEnvoy(port, "one"), open_metrics_stream(port) as stream:
        series = metric_family("tidevoy.config_refusals", 1, extension="session", text=text)
        await stream.send(series, module_info_family(), envoy="one")
        assert (await refused(plane, "session"))["text"] == text
        await stream.send(series, module_info_family())
        other = metric_family("tidevoy.config_refusals", 1, extension="client", text="\x1b[2J")
        await stream.send(series, other, module_info_family())
        await refused(plane, "client")
        kept = await plane.http.get("/v1/events", params={"follow": "false"}, headers={"last-event-id": "0"})
        lines = [line for line in kept.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = [event for event in events if event["kind"] == "envoy.module_refusal"]
        assert [event["subject"] for event in told] == ["one", "one"]
        assert told[0]["message"] == f"its module refused the configuration of `session`: {text}"
        assert told[0]["data"] == {"extension": "session", "text": text}
        outcome = await run_tidevoy(plane.url, "envoys")
        assert "one: its module refused its client at " in outcome.stderr
        assert "\x1b" not in outcome.stderr


async def test_a_stream_without_an_id_is_refused_with_a_reason(plane: ApiServer, node: str) -> None:
    async with open_metrics_stream(xds_port(plane)) as stream:
        await stream.send(*all_families(node))
        with pytest.raises(grpc.aio.AioRpcError, match=r"the first message has no node\.id") as ended:
            await stream.call
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await plane.node(node))["logins"] is None


async def test_nonsense_in_a_stream_is_forgiven(plane: ApiServer, node: str) -> None:
    async with open_metrics_stream(xds_port(plane)) as stream:
        await stream.send(*all_families(node), envoy="one")
        await stream.call.write(b"\xff\xff")
        await stream.send(
            b"\xfftidevoy.", metric_family("tidevoy.logins", 77, node=node), module_info_family()
        )
        await logged_in(plane, node, 77)


async def test_a_message_over_the_limit_ends_only_its_stream(plane: ApiServer, node: str) -> None:
    port = xds_port(plane)
    async with open_metrics_stream(port) as stream:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the refusal may come before all is sent
            await stream.send(b"x" * 5_000_000, envoy="one")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.call
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with open_metrics_stream(port) as stream:
        await stream.send(*all_families(node), envoy="one")
        await logged_in(plane, node, 9)


async def test_an_envoy_that_restarts_counts_anew(plane: ApiServer, node: str) -> None:
    port = xds_port(plane)
    async with open_metrics_stream(port) as stream:
        await stream.send(*all_families(node), envoy="one")
        await logged_in(plane, node, 9)
    async with open_metrics_stream(port) as stream:
        await stream.send(metric_family("tidevoy.logins", 2, node=node), module_info_family(), envoy="one")
        assert (await logged_in(plane, node, 2))["sessions_by_state"]["idle"] == 0
