"""A fleet with Tidevoy's module: what it tells, what it refuses, Envoys with and without it side by side."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from controlplane.model.traffic import LOGIN_FAILURES
from controlplane.version import VERSION
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.tidb import Tidb
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.clients.server import PemFiles
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import (
    CountingClient,
    MetricKey,
    counting_client,
    error_code,
    get_envoys,
    get_events,
    get_metrics,
    is_up_to_date,
    metric_key,
    reload_settings,
    restart_envoy,
    run_another_envoy,
    run_cluster,
    wait_shown,
)
from tests.support.e2e.sql_load import find_serving_port, run_short_sessions
from tests.support.module.bootstrap import require_module

pytestmark = pytest.mark.timeout(180)

NO_SESSIONS = {"login": 0, "idle": 0, "busy": 0, "transaction": 0, "opaque": 0}
NOT_PINNED = {"transaction": 0, "cursor": 0, "long_data": 0, "opaque": 0, "endless_transactions": 0}
NO_CONNECT_FAILURES = {"connect": 0, "closed": 0, "error": 0, "invalid": 0, "tls": 0, "full": 0}
CURSOR = 1  # CURSOR_TYPE_READ_ONLY
# Nodes are not found dead by checks while a test looks at what Envoys do about them.
PATIENT = {"health": {"sql": {"fall": 100}, "status": {"fall": 100}}}


async def opened(stack: AsyncExitStack, port: int) -> CountingClient:
    """A session of root's, as long as the block lasts."""
    made = await stack.enter_async_context(counting_client(port))
    assert error_code(await made.log_in()) == 0
    return made


async def converse(held: AsyncExitStack, port: int, lock: str) -> list[CountingClient]:
    """What a test can count: sessions in a transaction, with a cursor, idle with a lock, and waiting for it.

    Beside them a wrong password and a client that speaks another protocol.
    """
    transaction, cursor, idle, busy = [await opened(held, port) for _ in range(4)]
    for _ in range(2):
        assert error_code(await transaction.query("do 1")) == 0
    assert error_code(await transaction.send_command(MySqlCommand.PING)) == 0
    assert error_code(await transaction.query("selec 1")) == 1064
    assert error_code(await transaction.query("select * from mysql.nowhere")) == 1146
    assert error_code(await transaction.query("begin")) == 0
    prepared = await cursor.send_command(MySqlCommand.STMT_PREPARE, b"select seq from mysql.seq_1_to_1000000")
    await cursor.read_until_eof(5)
    statement = prepared[1:5]
    await cursor.send_command(MySqlCommand.STMT_EXECUTE, statement + bytes((CURSOR,)) + struct.pack("<I", 1))
    await cursor.read_until_eof(5)
    await cursor.send_command(MySqlCommand.STMT_FETCH, statement + struct.pack("<I", 3))
    await cursor.read_until_eof(5)
    assert error_code(await idle.send_command(MySqlCommand.RESET_CONNECTION)) == 0
    assert error_code(await idle.query(f"do get_lock('{lock}', 0)")) == 0
    busy.write_command(MySqlCommand.QUERY, f"do get_lock('{lock}', 100)".encode())
    async with counting_client(port) as stranger:
        assert error_code(await stranger.log_in(password=b"x" * 20)) == 1045
    async with counting_client(port) as stranger:
        await stranger.read_packet()
        stranger.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert error_code((await stranger.read_packet())[1]) == 1043
    return [transaction, cursor, idle, busy]


