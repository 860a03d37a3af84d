"""A fleet with Tidevoy's module: its metrics, its configuration errors, and mixed fleets."""

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
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb import Tidb
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.clients.server import PemFiles
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.cluster import (
    CountingClient,
    MetricKey,
    counting_client,
    get_envoys,
    get_events,
    get_metrics,
    is_up_to_date,
    metric_key,
    open_session,
    reload_settings,
    restart_envoy,
    run_another_envoy,
    run_cluster,
    wait_for_values,
)
from tests.support.e2e.sql_load import node_port_of_new_session, run_short_sessions
from tests.support.module.bootstrap import require_module
from tests.support.tidb_sim_clients import error_code

pytestmark = pytest.mark.timeout(180)

NO_SESSIONS = {"login": 0, "idle": 0, "busy": 0, "transaction": 0, "opaque": 0}
NOT_PINNED = {"transaction": 0, "cursor": 0, "long_data": 0, "opaque": 0, "endless_transactions": 0}
NO_CONNECT_FAILURES = {"connect": 0, "closed": 0, "error": 0, "invalid": 0, "tls": 0, "full": 0}
CURSOR = 1  # CURSOR_TYPE_READ_ONLY
# Health checks report a dead node so late that tests observe only how Envoys react to it.
TOLERANT_CHECKS = {"health": {"sql": {"fall": 100}, "status": {"fall": 100}}}


async def open_sessions(exit_stack: AsyncExitStack, port: int, lock: str) -> list[CountingClient]:
    """Open four sessions: in a transaction, with a cursor, idle with a lock, and waiting for the lock.

    Also log in with a wrong password, and send HTTP instead of MySQL.
    """
    transaction, cursor, idle, busy = [await open_session(exit_stack, port) for _ in range(4)]
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
    async with counting_client(port) as client:
        assert error_code(await client.log_in(password=b"x" * 20)) == 1045
    async with counting_client(port) as client:
        await client.read_packet()
        client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert error_code((await client.read_packet())[1]) == 1043
    return [transaction, cursor, idle, busy]


