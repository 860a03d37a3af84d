"""The REST API, the CLI and the console show the telemetry of Envoy modules, which the tests send."""

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
from controlplane.config.limits import LimitSettings
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings, stored_events
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

TRAFFIC_FIELDS = {
    *("sessions_by_state", "not_movable", "logins", "login_failures", "connect_failures", "commands"),
    *("latency", "bytes", "errors", "migrations"),
}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports, node: str) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [node])) as server:
        await server.wait_for_state(node, "active")
        yield server


async def wait_for_envoys(server: ApiServer, count: int = 1) -> list[dict[str, Any]]:
    """Wait until the fleet has `count` Envoys, and return them."""
    envoys: list[dict[str, Any]] = []
    async with asyncio.timeout(15):
        while len(envoys) != count:
            envoys = (await server.http.get("/v1/envoys")).json()["envoys"]
    return envoys


async def wait_for_logins(server: ApiServer, node: str, count: int) -> dict[str, Any]:
    """Wait until the node reports `count` logins, and return the node."""
    async with asyncio.timeout(15):
        while (reported := await server.node(node))["logins"] != count:
            pass
    return reported


async def wait_for_rejection(server: ApiServer, extension: str) -> dict[str, Any]:
    """Wait until the only Envoy reports a rejected config of that extension, and return the rejection."""
    rejection: dict[str, Any] | None = None
    async with asyncio.timeout(15):
        while rejection is None or rejection["extension"] != extension:
            rejection = (await wait_for_envoys(server))[0]["config_rejection"]
    return rejection


async def test_traffic_is_null_before_the_first_report(server: ApiServer, node: str) -> None:
    reported = await server.node(node)
    assert {name: reported[name] for name in TRAFFIC_FIELDS} == dict.fromkeys(TRAFFIC_FIELDS)
    assert next(iter(reported)) == "address"
    async with FakeEnvoy(server.xds_port):
        (envoy,) = await wait_for_envoys(server)
    assert {name: envoy[name] for name in TRAFFIC_FIELDS} == dict.fromkeys(TRAFFIC_FIELDS)
    assert envoy["config_rejection"] is None
    assert next(iter(envoy)) == "id"


async def test_node_reports_the_sum_over_envoys_and_each_envoy_its_own(server: ApiServer, node: str) -> None:
    port = server.xds_port
    async with FakeEnvoy(port, "one"), FakeEnvoy(port, "two"), open_metrics_stream(port) as one:
        await one.send(*all_families(node), envoy="one")
        async with open_metrics_stream(port) as two:
            await two.send(metric_family("tidevoy.logins", 1, node=node), module_info_family(), envoy="two")
            reported = await wait_for_logins(server, node, 10)
        assert reported["sessions_by_state"] == {
            "login": 0,
            "idle": 3,
            "busy": 0,
            "transaction": 2,
            "opaque": 0,
        }
        assert reported["not_movable"] == {
            "transaction": 2,
            "cursor": 0,
            "long_data": 0,
            "opaque": 0,
            "endless_transactions": 0,
        }
        assert (reported["login_failures"]["denied"], reported["login_failures"]["bad_packet"]) == (4, 0)
        assert {reason: count for reason, count in reported["connect_failures"].items() if count} == {
            "tls": 5
        }
        assert set(reported["connect_failures"]) == {
            *("connect", "closed", "error", "invalid", "tls", "full")
        }
        assert (reported["commands"]["query"], reported["errors"]["deadlock"]) == (100, 6)
        assert reported["bytes"] == {"to_node": 700, "to_client": 0}
        migrations = reported["migrations"]
        assert (migrations["moved"], migrations["lost"]) == (8, 0)
        assert {reason: count for reason, count in migrations["failed"].items() if count} == {"slow": 3}
        assert reported["latency"] is None  # the age of the commands in the first message is unknown
        assert not reported["sessions"]  # no report is complete yet, and load reports count no session
        first, second = await wait_for_envoys(server, 2)
        assert (first["id"], first["logins"], first["login_failures"]["bad_packet"]) == ("one", 9, 1)
        assert (second["id"], second["logins"]) == ("two", 1)
        text = (await server.http.get("/metrics")).text
        assert f'tidevoy_sessions{{envoy="one",node="{node}",state="idle"}} 3.0' in text.splitlines()