async def test_what_clients_do_is_shown_to_the_last_byte(
    tmp_path: Path, mariadb: MariaDb, database: str
) -> None:
    async with run_cluster(tmp_path, mariadb) as stack, AsyncExitStack() as held:
        node = stack.tidb[0].address

        async def shown() -> dict[str, Any]:
            return (await stack.nodes())[node]

        async def envoy() -> dict[str, Any]:
            return (await get_envoys(stack))["envoy-1"]

        clients = await converse(held, stack.sql_port, database)
        expected: dict[str, Any] = {
            "sessions": 4,
            "sessions_by_state": {**NO_SESSIONS, "idle": 2, "transaction": 1, "busy": 1},
            "pinned": {**NOT_PINNED, "transaction": 1, "cursor": 1},
            "logins": 4,
            "login_failures": {**dict.fromkeys(LOGIN_FAILURES, 0), "denied": 1, "bad_packet": 1},
            "connect_failures": NO_CONNECT_FAILURES,
            "commands": {
                "query": 7,
                "prepare": 1,
                "execute": 1,
                "fetch": 1,
                "ping": 1,
                "change_user": 0,
                "reset": 1,
                "other": 0,
            },
            "bytes": {
                "to_node": sum(each.sent_bytes for each in clients),
                "to_client": sum(each.received_bytes for each in clients),
            },
            "errors": {
                "access": 0,
                "deadlock": 0,
                "shutdown": 0,
                "killed": 0,
                "limit": 0,
                "cluster": 0,
                "syntax": 2,
                "other": 0,
            },
        }
        await wait_shown(stack, expected, shown)
        await wait_shown(stack, expected, envoy)
        said = await envoy()
        assert (said["filter"], said["module_version"], said["problem"]) == ("module", VERSION, None)
        assert said["refusal"] is None

        series = {
            metric_key("tidevoy_module_info", envoy="envoy-1", version=VERSION): 1,
            metric_key("tidevoy_telemetry_dropped_total", envoy="envoy-1"): 0,
            at_node("tidevoy_sessions", node, state="busy"): 1,
            at_node("tidevoy_sessions_pinned", node, reason="cursor"): 1,
            at_node("tidevoy_logins_total", node): 4,
            at_node("tidevoy_login_failures_total", node, reason="denied"): 1,
            at_node("tidevoy_commands_total", node, kind="query"): 7,
            at_node("tidevoy_command_seconds_count", node): 11,  # one is not answered yet
            at_node("tidevoy_errors_total", node, class_="syntax"): 2,
        } | {
            at_node("tidevoy_bytes_total", node, direction=direction): count
            for direction, count in expected["bytes"].items()
        }
        await wait_shown(stack, series, lambda: get_metrics(stack))

        for command in ("nodes", "envoys"):
            printed = json.loads((await run_tidevoy(stack.control_plane.api_url, command, "--json")).stdout)
            (one,) = printed[command]
            assert {key: one[key] for key in expected} == expected

        assert error_code(await clients[2].query(f"do release_lock('{database}')")) == 0
        assert error_code((await clients[3].read_packet())[1]) == 0
        await held.aclose()
        ended = {"sessions": 0, "sessions_by_state": NO_SESSIONS, "pinned": NOT_PINNED, "logins": 4}
        await wait_shown(stack, ended, shown)
        await wait_shown(stack, ended, envoy)
        count = at_node("tidevoy_command_seconds_count", node)
        await wait_shown(stack, {count: 13}, lambda: get_metrics(stack))

        # Of two reports the later one tells what is recent.
        async with counting_client(stack.sql_port) as last:
            await last.log_in()
            assert error_code(await last.query("do sleep(0.1)")) == 0
        await stack.wait_until(lambda: is_slow(stack, node), "its latency to be shown")


def at_node(name: str, node: str, **labels: str) -> MetricKey:
    """A sample of what the first Envoy tells of a node."""
    return metric_key(name, envoy="envoy-1", node=node, **labels)


async def is_slow(stack: LocalCluster, node: str) -> bool:
    latency = (await stack.nodes())[node]["latency"]
    return latency is not None and latency["p99"] >= 0.1


