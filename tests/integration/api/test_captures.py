"""`/v1/traffic/capture`: captures are started, sent to Envoys, shown with their counts, and end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.config.capture import CaptureSettings
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import (
    ApiServer,
    problem_kind,
    run_api_server,
    settings,
    stored_events,
)
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.telemetry_messages import (
    MetricsStream,
    metric_family,
    module_info_family,
    open_metrics_stream,
)
from tests.support.waiting import wait_until

PATH = "/v1/traffic/capture"
SECTIONS: dict[str, Any] = {
    "capture": {"directory": "/var/lib/captures", "max_bytes": 4096},
    "groups": [{"name": "reports", "labels": {"use": "reports"}, "listen": "127.0.0.1:1"}],
}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, **SECTIONS)) as server:
        yield server


async def start(server: ApiServer, **body: Any) -> Any:
    return await server.http.post(PATH, json=body)


async def status(server: ApiServer) -> dict[str, Any]:
    answer: dict[str, Any] = (await server.http.get(PATH)).raise_for_status().json()
    return answer


def published_capture(envoy: FakeEnvoy) -> dict[str, Any] | None:
    return envoy.live_configs[-1].get("capture") if envoy.live_configs else None


async def report(stream: MetricsStream, envoy: str, until: float, **counts: int) -> None:
    """Report these counts of the capture that ends at `until`."""
    values = {"until": round(until * 1000), **counts}
    gauges = [metric_family(f"tidevoy.capture_{name}", value, gauge=True) for name, value in values.items()]
    await stream.send(*gauges, module_info_family(), envoy=envoy)


async def capture_events(server: ApiServer) -> list[tuple[str, str]]:
    events = await stored_events(server.http)
    return [(event["kind"], event["subject"]) for event in events if event["kind"].startswith("capture.")]


async def test_capture_is_published_reported_and_stopped(server: ApiServer) -> None:
    nothing: dict[str, Any] = {
        "state": "none",
        "capture": None,
        "ended_at": None,
        "directory": None,
        "envoys": [],
    }
    assert await status(server) == nothing
    port = server.xds_port
    async with FakeEnvoy(port, "one", module=VERSION) as one, FakeEnvoy(port, "two", module=VERSION) as two:
        await wait_until(lambda: bool(one.live_configs and two.live_configs))
        answer = await start(server, name="c1", envoys=["one"], users=["app", "app"], groups=["reports"])
        assert answer.status_code == 201
        await wait_until(lambda: published_capture(one) is not None)
        published = published_capture(one)
        assert published is not None
        until = published.pop("until")
        assert published == {
            "name": "c1",
            "directory": "/var/lib/captures",
            "users": ["app"],
            "groups": ["reports"],
            "max_bytes": 4096,
            "envoy": "one",
        }
        assert published_capture(two) is None
        async with open_metrics_stream(port) as stream:
            await report(stream, "one", until, active=1, records=7, dropped=2, bytes=900, sessions_waiting=3)
            await wait_until_reported(server)
        running = await status(server)
        assert (running["state"], running["directory"]) == ("running", "/var/lib/captures/c1")
        assert running["envoys"] == [
            {
                "envoy": "one",
                "active": True,
                "records": 7,
                "dropped": 2,
                "filtered": 0,
                "bytes": 900,
                "write_errors": 0,
                "sessions_waiting": 3,
                "problem": None,
            }
        ]
        assert 'tidevoy_capture_records_total{envoy="one"} 7.0' in (await server.http.get("/metrics")).text
        for _ in range(2):
            stopped = await server.http.delete(PATH)
            assert (stopped.status_code, stopped.json()["state"]) == (202, "ended")
        await wait_until(lambda: published_capture(one) is None)
        ended = await status(server)
        assert ended["capture"] == running["capture"]
        assert (ended["envoys"][0]["records"], ended["ended_at"] < running["capture"]["until"]) == (7, True)
        # The reports of another capture do not count.
        await start(server, name="c2")
        await wait_until(lambda: published_capture(two) is not None)
        assert [
            (row["envoy"], row["active"], row["records"]) for row in (await status(server))["envoys"]
        ] == [
            ("one", False, None),
            ("two", False, None),
        ]
    assert await capture_events(server) == [
        ("capture.started", "c1"),
        ("capture.ended", "c1"),
        ("capture.started", "c2"),
    ]
    audit = [e["subject"] for e in await stored_events(server.http) if e["kind"] == "audit.start_capture"]
    assert audit == ["c1", "c2"]


async def wait_until_reported(server: ApiServer) -> None:
    async def has_records() -> bool:
        return any(row["records"] for row in (await status(server))["envoys"])

    await wait_until(has_records)


async def test_capture_ends_by_itself(server: ApiServer) -> None:
    async with FakeEnvoy(server.xds_port, "one", module=VERSION) as envoy:
        await wait_until(lambda: bool(envoy.live_configs))
        answer = (await start(server, duration_seconds=1)).json()
        assert re.fullmatch(r"20\d{6}T\d{6}", answer["capture"]["name"])
        await wait_until(lambda: published_capture(envoy) is not None)
        await wait_until(lambda: published_capture(envoy) is None)
    ended = await status(server)
    assert (ended["state"], ended["ended_at"]) == ("ended", answer["capture"]["until"])
    assert [kind for kind, _ in await capture_events(server)] == ["capture.started", "capture.ended"]


async def test_wrong_requests_start_nothing(server: ApiServer) -> None:
    async with FakeEnvoy(server.xds_port, "plain"):
        await wait_until_connected(server)
        for body, code, kind, text in (
            ({"name": ".c"}, 422, "invalid-request", "name: must have 1 to 64 letters"),
            ({"duration_seconds": 90_000}, 422, "invalid-request", "less than or equal to 86400"),
            ({"until": 5}, 422, "invalid-request", "until: Extra inputs"),
            ({"envoys": ["none"]}, 404, "unknown-envoy", "no Envoy has the id none; `tidevoy envoys`"),
            ({"envoys": ["plain"]}, 409, "needs-module", "do not use it: plain; name other Envoys"),
            ({"groups": ["x"]}, 404, "unknown-group", "no group of nodes in the settings is named x"),
        ):
            answer = await start(server, **body)
            assert (answer.status_code, problem_kind(answer)) == (code, kind)
            assert text in answer.json()["detail"]
        assert (await status(server))["state"] == "none"
        (await start(server, name="c1")).raise_for_status()
        (row,) = (await status(server))["envoys"]
        assert row["problem"] == "it does not use Tidevoy's module"
    again = await start(server)
    assert (again.status_code, problem_kind(again)) == (409, "capture-running")
    # Without the directory, a capture ends, and none starts.
    server.next_settings = server.next_settings.model_copy(update={"capture": CaptureSettings()})
    (await server.http.post("/v1/config/reload")).raise_for_status()
    assert (await status(server))["state"] == "ended"
    off = await start(server)
    assert (off.status_code, problem_kind(off)) == (409, "captures-off")
    assert "set capture.directory" in off.json()["detail"]


async def wait_until_connected(server: ApiServer) -> None:
    async def is_connected() -> bool:
        return bool((await server.http.get("/v1/envoys")).json()["envoys"])

    await wait_until(is_connected)


async def test_capture_survives_a_restart(tmp_path: Path, ports: Ports) -> None:
    for expected in ("none", "running"):
        async with run_api_server(settings(tmp_path, ports, **SECTIONS)) as server:
            assert (await status(server))["state"] == expected
            if expected == "none":
                (await start(server, name="c1", users=["app"])).raise_for_status()


async def test_command_line_and_console(server: ApiServer) -> None:
    async def run(*arguments: str, code: int = 0) -> str:
        result = await run_tidevoy(server.url, "traffic", "capture", *arguments)
        assert result.exit_code == code, result
        return f"{result.stdout}{result.stderr}"

    assert "there was no capture" in await run("status")
    started = await run("start", "c1", "--for", "10m", "--user", "app", "--group", "reports")
    assert re.match(r"c1 running: from 20.* until 20.*\nusers      app\ngroups     reports\n", started)
    assert "directory  /var/lib/captures/c1" in started
    assert "the capture c1 is running" in await run("start", code=1)
    capture = json.loads(await run("status", "--json"))["capture"]
    assert (capture["users"], capture["groups"]) == (["app"], ["reports"])
    page = (await server.http.get("/console/capture", headers={"Accept": "text/html"})).text
    assert "<b>c1</b> is running until" in page
    form = {"Accept": "text/html"}
    stopped = await server.http.post("/console/capture/stop", headers=form)
    assert (stopped.status_code, (await status(server))["state"]) == (303, "ended")
    assert await run("stop")
    wrong = await server.http.post("/console/capture/start", headers=form, data={"name": "a b"})
    assert (wrong.status_code, "must have 1 to 64 letters" in wrong.text) == (422, True)
    data = {"name": "c2", "minutes": "1.5", "users": "app, batch"}
    assert (await server.http.post("/console/capture/start", headers=form, data=data)).status_code == 303
    capture = (await status(server))["capture"]
    assert (capture["name"], capture["users"]) == ("c2", ["app", "batch"])
