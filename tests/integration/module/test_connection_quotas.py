"""Limits of connections by network, by user and in all, within the quotas of one Envoy process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import MySqlCommand, err, frame
from tests.support.fake_servers import run_fake_server
from tests.support.migration.fleet import run_fleet
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes, write_live_config
from tests.support.module.envoy import (
    OK_PAYLOAD,
    ModuleEnvoy,
    greeting_packet,
    login_packet,
    read_to_end,
    run_envoy,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient, error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(90)

PROXY, OTHER_NETWORK = "127.0.0.5", "127.0.7.1"
DENIED = err(1045, "Access denied", "28000")
TOO_MANY_CONNECTIONS, USER_LIMIT = 1040, 1226


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept the logins and changes of user of all users but `denied`; answer other commands with OK."""
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    sequence, login = await node.read_packet()
    if login[32:].startswith(b"denied\0"):
        writer.write(frame(sequence + 1, DENIED))
        writer.close()
        return
    writer.write(frame(sequence + 1, OK_PAYLOAD))
    with suppress(asyncio.IncompleteReadError):
        while True:
            _, command = await node.read_packet()
            is_denied = command.startswith(bytes((MySqlCommand.CHANGE_USER,)) + b"denied\0")
            writer.write(frame(1, DENIED if is_denied else OK_PAYLOAD))
    writer.close()