async def test_limits_are_shown_with_what_envoys_use_of_them(tmp_path: Path, ports: Ports, node: str) -> None:
    rule = {"name": "office", "network": "10.0.0.0/8", "max_new_connections_per_second": 2.5}
    limits = {"max_connections": 20, "rules": [rule]}

    def limit_families(rule: str, connections: int, quota: int) -> list[bytes]:
        return [
            metric_family("tidevoy.limit_connections", connections, gauge=True, rule=rule),
            metric_family("tidevoy.limit_quota", quota, gauge=True, rule=rule),
            metric_family("tidevoy.limit_refusals", 3, rule=rule),
        ]

    async with run_api_server(settings(tmp_path, ports, [node], limits=limits)) as server:
        port = server.xds_port
        async with FakeEnvoy(port, "one"), open_metrics_stream(port) as stream:
            await stream.send(
                *limit_families("total", 7, 20),
                *limit_families("office", 2, 0),
                *limit_families("removed", 1, 1),
                module_info_family(),
                envoy="one",
            )
            async with asyncio.timeout(15):
                while not (shown := (await server.http.get("/v1/limits")).json()["limits"])[0]["envoys"]:
                    pass
            unlimited = {"max_connections": 0, "max_new_connections_per_second": 0.0}
            everybody = {"user": None, "network": None}
            assert shown == [
                {
                    "name": "total",
                    **(everybody | unlimited | {"max_connections": 20}),
                    "connections": 7,
                    "refused": 3,
                    "envoys": [{"envoy": "one", "connections": 7, "quota": 20, "refused": 3}],
                },
                {
                    **(everybody | unlimited | rule),
                    "connections": 2,
                    "refused": 3,
                    "envoys": [{"envoy": "one", "connections": 2, "quota": None, "refused": 3}],
                },
            ]
            lines = (await server.http.get("/metrics")).text.splitlines()
            assert [line for line in lines if line.startswith("tidevoy_limit_")] == [
                'tidevoy_limit_max_connections{rule="total"} 20.0',
                'tidevoy_limit_connections{envoy="one",rule="total"} 7.0',
                'tidevoy_limit_connections{envoy="one",rule="office"} 2.0',
                'tidevoy_limit_quota{envoy="one",rule="total"} 20.0',
                'tidevoy_limit_refusals_total{envoy="one",rule="total"} 3.0',
                'tidevoy_limit_refusals_total{envoy="one",rule="office"} 3.0',
            ]
            page = (await server.http.get("/console/envoys", headers={"Accept": "text/html"})).text
            assert "Limits of connections" in page
            assert "all users from 10.0.0.0/8" in page
            server.next_settings = server.next_settings.model_copy(update={"limits": LimitSettings()})
            (await server.http.post("/v1/config/reload")).raise_for_status()
            assert (await server.http.get("/v1/limits")).json() == {"limits": []}
            page = (await server.http.get("/console/envoys", headers={"Accept": "text/html"})).text
            assert "Limits of connections" not in page