async def test_a_node_that_is_gone_is_counted_at_the_node_and_the_client_at_none(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_cluster(tmp_path, mariadb, settings=PATIENT) as stack:
        node = stack.tidb[0]
        await node.kill()
        async with counting_client(stack.sql_port) as visitor:
            refused = (await visitor.read_packet())[1]
            assert error_code(refused) == 1105
            assert b"no TiDB server takes new sessions" in refused

        async def shown() -> dict[str, Any]:
            return (await stack.nodes())[node.address]

        async def envoy() -> dict[str, Any]:
            said = (await get_envoys(stack))["envoy-1"]
            return {**said, "no_node": (said["login_failures"] or {}).get("no_node")}

        await wait_shown(stack, {"connect_failures": {**NO_CONNECT_FAILURES, "connect": 1}}, shown)
        await wait_shown(stack, {"no_node": 1}, envoy)
        assert (await shown())["login_failures"]["no_node"] == 0
        nobody = at_node("tidevoy_login_failures_total", "", reason="no_node")
        await wait_shown(stack, {nobody: 1}, lambda: get_metrics(stack))


def tls(side: str, demanded: bool, files: Path) -> dict[str, Any]:
    """Settings that name files which are not there yet."""
    if side == "client":
        mode = "required" if demanded else "optional"
        return {"client": {"mode": mode, "cert": str(files / "cert.pem"), "key": str(files / "key.pem")}}
    mode = "required" if demanded else "preferred"
    return {"backend": {"mode": mode, "ca": str(files / "ca.pem")}}


@pytest.mark.parametrize("demanded", [False, True], ids=["offered", "demanded"])
@pytest.mark.parametrize(
    ("side", "file", "resource"), [("client", "cert.pem", "Listener"), ("node", "ca.pem", "Cluster")]
)
async def test_what_the_module_refuses_is_told_in_its_words_until_the_envoy_starts_again(
    tmp_path: Path, mariadb: MariaDb, side: str, file: str, resource: str, demanded: bool
) -> None:
    files = tmp_path / "files"
    settings = {"tls": tls(side, demanded, files)}
    async with run_cluster(tmp_path, mariadb, settings=settings, expects_listener=not demanded) as stack:

        async def told() -> dict[str, Any]:
            said = (await get_envoys(stack))["envoy-1"]
            return {**said, "words": said["refusal"] is not None}

        await wait_shown(stack, {"words": True, "filter": "none"}, told)
        said = await told()
        part, text = said["refusal"]["extension"], said["refusal"]["text"]
        assert str(files / file) in text
        assert said["last_nack"]["type_url"].endswith(f".{resource}")
        assert said["problem"].startswith(
            "it gets no listener" if demanded else "it refused Tidevoy's module"
        )
        (event,) = await get_events(stack, "envoy.module_refusal")
        assert event["message"] == f"its module refused the configuration of `{part}`: {text}"
        assert await get_events(stack, "envoy.nack")
        assert [each["message"] for each in await get_events(stack, "envoy.problem")][-1] == said["problem"]
        warned = (await run_tidevoy(stack.control_plane.api_url, "envoys")).stderr
        assert f"envoy-1: its module refused its {part} at " in warned
        assert text in " ".join(warned.split())

        PemFiles.create(files)
        await reload_settings(stack)
        if demanded:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", stack.sql_port)
        await restart_envoy(stack)
        await wait_shown(stack, {"filter": "module", "problem": None}, told)


async def test_envoys_with_and_without_the_module_in_one_fleet(tmp_path: Path, mariadb: MariaDb) -> None:
    async with AsyncExitStack() as held:
        stack = await held.enter_async_context(run_cluster(tmp_path, mariadb, nodes=2))
        ports = {
            "envoy-1": stack.sql_port,
            "plain": await held.enter_async_context(run_another_envoy(stack, "plain", module=None)),
            "strange": await held.enter_async_context(
                run_another_envoy(stack, "strange", module=require_module(), claimed_version="9.9.9")
            ),
        }
        said = await get_envoys(stack)
        assert {name: each["filter"] for name, each in said.items()} == {
            "envoy-1": "module",
            "plain": "none",
            "strange": "none",
        }
        assert (said["envoy-1"]["problem"], said["plain"]["problem"]) == (None, None)
        assert said["plain"]["module_version"] is None
        line = ".".join(VERSION.split(".")[:2])
        assert said["strange"]["module_version"] == "9.9.9"
        assert (
            said["strange"]["problem"] == f"its module is version 9.9.9 and this control plane needs {line}.x"
        )
        assert all(each["last_nack"] is None for each in said.values())

        drained, other = stack.tidb
        stays = {name: await opened(held, port) for name, port in ports.items()}
        answer = await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
        assert answer.status_code == 202
        await everyone_follows(stack, ports)
        for port in ports.values():
            assert {await find_serving_port(port) for _ in range(10)} == {other.port}
        for session in stays.values():
            assert error_code(await session.query("do 1")) == 0
        await stack.api.post(f"/v1/nodes/{drained.address}/undrain")
        await stack.api.patch(f"/v1/nodes/{drained.address}", json={"weight": 10_000})
        await stack.api.patch(f"/v1/nodes/{other.address}", json={"weight": 1})
        await everyone_follows(stack, ports)
        for name, port in ports.items():
            shares = Counter([await find_serving_port(port) for _ in range(20)])
            assert shares[drained.port] >= 15, (name, shares)


async def everyone_follows(stack: LocalCluster, envoys: dict[str, int]) -> None:
    """Wait until all these Envoys run what was published last."""

    async def all_follow() -> bool:
        return all([await is_up_to_date(stack, name) for name in envoys])

    await stack.wait_until(all_follow, "all Envoys to follow")


async def spread(held: AsyncExitStack, stack: LocalCluster, count: int) -> dict[CountingClient, Tidb]:
    """So many sessions, and the node of each."""
    by_port = {node.port: node for node in stack.tidb}
    sessions = {}
    for _ in range(count):
        session = await opened(held, stack.sql_port)
        await session.query("select @@port")
        rows = await session.read_until_eof(5) and await session.read_until_eof(5)
        sessions[session] = by_port[int(rows[0][1:])]
    return sessions


async def test_a_node_that_dies_takes_only_its_own_sessions(tmp_path: Path, mariadb: MariaDb) -> None:
    """The checks are too patient to find it dead: module and Envoy keep new sessions away by themselves."""
    async with run_cluster(tmp_path, mariadb, nodes=3, settings=PATIENT) as stack, AsyncExitStack() as held:
        sessions = await spread(held, stack, 12)
        assert len(set(sessions.values())) == 3
        dead = stack.tidb[1]
        async with run_short_sessions(stack.sql_port) as short:
            await short.wait_for_attempts(20)
            await dead.kill()
            killed = asyncio.get_running_loop().time()
            await short.wait_for_attempts(200)
            assert short.failures(since=killed) == []
            assert dead.port not in short.nodes(killed)
        assert (await stack.states())[dead.address] == "active"
        for session, node in sessions.items():
            if node is dead:
                assert await session.read_to_end() == b""
            else:
                assert error_code(await session.query("do 1")) == 0
        await dead.launch()
        await stack.wait_until(lambda: _serves(stack, dead), "sessions on the node again")


async def _serves(stack: LocalCluster, node: Tidb) -> bool:
    return await find_serving_port(stack.sql_port) == node.port


async def test_a_drain_leaves_sessions_alone(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_cluster(tmp_path, mariadb, nodes=3) as stack, AsyncExitStack() as held:
        sessions = await spread(held, stack, 9)
        drained = stack.tidb[0]
        await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
        await everyone_follows(stack, {"envoy-1": stack.sql_port})
        later = await spread(held, stack, 9)
        assert drained not in later.values()
        for session in sessions:
            assert error_code(await session.query("do 1")) == 0
        own = [session for session, node in sessions.items() if node is drained]

        async def counted() -> dict[str, Any]:
            said = (await stack.nodes())[drained.address]
            return {**said, "idle": (said["sessions_by_state"] or {}).get("idle")}

        await wait_shown(stack, {"state": "draining", "idle": len(own), "sessions": len(own)}, counted)
        assert own
        for session in own:
            session.writer.close()
        await wait_shown(stack, {"state": "drained", "idle": 0, "sessions": 0}, counted)