def rule(name: str, limit: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a rule. With one Envoy, the quota is the limit."""
    return {"rule": name, "limit": limit, "unlisted": limit, **fields}


@dataclass
class LimitedEnvoy:
    """An Envoy with limits, which may change."""

    proxy: ModuleEnvoy
    endpoints: Path
    node: Host

    async def set_limits(self, *limits: dict[str, Any]) -> None:
        """Publish other limits, and wait until the workers have applied them."""
        name = "extension_config_discovery"

        async def reloads() -> int:
            return sum((await self.proxy.stats(f"{name}.*config_reload$")).values())

        before = await reloads()
        write_live_config(self.endpoints, [self.node], {"limits": list(limits)})

        async def are_applied() -> bool:
            return await reloads() > before

        await wait_until(are_applied)

    async def connect(
        self, user: str = "root", source: str = "", header: bytes = b""
    ) -> tuple[RawClient, bytes]:
        """Connect and log in. Return the client and the payload of the result."""
        client = await self.proxy.connect(source)
        client.writer.write(header)
        _, greeting = await with_timeout(client.read_packet())
        if greeting[0] == 0xFF:
            return client, greeting
        client.writer.write(login_packet(user=user))
        return client, (await with_timeout(client.read_packet()))[1]

    async def accept(self, user: str = "root", source: str = "", header: bytes = b"") -> RawClient:
        client, answer = await self.connect(user, source, header)
        assert error_code(answer) == 0, answer
        return client

    async def refuse(self, user: str = "root", source: str = "", header: bytes = b"") -> tuple[int, str]:
        """Connect a client, which must be refused. Return the code and the text of the error."""
        client, answer = await self.connect(user, source, header)
        assert answer[0] == 0xFF, answer
        assert await read_to_end(client) == b""
        return error_code(answer), answer[3:].decode()

    async def wait_for_connections(self, **connections: int) -> None:
        """Wait until the module reports these connections by rule."""
        await self.proxy.wait_for_metrics(
            {("limit_connections", name): count for name, count in connections.items()}
        )


@asynccontextmanager
async def run_limited(
    directory: Path, limits: Sequence[dict[str, Any]], trusted_proxies: Sequence[str] = ()
) -> AsyncIterator[LimitedEnvoy]:
    endpoints = directory / "endpoints.json"
    config = ModuleConfig(
        live_settings={"limits": list(limits)}, endpoints=endpoints, trusted_proxies=trusted_proxies
    )
    async with (
        run_fake_server(serve) as node,
        run_envoy(directory, [node.endpoint], config, workers=2) as proxy,
    ):
        yield LimitedEnvoy(proxy, endpoints, Host(node.endpoint))


async def close(*clients: RawClient) -> None:
    for client in clients:
        client.writer.close()
        await client.writer.wait_closed()


async def change_user(client: RawClient, user: str) -> bytes:
    body = user.encode() + b"\0\0\0\x2d\0mysql_native_password\0"
    return await with_timeout(client.send_command(MySqlCommand.CHANGE_USER, body))


async def test_connections_in_all_are_limited(tmp_path: Path) -> None:
    async with run_limited(tmp_path, [rule("total", 3)]) as envoy:
        clients = [await envoy.accept() for _ in range(3)]
        code, text = await envoy.refuse()
        assert code == TOO_MANY_CONNECTIONS
        assert text == (
            "Tidevoy: too many connections to all Envoys together (3); close some and try again (operator: "
            "limits.max_connections)"
        )
        await envoy.wait_for_connections(total=3)
        await envoy.proxy.wait_for_metrics(
            {
                ("login_failures", "", "fleet_limit"): 1,
                ("limit_refusals", "total"): 1,
                ("limit_quota", "total"): 3,
                ("limit_over_quota", "total"): 1,
            }
        )
        await envoy.refuse()
        lines = [line for line in envoy.proxy.log.splitlines() if "clients are refused" in line]
        assert len(lines) == 1
        assert "refused by the rule total (limit 3 over all Envoys" in lines[0]
        await close(clients.pop())
        await envoy.wait_for_connections(total=2)
        await envoy.accept()


async def test_connections_of_a_network_are_limited(tmp_path: Path) -> None:
    limits = [rule("office", 2, network="127.0.0.0/24"), rule("one", 1, network="127.0.7.1/32")]
    async with run_limited(tmp_path, limits) as envoy:
        clients = [await envoy.accept(), await envoy.accept(source="127.0.0.2")]
        code, text = await envoy.refuse(source="127.0.0.3")
        assert (code, "'office' (2)" in text) == (TOO_MANY_CONNECTIONS, True)
        await envoy.accept(source=OTHER_NETWORK)
        await envoy.refuse(source=OTHER_NETWORK)
        await close(*clients)
        await envoy.wait_for_connections(office=0, one=1)
        await envoy.accept()


async def test_network_is_that_in_the_header_of_a_trusted_proxy(tmp_path: Path) -> None:
    limits = [rule("office", 1, network="192.0.2.0/24")]

    def header(client: str) -> bytes:
        return f"PROXY TCP4 {client} 192.0.2.8 4711 6000\r\n".encode()

    async with run_limited(tmp_path, limits, [f"{PROXY}/32"]) as envoy:
        await envoy.accept(source=PROXY, header=header("192.0.2.7"))
        await envoy.refuse(source=PROXY, header=header("192.0.2.9"))
        await envoy.accept(source=PROXY, header=header("192.0.3.9"))
        await envoy.accept()


async def test_connections_of_a_user_are_limited(tmp_path: Path) -> None:
    async with run_limited(tmp_path, [rule("reporting", 2, user="report")]) as envoy:
        clients = [await envoy.accept("report") for _ in range(2)]
        code, text = await envoy.refuse("report")
        assert code == USER_LIMIT
        assert text == (
            "#42000Tidevoy: user 'report' has exceeded the limit of connections 'reporting' (2); close some"
            " and try again (operator: limits.rules)"
        )
        for other in ("Report", "root", ""):
            await envoy.accept(other)
        await close(clients.pop())
        await envoy.wait_for_connections(reporting=1)
        await envoy.accept("report")


async def test_rule_with_user_and_network_counts_only_if_both_fit(tmp_path: Path) -> None:
    limits = [rule("total", 9), rule("both", 1, user="report", network="127.0.0.0/24")]
    async with run_limited(tmp_path, limits) as envoy:
        await envoy.accept("report")
        assert (await envoy.refuse("report"))[0] == USER_LIMIT
        await envoy.accept("report", OTHER_NETWORK)
        await envoy.accept("root")
        await envoy.wait_for_connections(total=3, both=1)


async def test_failed_login_gives_its_slots_back(tmp_path: Path) -> None:
    limits = [rule("total", 9), rule("one", 1, user="denied"), rule("two", 1, user="report")]
    async with run_limited(tmp_path, limits) as envoy:
        for _ in range(2):
            client, answer = await envoy.connect("denied")
            assert error_code(answer) == 1045
            await read_to_end(client)
            await close(client)
            await envoy.wait_for_connections(total=0, one=0)
        await envoy.accept("report")
        await envoy.refuse("report")
        await envoy.wait_for_connections(total=1, two=1)


async def test_change_of_user_takes_a_slot_of_the_new_user(tmp_path: Path) -> None:
    limits = [rule("a", 2, user="anna"), rule("b", 1, user="bert"), rule("d", 1, user="denied")]
    async with run_limited(tmp_path, limits) as envoy:
        first, second = await envoy.accept("anna"), await envoy.accept("anna")
        assert error_code(await change_user(first, "anna")) == 0
        await envoy.refuse("anna")
        assert error_code(await change_user(first, "bert")) == 0
        await envoy.wait_for_connections(a=1, b=1)
        answer = await change_user(second, "bert")
        assert error_code(answer) == USER_LIMIT
        assert b"#42000Tidevoy: user 'bert' has exceeded the limit of connections 'b' (1)" in answer
        assert await read_to_end(second) == b""
        await envoy.wait_for_connections(a=0, b=1)
        assert error_code(await change_user(first, "denied")) == 1045
        await envoy.wait_for_connections(a=0, b=1, d=0)
        assert error_code(await change_user(first, "root")) == 0
        await envoy.wait_for_connections(a=0, b=0, d=0)


async def test_rate_of_new_connections_is_limited(tmp_path: Path) -> None:
    limits = [
        rule("total", rate_limit=6, rate=3),
        rule("reporting", user="report", rate_limit=0.5, rate=0.01),
    ]
    async with run_limited(tmp_path, limits) as envoy:
        await envoy.accept("report")
        code, text = await envoy.refuse("report")
        assert code == USER_LIMIT
        assert "user 'report' opens too many connections per second (limit 'reporting': 0.5)" in text
        answers = [await envoy.connect() for _ in range(20)]
        refused = [payload for _, payload in answers if payload[0] == 0xFF]
        assert 10 <= len(refused) < 20
        assert all(error_code(payload) == TOO_MANY_CONNECTIONS for payload in refused)
        assert b"too many new connections per second (limit 'total': 6)" in refused[0]
        await envoy.proxy.wait_for_metrics(
            {
                ("login_failures", "", "connection_rate"): len(refused),
                ("limit_refusals", "total"): len(refused),
                ("limit_over_quota", "total"): 0,
            }
        )

        async def is_accepted() -> bool:
            return error_code((await envoy.connect())[1]) == 0

        await wait_until(is_accepted)


async def test_changed_limits_apply_at_once_and_end_no_session(tmp_path: Path) -> None:
    async with run_limited(tmp_path, []) as envoy:
        clients = [await envoy.accept("report") for _ in range(3)]
        await envoy.set_limits(rule("total", 2), rule("reporting", 9, user="report"))
        await envoy.wait_for_connections(total=3, reporting=3)
        await envoy.refuse()
        await envoy.set_limits(rule("total", 4), rule("reporting", 9, user="report"))
        clients.append(await envoy.accept())
        await envoy.refuse()
        await envoy.set_limits(rule("total", 1), rule("reporting", 9, user="root"))
        await envoy.wait_for_connections(total=4, reporting=1)
        await envoy.refuse()
        await close(clients.pop(0))
        await envoy.wait_for_connections(total=3)
        await envoy.refuse()
        await envoy.set_limits()
        await envoy.accept()
        await envoy.wait_for_connections(total=0, reporting=0)
        for client in clients:
            assert error_code(await with_timeout(client.send_command(MySqlCommand.PING))) == 0


async def test_quota_of_another_process_does_not_apply(tmp_path: Path) -> None:
    async with run_limited(tmp_path, [rule("total", 9) | {"unlisted": 1}]) as envoy:
        await envoy.accept()
        await envoy.refuse()
        instance = await envoy.proxy.instance_id()
        await envoy.set_limits(rule("total", 9) | {"quotas": {"0" * 16: 7, instance: 2}, "unlisted": 0})
        await envoy.accept()
        await envoy.refuse()


@pytest.mark.needs_migration
async def test_session_keeps_its_slots_when_it_migrates(tmp_path: Path, mariadb: MariaDb) -> None:
    limits = {"limits": [rule("total", 2), rule("root", 2, user="root")]}
    async with run_fleet(tmp_path, mariadb, drained=[1], config=ModuleConfig(live_settings=limits)) as fleet:
        clients = [await fleet.connect_raw() for _ in range(2)]
        await fleet.wait_session_counts(2, 0)
        first, second = (Host(node.sql_address) for node in fleet.nodes)
        publish_nodes(fleet.endpoints, [Host(first.endpoint, state="draining"), second], live_settings=limits)
        await fleet.wait_session_counts(0, 2)
        await fleet.proxy.wait_for_metrics({("limit_connections", name): 2 for name in ("total", "root")})
        assert error_code(await clients[0].query("do 1")) == 0
