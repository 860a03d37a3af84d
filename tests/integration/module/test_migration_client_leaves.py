"""A client disconnects while its session migrates and a node does not answer: nothing waits for that node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.clients.server import PemFiles
from tests.support.migration.fault_envoy import (
    VARIABLE_VALUE,
    FaultEnvoys,
    run_fresh_envoy,
    to_host,
)
from tests.support.migration.scripted_node import ScriptedNode, reset_and_wait
from tests.support.module.bootstrap import Host, publish_nodes
from tests.support.module.envoy import client_tls_config, connect_with_tls, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

in_module = pytest.mark.asyncio(loop_scope="module")

QUIT = frame(0, bytes((MySqlCommand.QUIT,)))
INSERT = frame(0, bytes((MySqlCommand.QUERY,)) + b"insert 5")
LESS_THAN_EXPORT_TIMEOUT_SECONDS = 1.5
"""After the export timeout (2 s), a migration releases its slots even if its client stays."""


async def leave(client: RawClient, how: str) -> None:
    if how == "RST":
        await reset_and_wait(client.writer.get_extra_info("socket"), client.writer.transport.abort)
        return
    if how == "COM_QUIT and FIN":
        client.writer.write(QUIT)
    client.writer.write_eof()


@pytest.mark.parametrize("how", ["FIN", "RST", "COM_QUIT and FIN"])
@pytest.mark.parametrize("step", ["export", "login", "states", "undo"])
@in_module
async def test_session_ends_although_a_node_does_not_answer(
    fault_envoys: FaultEnvoys, step: str, how: str
) -> None:
    """In `export` and `undo`, the old node does not answer, in the other steps the new node."""
    async with (await fault_envoys.envoy_for(step)).scenario(f"{how} without an answer") as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step(step)
        silent = await gate.wait_reached()
        await leave(scenario.client, how)
        await with_timeout(silent.wait_until_closed())
        # The silent connection still waits at its gate.
        await wait_until(lambda: scenario.old.open_connections + scenario.new.open_connections == 1)
        if how != "RST":
            assert await with_timeout(scenario.client.reader.read()) == b""


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.asyncio
async def test_next_session_migrates_at_once_when_a_client_leaves(tmp_path: Path, how: str) -> None:
    """Only one session may migrate at a time, and its old node does not answer."""
    async with (
        run_fresh_envoy(tmp_path, policy={"moves_at_once": 1}) as envoy,
        envoy.scenario() as scenario,
    ):
        envoy.descriptors = 1 << 30
        other = await envoy.connect_on(scenario.old)
        gate = await scenario.reach_step("export")
        silent = await gate.wait_reached()
        is_first = silent.user_variable == VARIABLE_VALUE
        await leave(scenario.client if is_first else other, how)
        await wait_until(scenario.new.migration_completed.is_set, LESS_THAN_EXPORT_TIMEOUT_SECONDS)
        assert scenario.old.export_count == 2
        other.writer.transport.abort()


@in_module
async def test_statement_of_a_client_that_leaves_runs_once(fault_envoys: FaultEnvoys) -> None:
    async with (await fault_envoys.envoy_for("export")).scenario("FIN behind a statement") as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step("export")
        scenario.client.writer.write(INSERT)
        scenario.client.writer.write_eof()
        gate.proceed()
        await scenario.expect_insert_ok(5)
        await scenario.expect_ended()
        assert (scenario.old.statements + scenario.new.statements).count(b"insert 5") == 1


@pytest.mark.parametrize("last", [b"", QUIT, INSERT], ids=["FIN", "COM_QUIT", "statement"])
@pytest.mark.asyncio
async def test_client_with_tls_leaves(tmp_path: Path, last: bytes) -> None:
    """Only after decryption does the module know whether the client has sent a statement."""
    endpoints = tmp_path / "endpoints.json"
    certificates = PemFiles.create(tmp_path / "certificates")
    config = replace(client_tls_config(certificates, allow_cleartext_backend=True), endpoints=endpoints)
    old, new = ScriptedNode("old.test:4000"), ScriptedNode("new.test:4000")
    async with old.listening(), new.listening():
        hosts = [to_host(old), Host(new.endpoint, new.name, state="draining")]
        async with run_envoy(tmp_path, hosts, config) as proxy:
            client = await connect_with_tls(proxy, certificates)
            gate = old.pause_at("export")
            publish_nodes(endpoints, [Host(old.endpoint, old.name, state="draining"), to_host(new)])
            silent = await gate.wait_reached()
            client.writer.write(last)
            client.writer.transport.abort()
            if last == INSERT:
                gate.proceed()
                await wait_until(lambda: b"insert 5" in new.statements)
            else:
                await with_timeout(silent.wait_until_closed())
                assert not new.statements
                gate.proceed()
            await wait_until(lambda: not (old.open_connections or new.open_connections))
