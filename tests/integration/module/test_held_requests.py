"""Requests that rules hold: they are answered or run whatever happens to the session meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox.tidb_sim.packets import AUTOCOMMIT, MySqlCommand, frame, ok
from tests.support.fake_servers import reset_connection, run_fake_server
from tests.support.load.client_packets import query
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import (
    accept_login,
    connect_logged_in,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.module.statement_rules import (
    BLOCK_FORBIDDEN,
    BLOCKED,
    TOO_LONG,
    RecordingNode,
    Request,
    error_of,
)
from tests.support.module.switchable_envoy import run_switchable

_SLOW_AND_FORBIDDEN = query("select slow") + query("delete from forbidden_1")


async def test_statement_that_is_too_long_is_answered_when_it_is_complete(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_switchable(node.handler, tmp_path, {"rules": [BLOCK_FORBIDDEN]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        request = Request(bytes((MySqlCommand.QUERY,)) + b"x" * (70 << 20))
        client.writer.write(request.packets + frame(0, bytes((MySqlCommand.PING,))))
        sequence, answer = await with_timeout(client.read_packet())
        assert (sequence, error_of(answer)) == (request.response_sequence, TOO_LONG)
        assert error_of((await with_timeout(client.read_packet()))[1]) == 0, "the session goes on"
        assert error_of(await with_timeout(client.query("delete from forbidden_1"))) == BLOCKED
        assert node.requests == []


async def test_statements_that_wait_have_a_memory_limit_together(tmp_path: Path) -> None:
    node = RecordingNode(gate=asyncio.Event())
    assert node.gate is not None
    limit = {"name": "slow", "pattern": "slow", "limit": {"concurrent": 1, "wait": 30}}
    settings = {"rules": [limit], "max_held_bytes": 4 << 20}
    async with run_switchable(node.handler, tmp_path, settings) as switchable:
        running, waiting, other = [await connect_logged_in(switchable.envoy) for _ in range(3)]
        running.writer.write(query("select slow"))
        await with_timeout(node.slow_arrived.wait())
        long = f"select 'slow', '{'x' * (3 << 20)}'"
        waiting.writer.write(query(long))
        await switchable.envoy.wait_for_metrics({("rule_hits", "false", "slow"): 2})
        assert error_of(await with_timeout(other.query("select 1 -- " + "x" * (2 << 20)))) == TOO_LONG
        assert error_of(await with_timeout(other.query("select 1 -- " + "x" * (1 << 19)))) == 0
        node.gate.set()
        assert error_of((await with_timeout(waiting.read_packet()))[1]) == 0
        assert error_of(await with_timeout(other.query("select 1 -- " + "x" * (2 << 20)))) == 0


async def test_held_statement_is_answered_before_a_drain_ends_the_session(tmp_path: Path) -> None:
    node = RecordingNode(gate=asyncio.Event())
    assert node.gate is not None
    rules = {"rules": [BLOCK_FORBIDDEN]}
    async with run_switchable(node.handler, tmp_path, rules) as switchable:
        client = await connect_logged_in(switchable.envoy)
        client.writer.write(_SLOW_AND_FORBIDDEN)
        await with_timeout(node.slow_arrived.wait())
        await switchable.apply({**rules, "drain": True, "end_timeout": 60})
        await switchable.envoy.wait_for_metrics({("drain_phase",): 2})
        node.gate.set()
        assert [error_of((await with_timeout(client.read_packet()))[1]) for _ in range(2)] == [0, BLOCKED]
        assert await read_to_end(client) == b""


async def test_held_statement_is_answered_while_its_node_drains(tmp_path: Path) -> None:
    node = RecordingNode(gate=asyncio.Event())
    assert node.gate is not None
    rules = {"rules": [BLOCK_FORBIDDEN]}
    endpoints = tmp_path / "endpoints.json"
    config = ModuleConfig(endpoints=endpoints, live_settings=rules)
    async with run_fake_server(node.handler) as server:
        active, draining = Host(server.endpoint, "n"), Host(server.endpoint, "n", state="draining")
        async with run_envoy(tmp_path, [active], config) as envoy:
            client = await connect_logged_in(envoy)
            for _ in range(6):  # from then on, the module itself reads from the connection
                await with_timeout(client.query("select 1"))
            client.writer.write(_SLOW_AND_FORBIDDEN)
            await with_timeout(node.slow_arrived.wait())
            async with envoy.wait_applied():
                publish_nodes(endpoints, [draining], live_settings=rules)
            node.gate.set()
            assert [error_of((await with_timeout(client.read_packet()))[1]) for _ in range(2)] == [0, BLOCKED]


async def test_statement_of_a_client_that_has_gone_does_not_run(tmp_path: Path) -> None:
    node = RecordingNode()
    limit = {"name": "rare", "pattern": "rare", "limit": {"per_second": 0.5, "wait": 30}}
    async with run_switchable(node.handler, tmp_path, {"rules": [limit]}) as switchable:
        first, gone, last = [await connect_logged_in(switchable.envoy) for _ in range(3)]
        assert error_of(await with_timeout(first.query("select rare"))) == 0
        gone.writer.write(query("insert rare"))
        await switchable.envoy.wait_for_metrics({("rule_hits", "false", "rare"): 2})
        reset_connection(gone.writer)
        assert error_of(await with_timeout(last.query("select rare 2"))) == 0
        assert error_of(await with_timeout(last.query("select rare 3"))) == 0
        assert [payload[1:] for payload in node.requests] == [
            b"select rare",
            b"select rare 2",
            b"select rare 3",
        ]


async def test_session_that_cannot_be_followed_any_more_still_ends_when_idle(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        answers = 1
        while True:
            _, payload = await node.read_packet()
            if payload[0] == MySqlCommand.INIT_DB:
                await may_answer.wait()
                answers = 2  # after one too many, the module cannot follow the session
            writer.write(frame(1, ok(AUTOCOMMIT)) * answers)

    rule = {"name": "log", "pattern": "x", "database": ["shop"], "log": True}
    config = ModuleConfig(live_settings={"rules": [rule], "idle_timeout": 1})
    async with run_fake_server(serve) as server, run_envoy(tmp_path, [server.endpoint], config) as envoy:
        client = await connect_logged_in(envoy)
        client.writer.write(frame(0, b"\x02db") + query("select 1"))
        await envoy.wait_for_metrics({("sessions", server.endpoint, "busy"): 1})
        may_answer.set()
        await read_to_end(client)
