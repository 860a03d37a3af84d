"""The login log: which logins and changes of user it has, and what its lines contain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sandbox.tidb_sim.packets import frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import (
    NO_NODE_ERROR,
    OK_PAYLOAD,
    ModuleEnvoy,
    client_tls_config,
    connect_with_tls,
    error_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.module.login_log import (
    change_user,
    log_in_as,
    login_log,
    read_lines,
    serve_users,
    subset,
    user_packet,
    wait_for_lines,
)
from tests.support.tidb_sim_clients import error_code

TRUSTED_PROXY = "127.0.0.5"
OUTCOME = ("kind", "result", "reason", "error_code", "user", "database")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logins.log"


def log_bytes(log: Path) -> bytes:
    return log.read_bytes()


@asynccontextmanager
async def run_logging(log: Path, **config: Any) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy that logs logins, in front of the node `n` with `serve_users`."""
    live_settings = login_log(log) | config.pop("live_settings", {})
    async with (
        run_fake_server(serve_users) as node,
        run_envoy(
            log.parent,
            [Host(node.endpoint, "n")],
            ModuleConfig(live_settings=live_settings, **config),
            workers=2,
        ) as proxy,
    ):
        yield proxy


async def test_line_of_a_login_has_all_fields(log: Path) -> None:
    async with run_logging(log) as proxy:
        started_at = time.time()
        client, answer = await log_in_as(proxy, b"app", b"shop")
        assert answer == OK_PAYLOAD
        (line,) = await wait_for_lines(log, 1)
        host, port = client.writer.get_extra_info("sockname")[:2]
    logged_at = datetime.fromisoformat(line.pop("time"))
    assert logged_at.utcoffset() == timedelta(0)
    assert started_at - 0.001 <= logged_at.timestamp() <= time.time()
    assert 0 < line.pop("duration_ms") < 20_000
    assert line.pop("connection_id") > 0
    assert line == {
        "kind": "login",
        "result": "ok",
        "reason": None,
        "error_code": None,
        "user": "app",
        "database": "shop",
        "client": f"{host}:{port}",
        "listener": f"127.0.0.1:{proxy.port}",
        "node": "n",
        "tls": None,
    }
    assert b"secret" not in log_bytes(log)


async def test_logins_that_the_node_denies_have_its_error_code(log: Path) -> None:
    async with run_logging(log) as proxy:
        _, answer = await log_in_as(proxy, b"denied", b"shop")
        assert error_code(answer) == 1045
        _, answer = await log_in_as(proxy, b"app", b"missing")
        assert error_code(answer) == 1049
        lines = await wait_for_lines(log, 2)
    assert [subset(line, *OUTCOME, "node") for line in lines] == [
        ("login", "failed", "denied", 1045, "denied", "shop", "n"),
        ("login", "failed", "denied", 1049, "app", "missing", "n"),
    ]


async def test_changes_of_user_are_logged(log: Path) -> None:
    async with run_logging(log) as proxy:
        client, _ = await log_in_as(proxy, b"app")
        for _ in range(10):  # the module then serves the connections without Envoy
            assert await with_timeout(client.send_command(0x0E)) == OK_PAYLOAD
        assert await change_user(client, b"other", b"shop") == OK_PAYLOAD
        assert await with_timeout(client.send_command(0x1B, b"\0\0")) == OK_PAYLOAD  # COM_SET_OPTION
        assert error_code(await change_user(client, b"denied")) == 1045
        refused = await change_user(client, b"thief", plugin=b"tidb_session_token")
        assert error_code(refused) == 1045
        lines = await wait_for_lines(log, 4)
    assert [subset(line, *OUTCOME) for line in lines] == [
        ("login", "ok", None, None, "app", None),
        ("change_user", "ok", None, None, "other", "shop"),
        ("change_user", "failed", "denied", 1045, "denied", None),
        ("change_user", "failed", "session_token_plugin", 1045, "thief", None),
    ]
    assert len({subset(line, "client", "connection_id", "node") for line in lines}) == 1
    assert b"secret" not in log_bytes(log)


async def test_logins_that_the_module_refuses_have_a_reason(log: Path) -> None:
    async with run_logging(log) as proxy:
        client = await proxy.connect()
        await with_timeout(client.read_packet())
        client.writer.write(user_packet(b"thief", b"shop", b"tidb_session_token"))
        assert error_code((await with_timeout(client.read_packet()))[1]) == 1045
        await wait_for_lines(log, 1)
        no_mysql = await proxy.connect()
        await with_timeout(no_mysql.read_packet())
        no_mysql.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await read_to_end(no_mysql)
        lines = await wait_for_lines(log, 2)
    assert [subset(line, *OUTCOME, "node") for line in lines] == [
        ("login", "failed", "session_token_plugin", 1045, "thief", "shop", "n"),
        ("login", "failed", "bad_packet", 1043, None, None, "n"),
    ]


