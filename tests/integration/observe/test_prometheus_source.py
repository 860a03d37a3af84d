"""Node metrics that are read from Prometheus."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from controlplane import address as addresses
from controlplane.config.balance import PrometheusSettings
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.model.node_metrics import NodeMetrics
from controlplane.observe.node_metrics.http_fetcher import FetchError
from controlplane.observe.node_metrics.prometheus_source import PrometheusReader
from tests.integration.observe.test_status_probe_tls import TlsFiles
from tests.support.controlplane.engine import (
    current_facts,
    healthy_node,
    run_engine,
    settings,
    wait_for_plans,
)
from tests.support.controlplane.node_metrics import run_fake_metrics_node
from tests.support.controlplane.prometheus import FakePrometheus, PrometheusServer
from tests.support.fake_servers import http_response, refusing_port, run_fake_server
from tests.support.waiting import wait_until

OUTAGE_PREFIX = "node metrics are unavailable; last error: "


def prometheus_settings(
    directory: Path, url: str, nodes: list[tuple[str, str]], **prometheus: Any
) -> Settings:
    return settings(
        directory,
        nodes=[{"address": sql, "status_address": status} for sql, status in nodes],
        balance={
            "metrics": {"interval": 0.1, "timeout": 2.0},
            "prometheus": {"url": url, **prometheus},
        },
    )


def answers_for(name: str, age: float = 0.0) -> dict[str, dict[str, float]]:
    """Return answers about one node. A query gets the first answer whose key is a part of the query."""
    return {
        "time()": {name: age},
        "process_cpu": {name: 3.8},
        "maxprocs": {name: 4.0},
        "resident": {name: 8e8},
        "quota": {name: 1e9},
        "failed": {name: 50.0},
        "cmds_duration": {name: 100.0},
        "backoff": {name: 30.0},
        "request_seconds": {name: 100.0},
    }


async def wait_for_metrics(engine: Engine, address: str) -> NodeMetrics:
    await wait_until(lambda: address in current_facts(engine).node_metrics)
    return current_facts(engine).node_metrics[address]


async def test_metrics_from_a_real_prometheus_match_the_nodes(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as busy, run_fake_metrics_node() as idle:
        await busy.set_metrics(cpu=0.9, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=4)
        prometheus = PrometheusServer(tmp_path / "prometheus", [busy.status, idle.status])
        nodes = [(node.address, node.status) for node in (busy, idle)]
        async with (
            prometheus as server,
            run_engine(prometheus_settings(tmp_path, server.url, nodes)) as engine,
        ):
            await wait_until(
                lambda: current_facts(engine).node_metrics.get(busy.address, NodeMetrics()).cpu is not None
            )
            await wait_until(
                lambda: (
                    current_facts(engine).node_metrics.get(idle.address, NodeMetrics()).pd_failures
                    is not None
                )
            )
            metrics = current_facts(engine).node_metrics[busy.address]
            assert metrics.cpu_quota == 4.0
            for metric, value in (
                (metrics.cpu, 0.9),
                (metrics.memory, 0.8),
                (metrics.pd_failures, 0.5),
                (metrics.tikv_failures, 0.4),
            ):
                assert metric is not None
                assert metric.value == pytest.approx(value, rel=0.1)
                assert 0.0 <= engine._clock() - metric.at < 4.0
            idle_failures = current_facts(engine).node_metrics[idle.address].pd_failures
            assert idle_failures is not None
            assert (idle_failures.value, current_facts(engine).node_metrics_outage) == (0.0, "")
            await server.kill()
            await wait_until(lambda: current_facts(engine).node_metrics_outage != "")
            assert current_facts(engine).node_metrics_outage.startswith(
                f"{OUTAGE_PREFIX}{server.url}/api/v1/query cannot be "
            )
            assert current_facts(engine).node_metrics.keys() == {busy.address, idle.address}


@pytest.mark.parametrize("skew", [-30.0, 0.0, 30.0])
async def test_clock_skew_does_not_change_the_age_of_metrics(tmp_path: Path, skew: float) -> None:
    async with (
        healthy_node() as (sql, status),
        run_fake_server(prometheus := FakePrometheus(answers_for(status, age=12.0), skew)) as peer,
        run_engine(prometheus_settings(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
    ):
        before = engine._clock()
        metrics = await wait_for_metrics(engine, sql)
        assert metrics.memory is not None
        assert before - 12.5 <= metrics.memory.at <= engine._clock() - 12.0
        assert (metrics.memory.value, metrics.cpu_quota) == (0.8, 4.0)
        # All queries for values name the time at which Prometheus computed the age of the samples.
        queries = [prometheus.parameters(head) for head in prometheus.request_heads]
        times = {parameters.get("time") for parameters in queries if "time()" not in parameters["query"]}
        assert times == {repr(1_767_225_600.0 + skew)}


async def test_https_url_is_queried_over_tls(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    async with (
        healthy_node() as (sql, status),
        run_fake_server(FakePrometheus(answers_for(status)), files.server_context(mutual=False)) as peer,
        run_engine(
            prometheus_settings(tmp_path, f"https://{peer.endpoint}", [(sql, status)], ca=files.ca)
        ) as engine,
    ):
        await wait_for_metrics(engine, sql)


async def test_nodes_are_found_by_host_name(tmp_path: Path) -> None:
    async with (
        healthy_node() as (sql, status),
        run_fake_server(FakePrometheus(answers_for("localhost"))) as peer,
    ):
        status_address = f"localhost:{addresses.split(status)[1]}"
        async with run_engine(
            prometheus_settings(tmp_path, f"http://{peer.endpoint}", [(sql, status_address)])
        ) as engine:
            await wait_for_metrics(engine, sql)


async def test_default_label_sets_are_tried_until_one_fits(tmp_path: Path) -> None:
    async with healthy_node() as (sql, status):
        prometheus = FakePrometheus({'job="tidb"': {}, **answers_for(status)})
        async with (
            run_fake_server(prometheus) as peer,
            run_engine(prometheus_settings(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
        ):
            await wait_for_metrics(engine, sql)
            await wait_until(
                lambda: sum("time()" in prometheus.query(head) for head in prometheus.request_heads) >= 4
            )
        queries = [
            query for head in prometheus.request_heads if "time()" in (query := prometheus.query(head))
        ]
        assert ['job="tidb"' in query for query in queries[:4]] == [True, False, False, False]
        assert all('component="tidb"' in query for query in queries[1:4])


async def test_configured_labels_and_token_are_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with healthy_node() as (sql, status):
        prometheus = FakePrometheus(answers_for(status))
        options = {"labels": {"tidb_cluster": 'a"b'}, "bearer_token_file": token}
        async with (
            run_fake_server(prometheus) as peer,
            run_engine(
                prometheus_settings(tmp_path, f"http://{peer.endpoint}/base/", [(sql, status)], **options)
            ) as engine,
        ):
            await wait_for_metrics(engine, sql)
            assert all(b"\r\nAuthorization: Bearer secret\r\n" in head for head in prometheus.request_heads)
            assert all(head.startswith(b"GET /base/api/v1/query?") for head in prometheus.request_heads)
            assert all(r'{tidb_cluster="a\"b"' in prometheus.query(head) for head in prometheus.request_heads)
            token.unlink()
            await wait_until(lambda: current_facts(engine).node_metrics_outage != "")
            assert (
                "bearer_token_file cannot be read: No such file" in current_facts(engine).node_metrics_outage
            )
            assert sql in current_facts(engine).node_metrics
            token.write_text("secret\nof two lines\n")
            await wait_until(lambda: "contains no token" in current_facts(engine).node_metrics_outage)
            assert "secret" not in current_facts(engine).node_metrics_outage


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http_response(503, b""), "answers HTTP 503"),
        (http_response(401, b""), "answers HTTP 401"),
        (http_response(200, b"<html>"), "does not answer like Prometheus"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot be read"),
        (
            http_response(200, b'{"data": {"resultType": "vector", "result": []}}'),
            "has no metrics of the nodes",
        ),
    ],
)
async def test_unusable_prometheus_is_an_outage_until_it_recovers(
    tmp_path: Path, answer: bytes, reason: str
) -> None:
    async with healthy_node() as (sql, status):
        prometheus = FakePrometheus(answers_for(status))
        prometheus.forced_answer = answer
        async with (
            run_fake_server(prometheus) as peer,
            run_engine(prometheus_settings(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
        ):
            await wait_until(lambda: reason in current_facts(engine).node_metrics_outage)
            assert current_facts(engine).node_metrics_outage.startswith(
                f"{OUTAGE_PREFIX}http://{peer.endpoint}/api/v1/query "
            )
            assert not current_facts(engine).node_metrics
            prometheus.forced_answer = None
            await wait_for_metrics(engine, sql)
            assert current_facts(engine).node_metrics_outage == ""


async def test_timeout_applies_to_all_queries_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query takes 30 s of the event loop's clock, and no real time."""
    loop = asyncio.get_running_loop()
    original_time, query_seconds = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: original_time() + sum(query_seconds))
    prometheus = FakePrometheus(answers_for("10.0.0.1:10080"))
    prometheus.on_request = lambda: query_seconds.append(30.0)
    async with run_fake_server(prometheus) as peer:
        reader = PrometheusReader(PrometheusSettings(url=f"http://{peer.endpoint}"), None)
        with pytest.raises(FetchError, match="does not answer all queries within 50 s"):
            await reader.read(time.time, 50.0)
        await reader.read(time.time, 30.0 * 12)
        await reader.close()


async def test_nodes_become_active_without_prometheus(tmp_path: Path) -> None:
    with refusing_port() as closed_port:
        async with (
            healthy_node() as (sql, status),
            run_engine(prometheus_settings(tmp_path, f"http://{closed_port}", [(sql, status)])) as engine,
        ):
            await wait_until(lambda: current_facts(engine).node_metrics_outage != "")
            await wait_for_plans(engine, 1)
            assert engine.cluster.nodes()[0].plan.state == "active"
