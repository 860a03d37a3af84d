"""Rules for statements: no statement that a rule blocks reaches a node, however a client sends it.

With TIDEVOY_SOAK=1, clients send 100,000 requests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import MAX_PACKET_PAYLOAD, Capability, MySqlCommand, frame, frames
from tests.support.fake_servers import run_fake_server
from tests.support.load.client_packets import query
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import connect_logged_in, read_to_end, run_envoy, with_timeout
from tests.support.module.statement_rules import (
    BLOCK_FORBIDDEN,
    BLOCKED,
    LAST_PREPARED,
    LOAD_DATA,
    QUERY_ATTRIBUTES,
    TOO_LONG,
    UNKNOWN_STATEMENT,
    RecordingNode,
    StatementGenerator,
    attribute_block,
    error_of,
    execute,
    lenenc_int_pair,
    run_round,
)
from tests.support.module.switchable_envoy import run_switchable
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import CAPABILITIES

_LIMIT_REACHED = 1226
_REQUESTS = 100_000 if SOAK else 3_000
_CLIENTS = 4


@pytest.mark.timeout(900 if SOAK else 120)
@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "query attributes"])
async def test_no_forbidden_statement_reaches_the_node(tmp_path: Path, attributes: bool) -> None:
    node = RecordingNode(attributes=attributes)
    config = ModuleConfig(live_settings={"rules": [BLOCK_FORBIDDEN]})
    async with (
        run_fake_server(node.handler) as server,
        run_envoy(tmp_path, [server.endpoint], config) as envoy,
    ):

        async def run_client(number: int) -> int:
            client = await envoy.connect()
            capabilities = CAPABILITIES | QUERY_ATTRIBUTES if attributes else CAPABILITIES
            assert (await with_timeout(client.login(capabilities)))[0] == 0
            huge = 1 / 2_000 if SOAK else 1 / 500
            generator = StatementGenerator(number, attributes=attributes, huge=huge)
            sent = 0
            while sent < _REQUESTS / _CLIENTS:
                sent += await run_round(client, generator)
            return sent

        sent = sum(await asyncio.gather(*(run_client(number) for number in range(_CLIENTS))))
        arrived = [payload for payload in node.requests if b"forbidden_" in payload.lower()]
        print(f"{sent} requests, {len(node.requests)} with statements have arrived")
        assert not arrived, arrived[:3]
        assert len(node.requests) > sent / 4


async def test_rewritten_statement_keeps_its_attributes(tmp_path: Path) -> None:
    rename = {"name": "rename", "rewrite": {"tables": {"orders": "orders_2025"}}}
    replace = {"replace": "select /*+ x() */ $1 from t"}
    hint = {"name": "hint", "pattern": r"^select (\w, \w) from t$", "rewrite": replace}
    node = RecordingNode(attributes=True)
    async with run_switchable(node.handler, tmp_path, {"rules": [hint, rename]}) as switchable:
        client = await switchable.envoy.connect()
        await with_timeout(client.login(CAPABILITIES | QUERY_ATTRIBUTES))
        head = lenenc_int_pair(1) + attribute_block(["value"])
        texts = b"SELECT a, b FROM t; update orders set x = 1"
        await with_timeout(client.send_command(MySqlCommand.QUERY, head + texts))
        await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"select orders.a from orders"))
        assert node.requests == [
            b"\x03" + head + b"select /*+ x() */ a, b from t; update `orders_2025` set x = 1",
            b"\x16select `orders_2025`.a from `orders_2025`",
        ]


async def test_statement_waits_for_a_place_or_is_refused(tmp_path: Path) -> None:
    node = RecordingNode(gate=asyncio.Event())
    assert node.gate is not None
    rules = [
        {"name": "wait", "pattern": "slow", "user": ["root"], "limit": {"concurrent": 1, "wait": 30}},
        {"name": "refuse", "pattern": "rare", "limit": {"per_second": 0.01}},
    ]
    async with run_switchable(node.handler, tmp_path, {"rules": rules}) as switchable:
        first, second = [await connect_logged_in(switchable.envoy) for _ in range(2)]
        running = asyncio.create_task(first.query("select slow"))
        await with_timeout(node.slow_arrived.wait())
        # The client sends another statement ahead, which stays behind the first one.
        second.writer.write(b"\x0c\0\0\0\x03select slow\x01\0\0\0\x0e")
        third = await connect_logged_in(switchable.envoy)
        assert error_of(await with_timeout(third.query("select 1"))) == 0
        assert len(node.requests) == 2, "the second slow statement waits"
        node.gate.set()
        assert error_of(await with_timeout(running)) == 0
        assert [error_of((await with_timeout(second.read_packet()))[1]) for _ in range(2)] == [0, 0]
        assert [error_of(await with_timeout(second.query("select rare"))) for _ in range(2)] == [
            0,
            _LIMIT_REACHED,
        ]
        assert error_of(await with_timeout(second.query("select 1"))) == 0, "the session goes on"


async def test_rules_apply_at_once_to_sessions_and_to_what_they_have_prepared(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_switchable(node.handler, tmp_path) as switchable:
        client = await connect_logged_in(switchable.envoy)
        text = b"delete from forbidden_1"
        prepared = await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, text))
        statement = execute(int.from_bytes(prepared[1:5], "little"))[1:]

        async def run() -> int:
            return error_of(await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, statement)))

        assert await run() == 0
        await switchable.apply({"rules": [{**BLOCK_FORBIDDEN, "dry_run": True}]})
        assert await run() == 0
        await switchable.apply({"rules": [BLOCK_FORBIDDEN]})
        assert await run() == BLOCKED
        await switchable.envoy.wait_for_metrics(
            {("rule_hits", "true", "no-forbidden"): 1, ("rule_hits", "false", "no-forbidden"): 1}
        )
        await switchable.apply({})
        assert await run() == 0


async def test_rule_for_a_database_follows_use(tmp_path: Path) -> None:
    node = RecordingNode()
    rule = {"name": "no-shop", "pattern": "^drop", "database": ["shop"], "block": {}}
    async with run_switchable(node.handler, tmp_path) as switchable:
        client = await connect_logged_in(switchable.envoy)
        await with_timeout(client.query("use `Shop`"))
        await switchable.apply({"rules": [rule]})
        assert error_of(await with_timeout(client.query("drop table t"))) == BLOCKED
        assert error_of(await with_timeout(client.query("use other; drop table t"))) == 0
        assert error_of(await with_timeout(client.query("use shop; drop table t"))) == BLOCKED
        assert error_of(await with_timeout(client.send_command(MySqlCommand.INIT_DB, b"other"))) == 0
        assert error_of(await with_timeout(client.query("drop table t"))) == 0


async def test_database_is_known_from_a_prepared_use_that_ran_before_there_were_rules(tmp_path: Path) -> None:
    node = RecordingNode()
    rule = {"name": "no-shop", "pattern": "^drop", "database": ["shop"], "block": {}}
    async with run_switchable(node.handler, tmp_path) as switchable:
        client = await connect_logged_in(switchable.envoy)
        prepared = await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"use shop"))
        use = execute(int.from_bytes(prepared[1:5], "little"))[1:]
        assert error_of(await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, use))) == 0
        await switchable.apply({"rules": [rule]})
        assert error_of(await with_timeout(client.query("drop table t"))) == BLOCKED


async def test_last_prepared_statement_is_unknown_after_a_refused_one(tmp_path: Path) -> None:
    node = RecordingNode()
    limit = {"name": "rare", "pattern": "rare", "commands": ["prepare"], "limit": {"per_second": 0.001}}
    async with run_switchable(node.handler, tmp_path, {"rules": [limit, BLOCK_FORBIDDEN]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        last = execute(LAST_PREPARED)[1:]
        assert (
            error_of(await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"select rare"))) == 0
        )
        for refused, code in (
            (b"select rare", _LIMIT_REACHED),
            (b"delete from forbidden_1", BLOCKED),
            (b"select 1;" * 2000, TOO_LONG),
            (b"x" * (65 << 20), TOO_LONG),
        ):
            common = await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"select common"))
            assert error_of(common) == 0
            client.writer.write(frames(0, [bytes((MySqlCommand.STMT_PREPARE,)) + refused]))
            assert error_of((await with_timeout(client.read_packet()))[1]) == code
            answer = await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, last))
            assert error_of(answer) == UNKNOWN_STATEMENT
        await with_timeout(client.send_command(MySqlCommand.STMT_PREPARE, b"select common"))
        assert error_of(await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, last))) == 0


async def test_compressed_session_ends_when_there_are_rules(tmp_path: Path) -> None:
    node = RecordingNode()
    offer = Capability.COMPRESS
    node.offered |= offer
    passthrough = {"compression": "passthrough"}
    async with run_fake_server(node.handler) as server:
        config = ModuleConfig(client=passthrough, live_settings={"rules": [BLOCK_FORBIDDEN]})
        async with run_envoy(tmp_path, [server.endpoint], config) as envoy:
            client = await envoy.connect()
            _, greeting = await with_timeout(client.read_packet())
            low = greeting.index(b"\0") + 1 + 4 + 8 + 1
            assert not int.from_bytes(greeting[low : low + 2], "little") & offer
    switched = tmp_path / "switched"
    switched.mkdir()
    async with run_switchable(node.handler, switched, client=passthrough) as switchable:
        client = await switchable.envoy.connect()
        assert (await with_timeout(client.login(CAPABILITIES | offer)))[0] == 0
        await switchable.apply({"rules": [BLOCK_FORBIDDEN]})
        client.writer.write(b"compressed statement")
        assert await read_to_end(client) == b""
        assert node.requests == []


async def test_statement_behind_a_file_is_judged(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_switchable(node.handler, tmp_path, {"rules": [BLOCK_FORBIDDEN]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        for _ in range(3):
            request = await with_timeout(client.send_command(MySqlCommand.QUERY, LOAD_DATA + b" infile 'x'"))
            assert request == b"\xfbfile"
            forbidden = query("delete from forbidden_1")
            client.writer.write(frame(2, b"rows") + frame(3, b"") + forbidden)
            answers = [(await with_timeout(client.read_packet()))[1] for _ in range(2)]
            assert [error_of(answer) for answer in answers] == [0, BLOCKED]
        assert len(node.requests) == 3


@pytest.mark.parametrize("ahead", [b"", frame(0, bytes((MySqlCommand.PING,)))], ids=["alone", "pipelined"])
async def test_no_statement_passes_behind_a_change_of_user(tmp_path: Path, ahead: bytes) -> None:
    node = RecordingNode()
    change = bytes((MySqlCommand.CHANGE_USER,)) + b"other\0\0shop\0\x2d\0mysql_native_password\0"
    forbidden = query("delete from forbidden_1")
    async with run_switchable(node.handler, tmp_path, {"rules": [BLOCK_FORBIDDEN]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        client.writer.write(ahead + frame(0, change) + forbidden)
        await read_to_end(client)
        assert node.requests == []
        client = await connect_logged_in(switchable.envoy)
        client.writer.write(ahead + frame(0, change))
        for _ in range(1 + bool(ahead)):
            assert error_of((await with_timeout(client.read_packet()))[1]) == 0
        assert error_of(await with_timeout(client.query("delete from forbidden_1"))) == BLOCKED
        assert error_of(await with_timeout(client.query("select 1"))) == 0


async def test_command_to_kill_is_judged_as_a_statement(tmp_path: Path) -> None:
    node = RecordingNode()
    rule = {"name": "no-kill", "pattern": r"\bkill\b", "block": {}}
    async with run_switchable(node.handler, tmp_path, {"rules": [rule]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        assert error_of(await with_timeout(client.send_command(0x0C, b"\x05\0\0\0"))) == BLOCKED
        assert node.requests == []


async def test_text_with_too_many_statements_is_refused(tmp_path: Path) -> None:
    node = RecordingNode()
    async with run_switchable(node.handler, tmp_path, {"rules": [BLOCK_FORBIDDEN]}) as switchable:
        client = await connect_logged_in(switchable.envoy)
        assert error_of(await with_timeout(client.query("select 1;" * 900))) == 0
        assert error_of(await with_timeout(client.query("select 1;" * 100_000))) == TOO_LONG
        assert len(node.requests) == 1


async def test_rules_without_effect_let_everything_pass(tmp_path: Path) -> None:
    node = RecordingNode()
    rules = {"rules": [{**BLOCK_FORBIDDEN, "dry_run": True}, {"name": "log", "log": True}]}
    async with run_switchable(node.handler, tmp_path, rules) as switchable:
        client = await connect_logged_in(switchable.envoy)
        for text in ("select 1;" * 2000, "x" * MAX_PACKET_PAYLOAD):
            assert error_of(await with_timeout(client.query(text))) == 0
        unknown = execute(7)[1:]
        assert error_of(await with_timeout(client.send_command(MySqlCommand.STMT_EXECUTE, unknown))) == 0
        assert len(node.requests) == 3