async def test_ejections_are_reported_with_reason_and_time(server: ApiServer, node: str) -> None:
    since = int(time.time()) - 60

    def ejection_family(at: int) -> bytes:
        return metric_family("tidevoy.ejected_since", at, gauge=True, node=node, reason="closed")

    async def send_ejection(stream: MetricsStream, at: int, **first: str) -> list[dict[str, Any]]:
        """Report an ejection, or its end if `at` is 0; wait until the API shows it; return the ejections."""
        await stream.send(module_info_family(), ejection_family(at), **first)
        async with asyncio.timeout(15):
            while bool((reported := await server.node(node))["ejected_by"]) is not bool(at):
                pass
        ejections: list[dict[str, Any]] = reported["ejected_by"]
        return ejections

    async def get_page(path: str) -> str:
        return (await server.http.get(path, headers={"Accept": "text/html"})).text

    port = server.xds_port
    async with FakeEnvoy(port, "one"), open_metrics_stream(port) as stream:
        (ejection,) = await send_ejection(stream, since, envoy="one")
        assert (ejection["envoy"], ejection["reason"]) == ("one", "closed")
        assert abs(datetime.fromisoformat(ejection["since"]).timestamp() - since) <= 1
        listed = (await server.http.get("/v1/nodes")).json()["nodes"]
        assert [entry["ejected_by"] for entry in listed] == [[ejection]]
        for command in (("nodes",), ("nodes", node)):
            result = await run_tidevoy(server.url, *command)
            assert f"{node}: ejected by Envoy one since " in result.stderr
            assert ", reason closed" in result.stderr
        assert "ejected by 1 Envoy" in await get_page("/")
        assert "Envoy one ejected the node at " in await get_page(f"/console/nodes/{node}")
        text = (await server.http.get("/metrics")).text
        assert f'tidevoy_node_ejected_since{{envoy="one",node="{node}",reason="closed"}}' in text
        assert await send_ejection(stream, 0) == []
        assert (await run_tidevoy(server.url, "nodes")).stderr == ""
        assert "ejected by" not in await get_page("/")
        assert "tidevoy_node_ejected_since{" not in (await server.http.get("/metrics")).text


async def test_drain_progress_is_reported(server: ApiServer, node: str) -> None:
    port = server.xds_port

    async def send_counts(
        stream: MetricsStream, sessions: int, moved: int, *families: bytes
    ) -> dict[str, Any]:
        """Report the counts, wait until the node shows the sessions, and return the node."""
        migrations = metric_family("tidevoy.migrations", moved, node=node, result="moved", reason="ok")
        await stream.send(module_info_family(), sessions_family(sessions, node), migrations, *families)
        async with asyncio.timeout(15):
            while (reported := await server.node(node))["sessions"] != sessions:
                pass
        return reported

    async with FakeEnvoy(port, "one", module=VERSION), open_metrics_stream(port) as stream:
        await stream.send(module_info_family(), sessions_family(10, node), envoy="one")
        assert (await send_counts(stream, 10, 500))["drain_progress"] is None
        await server.http.post(f"/v1/nodes/{node}/drain", json={})
        failed = metric_family("tidevoy.migrations", 2, node=node, result="stayed", reason="refused")
        pinned = metric_family("tidevoy.sessions_pinned", 1, gauge=True, node=node, reason="cursor")
        progress = (await send_counts(stream, 4, 506, failed, pinned))["drain_progress"]
        assert {**progress, "since": None, "seconds_left": None} == {
            "since": None,
            "left": 4,
            "migrated": 6,
            "failed": {"refused": 2},
            "lost": 0,
            "not_movable": {"cursor": 1},
            "seconds_left": None,
        }
        assert progress["seconds_left"] is not None
        result = await run_tidevoy(server.url, "drain", node, "--json")
        assert json.loads(result.stdout)["drain_progress"]["migrated"] == 6
        await send_counts(stream, 3, 507)
        await server.http.post(f"/v1/nodes/{node}/undrain")
        assert (await server.node(node))["drain_progress"] is None
        events = await stored_events(server.http)
        (summary,) = [event for event in events if event["kind"] == "node.drain_finished"]
        assert summary["message"].startswith(f"{node}: 7 sessions migrated to other nodes in ")
        assert summary["message"].endswith(", 2 migration attempts failed (refused 2), 3 sessions remain")