async def test_client_over_the_connection_limit_is_logged(log: Path) -> None:
    async with run_logging(log, session={"max_connections": 1}) as proxy:
        await log_in_as(proxy, b"app")
        await wait_for_lines(log, 1)
        await read_to_end(await proxy.connect())
        _, line = await wait_for_lines(log, 2)
    assert subset(line, *OUTCOME, "node") == (
        *("login", "failed", "too_many_connections", 1040, None, None),
        None,
    )


async def test_login_without_a_node_is_logged(log: Path) -> None:
    async with run_envoy(log.parent, [], ModuleConfig(live_settings=login_log(log))) as proxy:
        assert await read_to_end(await proxy.connect()) == frame(0, NO_NODE_ERROR)
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, *OUTCOME, "node") == ("login", "failed", "no_node", 1105, None, None, None)


async def test_login_at_full_nodes_names_the_node(log: Path) -> None:
    async def serve_full(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(error_packet(1040, "Too many connections"))
        writer.close()

    config = ModuleConfig(live_settings=login_log(log))
    async with (
        run_fake_server(serve_full) as node,
        run_envoy(log.parent, [Host(node.endpoint, "full")], config) as proxy,
    ):
        await read_to_end(await proxy.connect())
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, "result", "reason", "error_code", "node") == ("failed", "node_full", 1040, "full")


async def test_clients_that_leave_are_logged_unless_they_have_sent_nothing(log: Path) -> None:
    async with run_logging(log) as proxy:
        probe = await proxy.connect()
        await with_timeout(probe.read_packet())
        probe.writer.close()
        await proxy.wait_for_metrics({("login_failures", "n", "client_gone"): 1})
        leaving = await proxy.connect()
        await with_timeout(leaving.read_packet())
        leaving.writer.write(user_packet(b"app")[:20])
        leaving.writer.close()
        await proxy.wait_for_metrics({("login_failures", "n", "client_gone"): 2})
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, *OUTCOME, "node") == ("login", "failed", "client_gone", None, None, None, "n")


async def test_client_is_that_of_the_proxy_header(log: Path) -> None:
    header = b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n"
    async with run_logging(log, trusted_proxies=[f"{TRUSTED_PROXY}/32"]) as proxy:
        await log_in_as(proxy, b"app", source=TRUSTED_PROXY, header=header)
        (line,) = await wait_for_lines(log, 1)
    assert subset(line, "client", "listener") == ("192.0.2.7:4711", "192.0.2.8:6000")


async def test_tls_of_the_client_is_logged(log: Path) -> None:
    pair = PemFiles.create(log.parent / "certificates")
    config = client_tls_config(pair, "required", allow_cleartext_backend=True)
    async with run_logging(log, client=config.client, node=config.node) as proxy:
        await connect_with_tls(proxy, pair)
        _, answer = await log_in_as(proxy, b"app")
        assert error_code(answer) == 3159
        with_tls, without = await wait_for_lines(log, 2)
    assert with_tls["tls"] == {
        "version": "TLSv1.3",
        "cipher": with_tls["tls"]["cipher"],
        "client_certificate": False,
    }
    assert with_tls["tls"]["cipher"].startswith("TLS_")
    assert (with_tls["user"], with_tls["result"]) == ("root", "ok")
    assert subset(without, "user", "reason", "error_code", "tls") == ("app", "tls_required", 3159, None)


async def test_change_of_user_that_would_expose_the_password_is_logged(log: Path) -> None:
    pair = PemFiles.create(log.parent / "certificates")
    async with run_logging(log, client=client_tls_config(pair).client) as proxy:
        client = await connect_with_tls(proxy, pair)
        assert error_code(await change_user(client, b"clear", b"shop")) == 1105
        _, line = await wait_for_lines(log, 2)
    assert subset(line, *OUTCOME) == (
        *("change_user", "failed", "clear_text_password", 1105, "clear", "shop"),
    )


async def test_names_cannot_forge_lines(log: Path) -> None:
    names = {
        b'a"}\n{"result":"ok","user":"root"}\r\n': None,
        b"\xff\xfez": "\ufffd\ufffdz",
        "\x1b[2J\u009b1m\u2028\u202e名".encode(): None,
        b"u" * 5000: "u" * 256,
        b"\xf0\x9f\x98\x80" * 2000: "\U0001f600" * 64,
    }
    async with run_logging(log) as proxy:
        for count, user in enumerate(names, start=1):
            await log_in_as(proxy, user)
            await wait_for_lines(log, count)
        lines = read_lines(log)
    assert [line["user"] for line in lines] == [
        user.decode() if expected is None else expected for user, expected in names.items()
    ]
    assert all(0x20 <= byte <= 0x7E for byte in log_bytes(log).replace(b"\n", b""))
