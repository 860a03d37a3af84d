"""Statistics of statements, from the reports of Envoys to `GET /v1/statements`, metrics and pages."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.config.settings import Settings
from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, settings
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.statement_reports import (
    INSTANCE,
    OTHER_INSTANCE,
    announced_process,
    deliver_report,
    digest_of,
    report_message,
    row,
    send_report,
    text_of,
)
from tests.support.waiting import wait_until

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
ROWS = (
    row(1, "app", A, milliseconds=2),
    row(1, "root", B, milliseconds=10, bucket=4, errors=1),
    row(2, "app", A, milliseconds=6),
    row(0, "", B, milliseconds=2),
)
HTML = {"Accept": "text/html"}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, statements={"digests": "on"})) as server:
        yield server


async def get_statements(server: ApiServer, **query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await server.http.get("/v1/statements", params=query)).raise_for_status().json()
    return answer


@pytest.fixture
async def reporting(server: ApiServer) -> AsyncIterator[ApiServer]:
    """Yield a server to which an Envoy has reported ROWS."""
    async with announced_process(server.xds_port):
        assert await deliver_report(server.xds_port, report_message(*ROWS)) == 1
        yield server


async def test_statements_are_listed_with_their_sums(reporting: ApiServer) -> None:
    answer = await get_statements(reporting)
    assert (answer["digests"], answer["total"], answer["incomplete"]) == ("on", 2, [])
    first, second = answer["statements"]
    assert first["digest"] == digest_of(1)
    assert first["text"] == text_of(1)
    assert (first["count"], first["errors"], first["rows"]) == (2, 1, 6)
    assert (first["request_bytes"], first["response_bytes"]) == (80, 800)
    assert (first["seconds"], first["share"]) == (pytest.approx(0.012), 0.6)
    assert (first["average_seconds"], first["max_seconds"]) == (pytest.approx(0.006), 0.01)
    assert 0.001 <= first["p50_seconds"] <= 0.0025
    assert 0.005 <= first["p95_seconds"] <= first["p99_seconds"] <= 0.01
    assert (first["users"], first["nodes"]) == (["root", "app"], [B, A])
    assert {bucket["up_to_seconds"]: bucket["count"] for bucket in first["latency"] if bucket["count"]} == {
        0.0025: 1,
        0.01: 1,
    }
    assert first["per_second"] == pytest.approx(2 / answer["window_seconds"], rel=0.1)
    assert (second["digest"], second["count"]) == (digest_of(2), 1)
    assert (answer["others"]["count"], answer["others"]["share"]) == (1, 0.1)


async def test_filters_order_and_parts(reporting: ApiServer) -> None:
    async def digests(**query: Any) -> list[str]:
        return [entry["digest"][:2] for entry in (await get_statements(reporting, **query))["statements"]]

    assert await digests(sort="errors") == ["01", "02"]
    assert await digests(limit=1) == ["01"]
    assert await digests(user="app") == ["02", "01"]
    assert await digests(node=B) == ["01"]
    assert await digests(envoy="envoy-1") == ["01", "02"]
    assert await digests(envoy="other") == []
    assert await digests(digest="02") == ["02"]
    by_user = await get_statements(reporting, by="user", digest=digest_of(1))
    assert [(entry["user"], entry["node"], entry["count"]) for entry in by_user["statements"]] == [
        ("root", None, 1),
        ("app", None, 1),
    ]


@pytest.mark.parametrize(
    "query", ["window=0", "window=3601", "sort=x", "limit=0", "digest=XY", "digest=", "by=envoy", "speed=1"]
)
async def test_invalid_queries_are_rejected(server: ApiServer, query: str) -> None:
    response = await server.http.get(f"/v1/statements?{query}")
    assert (response.status_code, problem_kind(response)) == (422, "invalid-request")


async def test_report_counts_once_and_invalid_reports_are_rejected(
    reporting: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    port = reporting.xds_port
    assert await send_report(port, report_message(*ROWS)) == 1
    for message in (b"\xff", report_message(row(latency=[])), report_message(row(), instance="x")):
        with pytest.raises(grpc.aio.AioRpcError) as rejection:
            await send_report(port, message)
        assert rejection.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await send_report(port, b"\n\x00" * (3 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await send_report(port, report_message(row(), instance=OTHER_INSTANCE))
    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await get_statements(reporting))["statements"][0]["count"] == 2
    assert "Traceback" not in capfd.readouterr().err


async def test_statistics_are_turned_on_and_off_while_envoys_run(tmp_path: Path, ports: Ports) -> None:
    initial = settings(tmp_path, ports)

    def with_statements(**values: Any) -> Settings:
        return initial.model_copy(update={"statements": initial.statements.model_copy(update=values)})

    async with (
        run_api_server(initial) as server,
        FakeEnvoy(server.xds_port, "envoy-1", module=VERSION) as envoy,
        announced_process(server.xds_port),
    ):
        await deliver_report(server.xds_port, report_message(*ROWS))
        answer = await get_statements(server)
        assert (answer["digests"], answer["statements"], answer["others"]["count"]) == ("off", [], 0)
        await wait_until(lambda: bool(envoy.live_configs))
        assert "statements" not in envoy.live_configs[-1]
        server.next_settings = with_statements(digests="on", max_rows=70, interval=3.0)
        (await server.http.post("/v1/config/reload")).raise_for_status()
        await wait_until(lambda: "statements" in envoy.live_configs[-1])
        assert envoy.live_configs[-1]["statements"] == {"max_rows": 70, "interval": 3.0}
        await send_report(server.xds_port, report_message(*ROWS, sequence=2))
        assert len((await get_statements(server))["statements"]) == 2
        server.next_settings = initial
        (await server.http.post("/v1/config/reload")).raise_for_status()
        assert (await get_statements(server))["statements"] == []
        await wait_until(lambda: "statements" not in envoy.live_configs[-1])


async def test_envoys_without_module_are_named(server: ApiServer) -> None:
    async with FakeEnvoy(server.xds_port, "plain") as envoy:
        await envoy.wait_for_endpoints(lambda _: True)
        assert (await get_statements(server))["incomplete"] == [
            "without Tidevoy's module, these Envoys report no statements: plain"
        ]


async def test_metrics_have_digests_but_no_texts(reporting: ApiServer) -> None:
    async def executions() -> dict[str, str]:
        page = (await reporting.http.get("/metrics")).text
        assert "select" not in page
        return dict(re.findall(r'tidevoy_statement_executions_total{digest="(\w+)"} (\S+)', page))

    sequence = 1

    async def are_shown() -> bool:
        nonlocal sequence
        sequence += 1
        await send_report(reporting.xds_port, report_message(row(1), sequence=sequence))
        return set(await executions()) == {digest_of(1), digest_of(2)}

    await wait_until(are_shown)  # after at most 10 s, when the first slot of the store has ended
    before = await executions()
    await send_report(reporting.xds_port, report_message(row(1), sequence=sequence + 1))
    after = await executions()
    assert float(after[digest_of(1)]) == float(before[digest_of(1)]) + 1
    assert after[digest_of(2)] == "0.0"


async def test_pages_show_statements_with_escaped_texts(server: ApiServer) -> None:
    hostile = "select '</code><script>alert(1)</script>'"
    statement = {"digest": bytes.fromhex(digest_of(1)), "text": hostile}
    async with announced_process(server.xds_port, instance=INSTANCE):
        await deliver_report(
            server.xds_port, report_message(*ROWS[:2], row(1, "<b>"), statements=[statement])
        )
        page = (await server.http.get("/console/statements?sort=errors", headers=HTML)).text
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert f'href="/console/statements/{digest_of(1)}?sort=errors"' in page
        detail = (await server.http.get(f"/console/statements/{digest_of(1)}", headers=HTML)).text
        assert "&lt;script&gt;alert(1)" in detail
        assert "&lt;b&gt;" in detail
        assert "<b>" not in detail.partition('id="live"')[2]
        assert B in detail
        assert "10 ms" in detail.replace("\N{NARROW NO-BREAK SPACE}", " ")
        missing = await server.http.get(f"/console/statements/{digest_of(9)}", headers=HTML)
        assert missing.status_code == 404
        filtered = (await server.http.get("/console/statements?user=nobody", headers=HTML)).text
        assert "No statements of the user nobody in this period" in filtered


async def test_page_says_how_to_turn_statistics_on(tmp_path: Path, ports: Ports) -> None:
    async with run_api_server(settings(tmp_path, ports)) as server:
        for path in ("/console/statements", f"/console/statements/{digest_of(1)}"):
            page = await server.http.get(path, headers=HTML)
            assert page.status_code == 200
            assert "statements.digests: on" in page.text
