"""Rollouts with real commands, stand-ins and clients: how they go, and how each kind of failure ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pymysql
import pytest
import pytest_asyncio

from bench.sysbench_load.clients import SysbenchLoad
from bench.sysbench_load.table import DATABASE, make_table
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from tests.support.controlplane.cli_process import run_tidevoy, start_tidevoy
from tests.support.e2e.cluster import get_events, in_service, run_cluster
from tests.support.e2e.restart_action import (
    NEW_VERSION,
    ROLLOUT_REQUEST,
    RestartCommand,
    control_rollout,
    fail_with,
    get_rollout,
    restart_node,
    restart_with_version,
    stage_by_node,
    start_rollout,
    stop_node,
    wait_for_event,
    wait_for_phase,
    wait_for_rollout,
)

OLD = "v8.5.3"
NODES = 5
CLIENTS = 16
PATIENCE = 150.0  # seconds for a whole rollout under load


@pytest.fixture
def emptied(mariadb: MariaDb) -> Iterator[None]:
    """Behind the test the MariaDB that all tests share has no tables of sysbench's."""
    yield
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        connection.query(f"drop database if exists {DATABASE}")


QUICK = {
    "balance": {"slow_start": 1},
    "health": {"sql": {"interval": 0.2}, "status": {"interval": 0.2}},
}


