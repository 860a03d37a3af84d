"""Vital signs that are read from the nodes themselves: an engine, and the status ports of stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.config.settings import ClientTls, Settings
from controlplane.engine.engine import Engine
from controlplane.model.facts import Facts
from controlplane.observe.node_metrics import observer
from tests.integration.observe.test_status_probe_tls import Files
from tests.support.controlplane.engine import run_engine, settings, wait_for_plans
from tests.support.controlplane.node_metrics import FakeMetricsNode, run_fake_metrics_node
from tests.support.fake_servers import refusing_port
from tests.support.waiting import wait_until

METRICS = {"interval": 0.1, "timeout": 2.0}


def nodes_of(*patients: FakeMetricsNode) -> list[dict[str, Any]]:
    return [{"address": one.address, "status_address": one.status} for one in patients]


def reading(directory: Path, *patients: FakeMetricsNode, **balance: Any) -> Settings:
    return settings(directory, nodes=nodes_of(*patients), balance={"metrics": METRICS, **balance})


def facts(engine: Engine) -> Facts:
    return engine._facts.view()


async def test_what_nodes_show_becomes_a_fact_of_each(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as busy, run_fake_metrics_node() as calm:
        await busy.set_metrics(cpu=0.95, memory=0.8, pd_failures=0.5, tikv_failures=0.4, cores=4)
        async with run_engine(reading(tmp_path, busy, calm)) as engine:
            await wait_until(lambda: all(one.address in facts(engine).node_metrics for one in (busy, calm)))
            await wait_until(lambda: facts(engine).node_metrics[busy.address].cpu is not None)
            vitals = facts(engine).node_metrics[busy.address]
            assert vitals.cpu_quota == 4
            for told, value in (
                (vitals.cpu, 0.95),
                (vitals.memory, 0.8),
                (vitals.pd_failures, 0.5),
                (vitals.tikv_failures, 0.4),
            ):
                assert told is not None
                # Samples have our times, a few milliseconds off those at which the node counted.
                assert told.value == pytest.approx(value, rel=0.1)
            calm_memory = facts(engine).node_metrics[calm.address].memory
            assert calm_memory is not None
            assert calm_memory.value == pytest.approx(0.1)
            assert facts(engine).node_metrics_outage == ""


async def test_they_are_read_over_the_tls_of_the_status_check(tmp_path: Path) -> None:
    files = Files(tmp_path)
    tls = {"ca": files.ca, "cert": files.directory / "client.pem", "key": files.directory / "client.key"}
    files.server.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    files.server.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    theirs = ClientTls(ca=files.ca, cert=tmp_path / "server.pem", key=tmp_path / "server.key")
    async with run_fake_metrics_node(theirs) as one:
        status = {"tls": True, "client_tls": tls, "enabled": False}
        wanted = settings(
            tmp_path, nodes=nodes_of(one), balance={"metrics": METRICS}, health={"status": status}
        )
        async with run_engine(wanted) as engine:
            await wait_until(lambda: one.address in facts(engine).node_metrics)


async def test_a_node_without_a_status_port_has_no_vital_signs(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as known, run_fake_metrics_node() as unknown:
        nodes = [*nodes_of(known), {"address": unknown.address}]
        wanted = settings(tmp_path, nodes=nodes, balance={"metrics": METRICS})
        async with run_engine(wanted) as engine:
            await wait_until(lambda: known.address in facts(engine).node_metrics)
            assert unknown.address not in facts(engine).node_metrics
            assert facts(engine).node_metrics_outage == ""


async def test_what_was_known_stays_with_its_time_when_no_node_can_be_read_any_more(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as one, run_engine(reading(tmp_path, one)) as engine:
        events = engine.events()
        await wait_until(lambda: one.address in facts(engine).node_metrics)
        one.close()
        await wait_until(lambda: facts(engine).node_metrics_outage != "")
        assert facts(engine).node_metrics_outage.startswith(
            "no node lets its CPU, memory and health be read; the last one:"
            f" http://{one.status}/metrics cannot"
        )
        kept = facts(engine).node_metrics[one.address]
        await wait_for_plans(engine, 1)
        assert facts(engine).node_metrics[one.address] == kept
        async for event in events:
            if event.kind == "vitals.outage":
                break
        await one.open()
        async for event in events:
            if event.kind == "vitals.outage_over":
                break
        assert facts(engine).node_metrics_outage == ""


async def test_one_node_that_cannot_be_read_is_no_outage(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as one, run_fake_metrics_node() as other:
        with refusing_port() as nobody:
            silent = {"address": other.address, "status_address": nobody}
            wanted = settings(
                tmp_path,
                nodes=[*nodes_of(one), silent],
                balance={"metrics": METRICS},
                health={"status": {"enabled": False}},
            )
            async with run_engine(wanted) as engine:
                await wait_until(
                    lambda: engine._observers._node_metrics._consecutive_failures.get(other.address, 0) >= 4
                )
                assert facts(engine).node_metrics.keys() == {one.address}
                assert facts(engine).node_metrics_outage == ""


async def test_over_so_many_nodes_a_prometheus_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MAX_SCRAPED_NODES", 1)
    async with run_fake_metrics_node() as one, run_fake_metrics_node() as other:
        wanted = reading(tmp_path, one)
        more = reading(tmp_path, one, other)
        async with run_engine(wanted, load_settings=lambda: more) as engine:
            await wait_until(lambda: one.address in facts(engine).node_metrics)
            await engine.reload()
            await wait_until(lambda: facts(engine).node_metrics_outage != "")
            assert facts(engine).node_metrics_outage == (
                "CPU, memory and health are not read: there are 2 nodes, and at most 1 are read directly;"
                " set balance.prometheus.url to read them from a Prometheus"
            )
            assert facts(engine).node_metrics == {}


async def test_a_node_that_left_is_forgotten(tmp_path: Path) -> None:
    async with run_fake_metrics_node() as stays, run_fake_metrics_node() as leaves:
        wanted = reading(tmp_path, stays)
        async with run_engine(reading(tmp_path, stays, leaves), load_settings=lambda: wanted) as engine:
            await wait_until(lambda: facts(engine).node_metrics.keys() == {stays.address, leaves.address})
            await engine.reload()
            await wait_until(lambda: facts(engine).node_metrics.keys() == {stays.address})


@pytest.mark.parametrize("without", [{"policy": "connection"}, {"metrics": {"enabled": False}}])
async def test_a_policy_that_needs_none_reads_none_and_a_reload_can_change_that(
    tmp_path: Path, without: dict[str, Any]
) -> None:
    async with run_fake_metrics_node() as one:
        with_, without_ = reading(tmp_path, one), reading(tmp_path, one, **without)
        wanted = [without_, with_]
        async with run_engine(without_, load_settings=wanted.pop) as engine:
            await wait_for_plans(engine)
            assert (facts(engine).node_metrics, facts(engine).node_metrics_outage) == ({}, "")
            await engine.reload()
            await wait_until(lambda: one.address in facts(engine).node_metrics)
            await engine.reload()
            await wait_until(lambda: not facts(engine).node_metrics)
            assert facts(engine).node_metrics_outage == ""
