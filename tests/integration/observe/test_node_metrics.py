"""Node metrics that an engine scrapes from the status ports of fake nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.config.own_tls import ClientTls
from controlplane.config.settings import Settings
from controlplane.observe.node_metrics import observer
from tests.integration.observe.test_status_probe_tls import TlsFiles
from tests.support.controlplane.engine import current_facts, run_engine, settings, wait_for_plans
from tests.support.controlplane.node_metrics import FakeMetricsNode, run_fake_metrics_node
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until

METRICS = {"interval": 0.1, "timeout": 2.0}


def node_settings(*nodes: FakeMetricsNode) -> list[dict[str, Any]]:
    return [{"address": node.address, "status_address": node.status} for node in nodes]


def scrape_settings(directory: Path, *nodes: FakeMetricsNode, **balance: Any) -> Settings:
    return settings(directory, nodes=node_settings(*nodes), balance={"metrics": METRICS, **balance})


async def test_scraped_metrics_match_the_nodes(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as busy, run_fake_metrics_node() as idle:
        await busy.set_metrics(cpu=0.95, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=4)
        async with run_engine(scrape_settings(tmp_path, busy, idle)) as engine:
            await wait_until(
                lambda: all(node.address in current_facts(engine).node_metrics for node in (busy, idle))
            )
            await wait_until(lambda: current_facts(engine).node_metrics[busy.address].cpu is not None)
            metrics = current_facts(engine).node_metrics[busy.address]
            assert metrics.cpu_quota == 4
            for metric, value in (
                (metrics.cpu, 0.95),
                (metrics.memory, 0.8),
                (metrics.pd_failures, 0.5),
                (metrics.tikv_failures, 0.4),
            ):
                assert metric is not None
                # The engine and the node differ by milliseconds in the time of a sample.
                assert metric.value == pytest.approx(value, rel=0.1)
            idle_memory = current_facts(engine).node_metrics[idle.address].memory
            assert idle_memory is not None
            assert idle_memory.value == pytest.approx(0.1)
            assert current_facts(engine).node_metrics_outage == ""


async def test_scraping_uses_the_tls_settings_of_the_status_check(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    tls = {"ca": files.ca, "cert": files.directory / "client.pem", "key": files.directory / "client.key"}
    files.server.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    files.server.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    server_tls = ClientTls(ca=files.ca, cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    async with run_fake_metrics_node(server_tls) as node:
        status = {"tls": True, "client_tls": tls, "enabled": False}
        config = settings(
            tmp_path, nodes=node_settings(node), balance={"metrics": METRICS}, health={"status": status}
        )
        async with run_engine(config) as engine:
            await wait_until(lambda: node.address in current_facts(engine).node_metrics)


async def test_node_without_a_status_port_has_no_metrics(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as scraped, run_fake_metrics_node() as without_status:
        nodes = [*node_settings(scraped), {"address": without_status.address}]
        config = settings(tmp_path, nodes=nodes, balance={"metrics": METRICS})
        async with run_engine(config) as engine:
            await wait_until(lambda: scraped.address in current_facts(engine).node_metrics)
            assert without_status.address not in current_facts(engine).node_metrics
            assert current_facts(engine).node_metrics_outage == ""


async def test_last_metrics_stay_during_an_outage(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as node, run_engine(scrape_settings(tmp_path, node)) as engine:
        events = engine.events.subscribe()
        await wait_until(lambda: node.address in current_facts(engine).node_metrics)
        node.close()
        await wait_until(lambda: current_facts(engine).node_metrics_outage != "")
        assert current_facts(engine).node_metrics_outage.startswith(
            f"node metrics are unavailable; last error: http://{node.status}/metrics cannot"
        )
        last_metrics = current_facts(engine).node_metrics[node.address]
        await wait_for_plans(engine, 1)
        assert current_facts(engine).node_metrics[node.address] == last_metrics
        async for event in events:
            if event.kind == "node_metrics.outage":
                break
        await node.open()
        async for event in events:
            if event.kind == "node_metrics.outage_over":
                break
        assert current_facts(engine).node_metrics_outage == ""


async def test_one_unreachable_node_is_not_an_outage(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as node, run_fake_metrics_node() as other_node:
        unreadable = other_node.address
        with refusing_port() as closed_port:
            unreachable = {"address": unreadable, "status_address": closed_port}
            config = settings(
                tmp_path,
                nodes=[*node_settings(node), unreachable],
                balance={"metrics": METRICS},
                health={"status": {"enabled": False}},
            )
            async with run_engine(config) as engine:
                await wait_until(
                    lambda: engine._observers._node_metrics._consecutive_failures.get(unreadable, 0) >= 4
                )
                assert current_facts(engine).node_metrics.keys() == {node.address}
                assert current_facts(engine).node_metrics_outage == ""


async def test_scraping_is_disabled_above_the_node_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MAX_SCRAPED_NODES", 1)
    async with run_fake_metrics_node() as node, run_fake_metrics_node() as other_node:
        config = scrape_settings(tmp_path, node)
        two_nodes = scrape_settings(tmp_path, node, other_node)
        async with run_engine(config, load_settings=lambda: two_nodes) as engine:
            await wait_until(lambda: node.address in current_facts(engine).node_metrics)
            await engine.reload()
            await wait_until(lambda: current_facts(engine).node_metrics_outage != "")
            assert current_facts(engine).node_metrics_outage == (
                "node metrics are disabled: 2 nodes exceed the limit of 1 for direct scraping;"
                " set balance.prometheus.url to read the metrics from Prometheus"
            )
            assert current_facts(engine).node_metrics == {}


async def test_removed_node_is_forgotten(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as kept, run_fake_metrics_node() as removed:
        config = scrape_settings(tmp_path, kept)
        async with run_engine(
            scrape_settings(tmp_path, kept, removed), load_settings=lambda: config
        ) as engine:
            await wait_until(
                lambda: current_facts(engine).node_metrics.keys() == {kept.address, removed.address}
            )
            await engine.reload()
            await wait_until(lambda: current_facts(engine).node_metrics.keys() == {kept.address})


@pytest.mark.parametrize("balance", [{"policy": "connection"}, {"metrics": {"enabled": False}}])
async def test_scraping_follows_the_balance_policy_after_reload(
    tmp_path: Path, balance: dict[str, Any]
) -> None:
    async with run_fake_metrics_node() as node:
        enabled, disabled = scrape_settings(tmp_path, node), scrape_settings(tmp_path, node, **balance)
        reloads = [disabled, enabled]
        async with run_engine(disabled, load_settings=reloads.pop) as engine:
            await wait_for_plans(engine)
            assert (current_facts(engine).node_metrics, current_facts(engine).node_metrics_outage) == ({}, "")
            await engine.reload()
            await wait_until(lambda: node.address in current_facts(engine).node_metrics)
            await engine.reload()
            await wait_until(lambda: not current_facts(engine).node_metrics)
            assert current_facts(engine).node_metrics_outage == ""