async def test_rebalancing_sessions_are_reported(
    tmp_path: Path, ports: Ports, node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"max_per_second": 2}  # so that rebalancing lasts until the end of the test
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as other,
        run_api_server(settings(tmp_path, ports, [node, other.endpoint], rebalance=slow)) as server,
        FakeEnvoy(server.xds_port, "one", module=VERSION),
        open_metrics_stream(server.xds_port) as stream,
    ):
        await server.wait_for_state(node, "active")
        await server.wait_for_state(other.endpoint, "active")
        for _ in range(3):  # the report is complete after two flushes, and includes all nodes after three
            sessions = sessions_family(20, node), sessions_family(0, other.endpoint)
            await stream.send(*sessions, module_info_family("00c0ffee00c0ffee"), envoy="one")
        async with asyncio.timeout(15):
            while (await server.node(node))["rebalance"] != 10:
                pass
        assert (await server.node(other.endpoint))["rebalance"] == 0
        assert await asyncio.to_thread(run, ["nodes", "--url", server.url]) == 0
        notices = capsys.readouterr().err.splitlines()
        assert f"tidevoy: {node}: 10 sessions are to migrate to other nodes" in notices


async def test_config_rejection_of_the_module_is_reported(server: ApiServer) -> None:
    port = server.xds_port
    text = "unknown key `x`: remove it"
    async with FakeEnvoy(port, "one"), open_metrics_stream(port) as stream:
        series = metric_family("tidevoy.config_refusals", 1, extension="session", text=text)
        await stream.send(series, module_info_family(), envoy="one")
        assert (await wait_for_rejection(server, "session"))["text"] == text
        await stream.send(series, module_info_family())
        other = metric_family("tidevoy.config_refusals", 1, extension="client", text="\x1b[2J")
        await stream.send(series, other, module_info_family())
        await wait_for_rejection(server, "client")
        events = await stored_events(server.http)
        rejections = [event for event in events if event["kind"] == "envoy.config_rejected"]
        assert [event["subject"] for event in rejections] == ["one", "one"]
        assert rejections[0]["message"] == f"its module rejected the configuration of `session`: {text}"
        assert rejections[0]["data"] == {"extension": "session", "text": text}
        result = await run_tidevoy(server.url, "envoys")
        assert "one: its module rejected the configuration of `client` at " in result.stderr
        assert "\x1b" not in result.stderr


async def test_stream_without_node_id_is_rejected_with_a_reason(server: ApiServer, node: str) -> None:
    async with open_metrics_stream(server.xds_port) as stream:
        await stream.send(*all_families(node))
        with pytest.raises(grpc.aio.AioRpcError, match=r"the first message has no node\.id") as error:
            await stream.call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await server.node(node))["logins"] is None


async def test_invalid_telemetry_messages_are_ignored(server: ApiServer, node: str) -> None:
    async with open_metrics_stream(server.xds_port) as stream:
        await stream.send(*all_families(node), envoy="one")
        await stream.call.write(b"\xff\xff")
        await stream.send(
            b"\xfftidevoy.", metric_family("tidevoy.logins", 77, node=node), module_info_family()
        )
        await wait_for_logins(server, node, 77)


async def test_oversized_message_ends_only_its_stream(server: ApiServer, node: str) -> None:
    port = server.xds_port
    async with open_metrics_stream(port) as stream:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the rejection may arrive before everything is sent
            await stream.send(b"x" * 5_000_000, envoy="one")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.call
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with open_metrics_stream(port) as stream:
        await stream.send(*all_families(node), envoy="one")
        await wait_for_logins(server, node, 9)


async def test_restarted_envoy_starts_counting_from_zero(server: ApiServer, node: str) -> None:
    port = server.xds_port
    async with open_metrics_stream(port) as stream:
        await stream.send(*all_families(node), envoy="one")
        await wait_for_logins(server, node, 9)
    async with open_metrics_stream(port) as stream:
        await stream.send(metric_family("tidevoy.logins", 2, node=node), module_info_family(), envoy="one")
        assert (await wait_for_logins(server, node, 2))["sessions_by_state"]["idle"] == 0
