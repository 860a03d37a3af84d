"""Vital signs that are read from a Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.model.facts import Facts
from controlplane.model.node_metrics import NodeMetrics
from tests.integration.observe.test_status_probe_tls import Files
from tests.support.controlplane.engine import healthy_node, run_engine, settings, wait_for_plans
from tests.support.controlplane.node_metrics import run_fake_metrics_node
from tests.support.controlplane.prometheus import FakePrometheus, PrometheusServer
from tests.support.fake_servers import http_response, refusing_port, run_fake_server
from tests.support.waiting import wait_until

BEGINS = "CPU, memory and health of the nodes cannot be read: "


def asking(directory: Path, url: str, nodes: list[tuple[str, str]], **prometheus: Any) -> Settings:
    return settings(
        directory,
        nodes=[{"address": sql, "status_address": status} for sql, status in nodes],
        balance={
            "metrics": {"interval": 0.1, "timeout": 2.0},
            "prometheus": {"url": url, **prometheus},
        },
    )


def facts(engine: Engine) -> Facts:
    return engine._facts.view()


def told_of(name: str, age: float = 0.0) -> dict[str, dict[str, float]]:
    """The answers of a Prometheus that knows one node, by the first of these words in a query."""
    return {
        "time()": {name: age},
        "deriv": {name: 1e6},
        "rate(process_cpu": {name: 3.8},
        "maxprocs": {name: 4.0},
        "resident": {name: 8e8},
        "quota": {name: 1e9},
        "failed": {name: 50.0},
        "cmds_duration": {name: 100.0},
        "backoff": {name: 30.0},
        "request_seconds": {name: 100.0},
    }


async def known(engine: Engine, address: str) -> NodeMetrics:
    await wait_until(lambda: address in facts(engine).node_metrics)
    return facts(engine).node_metrics[address]


async def test_a_real_prometheus_tells_what_the_nodes_show(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as busy, run_fake_metrics_node() as calm:
        await busy.set_metrics(cpu=0.9, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=4)
        scraping = PrometheusServer(tmp_path / "prometheus", [busy.status, calm.status])
        nodes = [(one.address, one.status) for one in (busy, calm)]
        async with scraping as server, run_engine(asking(tmp_path, server.url, nodes)) as engine:
            await wait_until(
                lambda: facts(engine).node_metrics.get(busy.address, NodeMetrics()).cpu is not None
            )
            await wait_until(
                lambda: facts(engine).node_metrics.get(calm.address, NodeMetrics()).pd_failures is not None
            )
            vitals = facts(engine).node_metrics[busy.address]
            assert vitals.cpu_quota == 4.0
            for told, value in (
                (vitals.cpu, 0.9),
                (vitals.memory, 0.8),
                (vitals.pd_failures, 0.5),
                (vitals.tikv_failures, 0.4),
            ):
                assert told is not None
                assert told.value == pytest.approx(value, rel=0.1)
                assert 0.0 <= engine._clock() - told.at < 4.0
            calm_health = facts(engine).node_metrics[calm.address].pd_failures
            assert calm_health is not None
            assert (calm_health.value, facts(engine).node_metrics_outage) == (0.0, "")
            await server.kill()
            await wait_until(lambda: facts(engine).node_metrics_outage != "")
            assert facts(engine).node_metrics_outage.startswith(
                f"{BEGINS}{server.url}/api/v1/query cannot be "
            )
            assert facts(engine).node_metrics.keys() == {busy.address, calm.address}


@pytest.mark.parametrize("skew", [-30.0, 0.0, 30.0])
async def test_a_clock_that_differs_makes_no_reading_older_or_newer(tmp_path: Path, skew: float) -> None:
    async with (
        healthy_node() as (sql, status),
        run_fake_server(FakePrometheus(told_of(status, age=12.0), skew)) as peer,
        run_engine(asking(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
    ):
        before = engine._clock()
        vitals = await known(engine, sql)
        assert vitals.cpu is not None
        assert before - 12.5 <= vitals.cpu.at <= engine._clock() - 12.0
        assert (vitals.cpu.value, vitals.memory_growth) == (0.95, 0.001)
        read = [vitals.memory, vitals.pd_failures, vitals.tikv_failures]
        assert [one and one.value for one in read] == [0.8, 0.5, 0.3]


async def test_it_is_asked_over_tls_where_its_url_says_so(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with (
        healthy_node() as (sql, status),
        run_fake_server(FakePrometheus(told_of(status)), files.serving(mutual=False)) as peer,
        run_engine(asking(tmp_path, f"https://{peer.endpoint}", [(sql, status)], ca=files.ca)) as engine,
    ):
        await known(engine, sql)


async def test_nodes_are_known_by_their_host_too(tmp_path: Path) -> None:
    async with healthy_node() as (sql, status), run_fake_server(FakePrometheus(told_of("localhost"))) as peer:
        named = f"localhost:{addresses.split(status)[1]}"
        async with run_engine(asking(tmp_path, f"http://{peer.endpoint}", [(sql, named)])) as engine:
            await known(engine, sql)


async def test_both_usual_labels_are_tried_and_the_one_that_fits_is_kept(tmp_path: Path) -> None:
    async with healthy_node() as (sql, status):
        oracle = FakePrometheus({'job="tidb"': {}, **told_of(status)})
        async with (
            run_fake_server(oracle) as peer,
            run_engine(asking(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
        ):
            await known(engine, sql)
            await wait_until(
                lambda: sum("time()" in oracle.query(head) for head in oracle.request_heads) >= 4
            )
        tried = [query for head in oracle.request_heads if "time()" in (query := oracle.query(head))]
        assert ['job="tidb"' in query for query in tried[:4]] == [True, False, False, False]
        assert all('component="tidb"' in query for query in tried[1:4])


async def test_labels_and_a_token_that_are_set_are_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with healthy_node() as (sql, status):
        oracle = FakePrometheus(told_of(status))
        chosen = {"labels": {"tidb_cluster": 'a"b'}, "bearer_token_file": token}
        async with (
            run_fake_server(oracle) as peer,
            run_engine(
                asking(tmp_path, f"http://{peer.endpoint}/base/", [(sql, status)], **chosen)
            ) as engine,
        ):
            await known(engine, sql)
            assert all(b"\r\nAuthorization: Bearer secret\r\n" in head for head in oracle.request_heads)
            assert all(head.startswith(b"GET /base/api/v1/query?") for head in oracle.request_heads)
            assert all(r'{tidb_cluster="a\"b"' in oracle.query(head) for head in oracle.request_heads)
            token.unlink()
            await wait_until(lambda: facts(engine).node_metrics_outage != "")
            assert "bearer_token_file cannot be read: No such file" in facts(engine).node_metrics_outage
            assert sql in facts(engine).node_metrics
            token.write_text("secret\nof two lines\n")
            await wait_until(lambda: "holds no token" in facts(engine).node_metrics_outage)
            assert "secret" not in facts(engine).node_metrics_outage


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (http_response(503, b""), "answers HTTP 503"),
        (http_response(401, b""), "answers HTTP 401"),
        (http_response(200, b"<html>"), "answers, but not as Prometheus does"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot be read"),
        (http_response(200, b'{"data": {"resultType": "vector", "result": []}}'), "knows none of the nodes"),
    ],
)
async def test_a_prometheus_that_cannot_be_used_is_an_outage_until_it_can(
    tmp_path: Path, answer: bytes, told: str
) -> None:
    async with healthy_node() as (sql, status):
        oracle = FakePrometheus(told_of(status))
        oracle.forced_answer = answer
        async with (
            run_fake_server(oracle) as peer,
            run_engine(asking(tmp_path, f"http://{peer.endpoint}", [(sql, status)])) as engine,
        ):
            await wait_until(lambda: told in facts(engine).node_metrics_outage)
            assert facts(engine).node_metrics_outage.startswith(
                f"{BEGINS}http://{peer.endpoint}/api/v1/query "
            )
            assert not facts(engine).node_metrics
            oracle.forced_answer = None
            await known(engine, sql)
            assert facts(engine).node_metrics_outage == ""


async def test_without_its_prometheus_a_control_plane_decides_all_the_same(tmp_path: Path) -> None:
    with refusing_port() as nobody:
        async with (
            healthy_node() as (sql, status),
            run_engine(asking(tmp_path, f"http://{nobody}", [(sql, status)])) as engine,
        ):
            await wait_until(lambda: facts(engine).node_metrics_outage != "")
            await wait_for_plans(engine, 1)
            assert engine.nodes()[0].plan.state == "active"