async def test_client_activity_is_reported_exactly(tmp_path: Path, mariadb: MariaDb, database: str) -> None:
    async with run_cluster(tmp_path, mariadb) as stack, AsyncExitStack() as exit_stack:
        node = stack.tidb[0].address

        async def node_view() -> dict[str, Any]:
            return (await stack.nodes())[node]

        async def envoy_view() -> dict[str, Any]:
            return (await get_envoys(stack))["envoy-1"]

        clients = await open_sessions(exit_stack, stack.sql_port, database)
        expected: dict[str, Any] = {
            "sessions": 4,
            "sessions_by_state": {**NO_SESSIONS, "idle": 2, "transaction": 1, "busy": 1},
            "not_movable": {**NOT_PINNED, "transaction": 1, "cursor": 1},
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
                "to_node": sum(item.sent_bytes for item in clients),
                "to_client": sum(item.received_bytes for item in clients),
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
        await wait_for_values(stack, expected, node_view)
        await wait_for_values(stack, expected, envoy_view)
        view = await envoy_view()
        assert (view["filter"], view["module_version"], view["problem"]) == ("module", VERSION, None)
        assert view["config_rejection"] is None

        series = {
            metric_key("tidevoy_module_info", envoy="envoy-1", version=VERSION): 1,
            metric_key("tidevoy_telemetry_dropped_total", envoy="envoy-1"): 0,
            at_node("tidevoy_sessions", node, state="busy"): 1,
            at_node("tidevoy_sessions_pinned", node, reason="cursor"): 1,
            at_node("tidevoy_logins_total", node): 4,
            at_node("tidevoy_login_failures_total", node, reason="denied"): 1,
            at_node("tidevoy_commands_total", node, kind="query"): 7,
            at_node("tidevoy_command_seconds_count", node): 11,  # one command has no answer yet
            at_node("tidevoy_errors_total", node, class_="syntax"): 2,
        } | {
            at_node("tidevoy_bytes_total", node, direction=direction): count
            for direction, count in expected["bytes"].items()
        }
        await wait_for_values(stack, series, lambda: get_metrics(stack))

        for command in ("nodes", "envoys"):
            printed = json.loads((await run_tidevoy(stack.control_plane.api_url, command, "--json")).stdout)
            (item,) = printed[command]
            assert {key: item[key] for key in expected} == expected

        assert error_code(await clients[2].query(f"do release_lock('{database}')")) == 0
        assert error_code((await clients[3].read_packet())[1]) == 0
        await exit_stack.aclose()
        ended = {"sessions": 0, "sessions_by_state": NO_SESSIONS, "not_movable": NOT_PINNED, "logins": 4}
        await wait_for_values(stack, ended, node_view)
        await wait_for_values(stack, ended, envoy_view)
        count = at_node("tidevoy_command_seconds_count", node)
        await wait_for_values(stack, {count: 13}, lambda: get_metrics(stack))

        # The control plane calculates recent latency from two consecutive reports.
        async with counting_client(stack.sql_port) as client:
            await client.log_in()
            assert error_code(await client.query("do sleep(0.1)")) == 0
        await stack.wait_until(lambda: is_slow(stack, node), "its latency to be shown")


def at_node(name: str, node: str, **labels: str) -> MetricKey:
    """Return the key of a sample that the first Envoy reports about a node."""
    return metric_key(name, envoy="envoy-1", node=node, **labels)


async def is_slow(stack: LocalCluster, node: str) -> bool:
    latency = (await stack.nodes())[node]["latency"]
    return latency is not None and latency["p99"] >= 0.1


async def test_dead_node_counts_a_connect_failure_and_no_login_failure(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_cluster(tmp_path, mariadb, settings=TOLERANT_CHECKS) as stack:
        node = stack.tidb[0]
        await node.kill()
        async with counting_client(stack.sql_port) as client:
            error = (await client.read_packet())[1]
            assert error_code(error) == 1105
            assert b"no TiDB server takes new sessions" in error

        async def node_view() -> dict[str, Any]:
            return (await stack.nodes())[node.address]

        async def envoy_view() -> dict[str, Any]:
            view = (await get_envoys(stack))["envoy-1"]
            return {**view, "no_node": (view["login_failures"] or {}).get("no_node")}

        await wait_for_values(stack, {"connect_failures": {**NO_CONNECT_FAILURES, "connect": 1}}, node_view)
        await wait_for_values(stack, {"no_node": 1}, envoy_view)
        assert (await node_view())["login_failures"]["no_node"] == 0
        no_node = at_node("tidevoy_login_failures_total", "", reason="no_node")
        await wait_for_values(stack, {no_node: 1}, lambda: get_metrics(stack))


def tls_settings(side: str, is_required: bool, files: Path) -> dict[str, Any]:
    """Return settings that name files which do not exist yet."""
    if side == "client":
        mode = "required" if is_required else "optional"
        return {"client": {"mode": mode, "cert": str(files / "cert.pem"), "key": str(files / "key.pem")}}
    mode = "required" if is_required else "preferred"
    return {"backend": {"mode": mode, "ca": str(files / "ca.pem")}}


@pytest.mark.parametrize("is_required", [False, True], ids=["optional", "required"])
@pytest.mark.parametrize(
    ("side", "file", "resource"), [("client", "cert.pem", "Listener"), ("node", "ca.pem", "Cluster")]
)
async def test_module_errors_are_reported_until_the_envoy_restarts(
    tmp_path: Path, mariadb: MariaDb, side: str, file: str, resource: str, is_required: bool
) -> None:
    files = tmp_path / "files"
    settings = {"tls": tls_settings(side, is_required, files)}
    async with run_cluster(tmp_path, mariadb, settings=settings, expects_listener=not is_required) as stack:

        async def envoy_view() -> dict[str, Any]:
            view = (await get_envoys(stack))["envoy-1"]
            return {**view, "has_rejection": view["config_rejection"] is not None}

        await wait_for_values(stack, {"has_rejection": True, "filter": "none"}, envoy_view)
        view = await envoy_view()
        component, text = view["config_rejection"]["extension"], view["config_rejection"]["text"]
        assert str(files / file) in text
        assert view["last_nack"]["type_url"].endswith(f".{resource}")
        assert view["problem"].startswith(
            "it gets no listener" if is_required else "it rejected Tidevoy's module"
        )
        (event,) = await get_events(stack, "envoy.config_rejected")
        assert event["message"] == f"its module rejected the configuration of `{component}`: {text}"
        assert await get_events(stack, "envoy.nack")
        assert [item["message"] for item in await get_events(stack, "envoy.problem")][-1] == view["problem"]
        warnings = (await run_tidevoy(stack.control_plane.api_url, "envoys")).stderr
        assert f"envoy-1: its module rejected the configuration of `{component}` at " in warnings
        assert text in " ".join(warnings.split())

        PemFiles.create(files)
        await reload_settings(stack)
        if is_required:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", stack.sql_port)
        await restart_envoy(stack)
        await wait_for_values(stack, {"filter": "module", "problem": None}, envoy_view)


async def test_fleet_mixes_envoys_with_and_without_the_module(tmp_path: Path, mariadb: MariaDb) -> None:
    async with AsyncExitStack() as exit_stack:
        stack = await exit_stack.enter_async_context(run_cluster(tmp_path, mariadb, nodes=2))
        ports = {
            "envoy-1": stack.sql_port,
            "plain": await exit_stack.enter_async_context(run_another_envoy(stack, "plain", module=None)),
            "mismatched": await exit_stack.enter_async_context(
                run_another_envoy(stack, "mismatched", module=require_module(), claimed_version="9.9.9")
            ),
        }
        view = await get_envoys(stack)
        assert {name: item["filter"] for name, item in view.items()} == {
            "envoy-1": "module",
            "plain": "none",
            "mismatched": "none",
        }
        assert (view["envoy-1"]["problem"], view["plain"]["problem"]) == (None, None)
        assert view["plain"]["module_version"] is None
        release_line = ".".join(VERSION.split(".")[:2])
        assert view["mismatched"]["module_version"] == "9.9.9"
        assert (
            view["mismatched"]["problem"]
            == f"its module is version 9.9.9 and this control plane needs {release_line}.x"
        )
        assert all(item["last_nack"] is None for item in view.values())

        drained, other = stack.tidb
        existing_sessions = {name: await open_session(exit_stack, port) for name, port in ports.items()}
        answer = await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
        assert answer.status_code == 202
        await wait_up_to_date(stack, ports)
        for port in ports.values():
            assert {await node_port_of_new_session(port) for _ in range(10)} == {other.port}
        for session in existing_sessions.values():
            assert error_code(await session.query("do 1")) == 0
        await stack.api.post(f"/v1/nodes/{drained.address}/undrain")
        await stack.api.patch(f"/v1/nodes/{drained.address}", json={"weight": 10_000})
        await stack.api.patch(f"/v1/nodes/{other.address}", json={"weight": 1})
        await wait_up_to_date(stack, ports)
        for name, port in ports.items():
            shares = Counter([await node_port_of_new_session(port) for _ in range(20)])
            assert shares[drained.port] >= 15, (name, shares)


async def wait_up_to_date(stack: LocalCluster, envoys: dict[str, int]) -> None:
    """Wait until all these Envoys have acknowledged the last published version."""

    async def are_up_to_date() -> bool:
        return all([await is_up_to_date(stack, name) for name in envoys])

    await stack.wait_until(are_up_to_date, "all Envoys to be up to date")


async def open_many_sessions(
    exit_stack: AsyncExitStack, stack: LocalCluster, count: int
) -> dict[CountingClient, Tidb]:
    """Open `count` sessions. Return each with its node."""
    by_port = {node.port: node for node in stack.tidb}
    sessions = {}
    for _ in range(count):
        session = await open_session(exit_stack, stack.sql_port)
        await session.query("select @@port")
        rows = await session.read_until_eof(5) and await session.read_until_eof(5)
        sessions[session] = by_port[int(rows[0][1:])]
    return sessions


async def test_dead_node_ends_only_its_own_sessions(tmp_path: Path, mariadb: MariaDb) -> None:
    """Health checks do not detect the dead node: the module and Envoy avoid it without the control plane."""
    async with (
        run_cluster(tmp_path, mariadb, nodes=3, settings=TOLERANT_CHECKS) as stack,
        AsyncExitStack() as exit_stack,
    ):
        sessions = await open_many_sessions(exit_stack, stack, 12)
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
    return await node_port_of_new_session(stack.sql_port) == node.port


async def test_drain_without_migration_keeps_sessions(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_cluster(tmp_path, mariadb, nodes=3) as stack, AsyncExitStack() as exit_stack:
        sessions = await open_many_sessions(exit_stack, stack, 9)
        drained = stack.tidb[0]
        await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})
        await wait_up_to_date(stack, {"envoy-1": stack.sql_port})
        later_sessions = await open_many_sessions(exit_stack, stack, 9)
        assert drained not in later_sessions.values()
        for session in sessions:
            assert error_code(await session.query("do 1")) == 0
        drained_sessions = [session for session, node in sessions.items() if node is drained]

        async def node_view() -> dict[str, Any]:
            view = (await stack.nodes())[drained.address]
            return {**view, "idle": (view["sessions_by_state"] or {}).get("idle")}

        await wait_for_values(
            stack,
            {"state": "draining", "idle": len(drained_sessions), "sessions": len(drained_sessions)},
            node_view,
        )
        assert drained_sessions
        for session in drained_sessions:
            session.writer.close()
        await wait_for_values(stack, {"state": "drained", "idle": 0, "sessions": 0}, node_view)


async def test_one_envoy_does_not_migrate_until_it_may_again(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    """Migration is switched off for one of two Envoys, and stays off when the control plane restarts."""
    async with (
        run_cluster(
            tmp_path,
            mariadb,
            nodes=2,
            arguments=signing.arguments,
            # Otherwise, a session could migrate after it was counted, and before migration is switched off.
            settings={"rebalance": {"enabled": False}},
        ) as stack,
        run_another_envoy(stack, "envoy-2", module=require_module()) as other_port,
        AsyncExitStack() as exit_stack,
    ):
        await wait_up_to_date(stack, {"envoy-1": stack.sql_port, "envoy-2": other_port})
        sessions = await open_many_sessions(exit_stack, stack, 8)
        others = [await open_session(exit_stack, other_port) for _ in range(8)]
        drained = stack.tidb[0]
        staying = list(sessions.values()).count(drained)
        assert staying
        url, expected = stack.control_plane.api_url, {"state": "draining", "sessions": staying}
        await run_tidevoy(url, "envoys", "set", "envoy-1", "--migration", "off")
        await stack.api.post(f"/v1/nodes/{drained.address}/drain", json={})

        async def drain_view() -> dict[str, Any]:
            node = (await stack.nodes())[drained.address]
            return {**node, **(node["drain_progress"] or {})}

        stays = {**expected, "not_movable": {"switched_off": staying}}
        await wait_for_values(stack, stays, drain_view)
        await stack.control_plane.restart()
        await wait_up_to_date(stack, {"envoy-1": stack.sql_port, "envoy-2": other_port})
        await wait_for_values(stack, stays, drain_view)
        envoys = await get_envoys(stack)
        assert [envoys[name]["migration"] for name in ("envoy-1", "envoy-2")] == ["off", "on"]
        await run_tidevoy(url, "envoys", "set", "envoy-1", "--migration", "default")
        await wait_for_values(stack, {"sessions": 0, "not_movable": {}}, drain_view)
        for session in (*sessions, *others):
            assert error_code(await session.query("do 1")) == 0