async def equally_weighted(stack: LocalCluster) -> bool:
    """Whether the weights that Envoys have been sent are the same for all nodes."""
    return len({node["published_weight"] for node in (await stack.nodes()).values()}) == 1


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("emptied")
async def test_all_nodes_are_upgraded_under_load(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    async with RestartCommand(tmp_path / "action").serving() as restarter:
        clustered = run_cluster(
            tmp_path / "cluster",
            mariadb,
            nodes=NODES,
            arguments=signing.arguments,
            settings={**QUICK, "rollouts": restarter.settings},
        )
        async with clustered as stack:
            restarter.nodes = lambda: stack.tidb
            await make_table(mariadb.port, tmp_path / "load", rows=1_000)
            # During slow start a node might get no session at all, and its step would have none to move.
            await stack.wait_until(lambda: equally_weighted(stack), "the end of the slow start")
            load = SysbenchLoad(1_000, CLIENTS)
            async with load.running(stack.sql_port, tmp_path / "load") as working:
                command = await start_tidevoy(
                    stack.control_plane.api_url,
                    *("rollout", "start", "--nodes", "all", "--action", "restart", "--version", NEW_VERSION),
                    *("--healthy-for", "1s", "--wait"),
                )
                try:
                    async with asyncio.timeout(PATIENCE):
                        out, err = (text.decode() for text in await command.communicate())
                finally:
                    if command.returncode is None:
                        command.kill()
                        await command.wait()
                working.raise_if_ended()
                tally = await working.stop()
            assert command.returncode == 0, (out, err, await stack.nodes())
            assert (tally.errors, tally.reconnects) == (0, 0)
            assert tally.transactions > 0
            nodes = await stack.nodes()
            assert {node["version"] for node in nodes.values()} == {NEW_VERSION}
            assert {node["drain"] is None for node in nodes.values()} == {True}
            runs = restarter.runs()
            assert sorted(run.address for run in runs) == sorted(nodes)
            (name,) = {run.rollout for run in runs}
            rollout = await get_rollout(stack.api, name)
            # No session was left when its node was restarted, and each node was left by some.
            assert [step["closed"] for step in rollout["steps"]] == [0] * NODES
            moved = [step["moved"] for step in rollout["steps"]]
            assert min(moved) > 0, moved
            for node in stack.tidb:
                assert re.search(rf"^{node.address} +done .*{OLD} -> {NEW_VERSION}", out, re.MULTILINE), out
                assert f"tidevoy: {node.address} draining" in err
            assert out.splitlines()[-1].startswith(f"rollout {name} (restart to {NEW_VERSION}, all, by ")
            assert [event["subject"] for event in await get_events(stack, "rollout.done")] == [name]


@dataclass
class Site:
    """Three nodes without load, whose restarts go as the test wants."""

    stack: LocalCluster
    restarter: RestartCommand

    @property
    def addresses(self) -> list[str]:
        """In the order in which `all` takes them."""
        return sorted(node.address for node in self.stack.tidb)

    def node(self, address: str) -> Tidb:
        return next(node for node in self.stack.tidb if node.address == address)

    async def drained(self) -> set[str]:
        """The nodes that are drained, by whomever."""
        return {address for address, node in (await self.stack.nodes()).items() if node["drain"] is not None}

    async def start(self, address: str) -> None:
        """Start a node that was stopped, with the new version."""
        node = self.node(address)
        node.arguments = (*node.arguments, f"--version={NEW_VERSION}")
        await node.launch()

    async def passes(self, address: str) -> bool:
        """Whether both checks of a node pass."""
        health = (await self.stack.nodes())[address]["health"]
        return all(health[check]["outcome"] == "pass" for check in ("status", "sql"))

    async def clear(self) -> None:
        """What a test that failed has left: the tests behind it need not fail for that."""
        for rollout in (await self.stack.api.get("/v1/rollouts")).json()["rollouts"]:
            if rollout["phase"] not in ("done", "aborted"):
                await control_rollout(self.stack.api, rollout["id"], "abort")
                await wait_for_phase(self.stack.api, rollout["id"], "aborted")
        for address in self.addresses:
            if not self.node(address).is_running:
                await self.start(address)
        for address in await self.drained():
            (await self.stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb, signing: SessionCertificate
) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    async with RestartCommand(directory / "action").serving() as restarter:
        settings = {**QUICK, "rollouts": restarter.settings}
        clustered = run_cluster(
            directory / "cluster", mariadb, nodes=3, arguments=signing.arguments, settings=settings
        )
        async with clustered as stack:
            restarter.nodes = lambda: stack.tidb
            yield Site(stack, restarter)


@pytest_asyncio.fixture(loop_scope="module")
async def site(running: Site) -> AsyncIterator[Site]:
    """All nodes in service, drained by nobody; afterwards too."""
    running.restarter.reset_behaviors()
    await running.clear()
    await running.stack.wait_until(lambda: in_service(running.stack, 3), "all nodes in service", 30)
    yield running
    assert await running.drained() == set()
    await running.stack.wait_until(lambda: in_service(running.stack, 3), "all nodes in service", 30)


in_module = pytest.mark.asyncio(loop_scope="module")


@in_module
async def test_an_action_that_fails_pauses_and_resume_tries_again(site: Site) -> None:
    api, (first, second, _) = site.stack.api, site.addresses
    site.restarter.set_behavior(first, fail_with("no space left on device"))
    name = await start_rollout(api, nodes=f"{first},{second}")
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending"}
    assert "no space left on device" in paused["reason"]
    assert first in paused["reason"]
    assert await site.drained() == {first}  # nobody gets a node of which nobody knows how it is
    site.restarter.reset_behaviors()
    await control_rollout(api, name, "resume")
    done = await wait_for_phase(api, name, "done")
    assert stage_by_node(done) == {first: "done", second: "done"}
    assert [(run.address, run.attempt) for run in site.restarter.runs(name)] == [
        (first, "1"),
        (first, "2"),
        (second, "1"),
    ]


@in_module
async def test_a_node_that_comes_back_with_another_version_pauses_and_abort_undrains_it(site: Site) -> None:
    api, (first, second, third) = site.stack.api, site.addresses
    site.restarter.set_behavior(first, restart_with_version(OLD))
    name = await start_rollout(api)
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending", third: "pending"}
    assert OLD in paused["reason"]
    assert NEW_VERSION in paused["reason"]
    assert await site.drained() == {first}
    await control_rollout(api, name, "abort")
    aborted = await wait_for_phase(api, name, "aborted")
    assert stage_by_node(aborted) == {first: "failed", second: "skipped", third: "skipped"}
    assert await site.drained() == set()
    assert len(site.restarter.runs(name)) == 1


@in_module
async def test_a_node_that_never_comes_back_pauses_and_once_it_is_back_it_is_not_restarted_again(
    site: Site,
) -> None:
    api, (first, second, _) = site.stack.api, site.addresses
    site.restarter.set_behavior(first, stop_node)
    name = await start_rollout(api, nodes=f"{first},{second}", return_deadline_seconds=3)
    paused = await wait_for_phase(api, name, "paused")
    assert stage_by_node(paused) == {first: "failed", second: "pending"}
    assert first in paused["reason"]
    site.restarter.reset_behaviors()
    await site.start(first)
    await site.stack.wait_until(lambda: site.passes(first), "the node to pass its checks", 20)
    await control_rollout(api, name, "resume")
    await wait_for_phase(api, name, "done")
    assert [run.address for run in site.restarter.runs(name)] == [first, second]


@in_module
async def test_a_pause_lets_the_node_that_is_restarted_go_on_and_takes_no_other(site: Site) -> None:
    api, (first, second, _) = site.stack.api, site.addresses
    go = asyncio.Event()
    site.restarter.set_behavior(first, wait_for_event(go))
    name = await start_rollout(api, nodes=f"{first},{second}")
    await site.restarter.wait_started(first)
    paused = await control_rollout(api, name, "pause")
    assert paused["phase"] == "paused"
    assert paused["reason"]
    go.set()
    await wait_for_rollout(api, name, lambda rollout: stage_by_node(rollout)[first] == "done")
    assert stage_by_node(await get_rollout(api, name)) == {first: "done", second: "pending"}
    again = await api.post(f"/v1/rollouts/{name}/resume")
    assert again.json()["phase"] == "running"
    await wait_for_phase(api, name, "done")
    assert [run.address for run in site.restarter.runs(name)] == [first, second]


@in_module
async def test_an_abort_takes_back_what_the_rollout_drained_and_nothing_else(site: Site) -> None:
    api, (first, second, third) = site.stack.api, site.addresses
    (await api.post(f"/v1/nodes/{third}/drain")).raise_for_status()
    go = asyncio.Event()
    site.restarter.set_behavior(first, wait_for_event(go, restart_node))
    name = await start_rollout(api, force=True)  # with that one drained, only two are in service
    await site.restarter.wait_started(first)
    await control_rollout(api, name, "abort")
    go.set()
    aborted = await wait_for_phase(api, name, "aborted")
    assert stage_by_node(aborted)[second] == stage_by_node(aborted)[third] == "skipped"
    assert await site.drained() == {third}
    (await api.post(f"/v1/nodes/{third}/undrain")).raise_for_status()
    assert [run.address for run in site.restarter.runs(name)] == [first]


@in_module
async def test_a_node_that_an_operator_drained_is_restarted_and_stays_drained(site: Site) -> None:
    api, (first, _, _) = site.stack.api, site.addresses
    (await api.post(f"/v1/nodes/{first}/drain")).raise_for_status()
    name = await start_rollout(api, nodes=first)
    await wait_for_phase(api, name, "done")
    assert await site.drained() == {first}
    assert [run.address for run in site.restarter.runs(name)] == [first]
    (await api.post(f"/v1/nodes/{first}/undrain")).raise_for_status()


@in_module
async def test_manual_waits_until_somebody_restarts_the_node(site: Site) -> None:
    api, (first, _, _) = site.stack.api, site.addresses
    name = await start_rollout(api, nodes=first, action="manual")
    await wait_for_rollout(api, name, lambda rollout: stage_by_node(rollout)[first] == "returning")
    await site.node(first).restart()
    done = await wait_for_phase(api, name, "done")
    assert done["steps"][0]["started_before"] is not None
    assert site.restarter.runs(name) == []


@in_module
async def test_the_control_plane_restarts_in_the_middle_and_the_rollout_goes_on(site: Site) -> None:
    api, (first, second, _) = site.stack.api, site.addresses
    go = asyncio.Event()
    site.restarter.set_behavior(first, wait_for_event(go))
    name = await start_rollout(api, nodes=f"{first},{second}")
    await site.restarter.wait_started(first)
    await site.stack.control_plane.kill()
    go.set()  # the restart that was asked for goes on without who asked for it
    await site.stack.control_plane.launch()
    done = await wait_for_phase(api, name, "done")
    assert stage_by_node(done) == {first: "done", second: "done"}
    assert [run.address for run in site.restarter.runs(name)] == [first, second]


@in_module
async def test_a_dry_run_says_what_would_be_done_and_does_nothing(site: Site) -> None:
    asked = (
        "rollout",
        "start",
        "--nodes",
        "all",
        "--action",
        "restart",
        "--version",
        NEW_VERSION,
        "--dry-run",
    )
    shown = await run_tidevoy(site.stack.control_plane.api_url, *asked)
    assert shown.exit_code == 0, shown
    assert shown.stdout.splitlines()[0] == f"3 nodes, 1 at a time: {', '.join(site.addresses)}"
    refused = await site.stack.api.post("/v1/rollouts", json={**ROLLOUT_REQUEST, "max_unavailable": 3})
    assert refused.status_code == 409, refused.text
    assert refused.json()["type"] == "urn:tidevoy:problem:rollout-refused"
    assert refused.json()["reasons"]
    assert await site.drained() == set()
