"""Limits of clients that have not finished their login."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import LOGIN_LIMITS, ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, read_to_end, run_envoy, serve_ok, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

PROXY = "127.0.0.5"
OF_ADDRESS_ERROR = b"\xff\x10\x04Tidevoy: too many clients of this address are logging in at the same time"
OF_ALL_ERROR = b"\xff\x10\x04Tidevoy: too many clients are logging in at the same time"


@asynccontextmanager
async def run_limited(
    directory: Path, limits: Mapping[str, Any], trusted_proxies: tuple[str, ...] = ()
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy with these limits in front of a node that accepts every login."""
    config = ModuleConfig(
        session={"login_limits": LOGIN_LIMITS | dict(limits)}, trusted_proxies=trusted_proxies
    )
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(directory, [node.endpoint], config, workers=2) as proxy,
    ):
        yield proxy


async def first_packet(proxy: ModuleEnvoy, source: str = "", header: bytes = b"") -> tuple[RawClient, bytes]:
    """Connect a client from `source`. Return it and the payload of the first packet."""
    client = await proxy.connect(source)
    client.writer.write(header)
    sequence, payload = await with_timeout(client.read_packet())
    assert sequence == 0
    return client, payload


async def connect_greeted(proxy: ModuleEnvoy, source: str = "", header: bytes = b"") -> RawClient:
    """Connect a client, which must get a greeting."""
    client, payload = await first_packet(proxy, source, header)
    assert payload[:1] == b"\x0a", payload
    return client


async def expect_rejection(proxy: ModuleEnvoy, error: bytes, source: str = "", header: bytes = b"") -> None:
    """Connect a client, which must get this error instead of a greeting."""
    client, payload = await first_packet(proxy, source, header)
    assert payload[: len(error)] == error
    assert await read_to_end(client) == b""


async def wait_until_accepted(proxy: ModuleEnvoy) -> None:
    """Wait until a client gets a greeting."""

    async def is_accepted() -> bool:
        client, payload = await first_packet(proxy)
        client.writer.close()
        return payload[:1] == b"\x0a"

    await wait_until(is_accepted)


async def failure_counts(proxy: ModuleEnvoy) -> dict[str, int]:
    """Return the reported login failures by reason."""
    counts: dict[str, int] = {}
    for (name, labels), value in (await proxy.metrics()).items():
        if name == "login_failures" and value:
            counts[labels[-1]] = counts.get(labels[-1], 0) + value
    return counts


async def test_unfinished_logins_of_an_address_are_limited(tmp_path: Path) -> None:
    async with run_limited(tmp_path, {"max_logins_per_address": 2}) as proxy:
        first, second = await connect_greeted(proxy), await connect_greeted(proxy)
        for _ in range(3):
            await expect_rejection(proxy, OF_ADDRESS_ERROR)
        await connect_greeted(proxy, "127.0.0.2")
        # A session that is logged in does not count any more.
        assert (await with_timeout(first.send_login()))[0] == 0
        third = await connect_greeted(proxy)
        await expect_rejection(proxy, OF_ADDRESS_ERROR)
        # Neither does a client that has gone.
        second.writer.close()
        third.writer.close()
        await wait_until_accepted(proxy)

        async def are_reported() -> bool:
            return (await failure_counts(proxy)).get("too_many_logins_of_address", 0) >= 4

        await wait_until(are_reported)


async def test_unfinished_logins_of_all_addresses_are_limited(tmp_path: Path) -> None:
    async with run_limited(tmp_path, {"max_logins": 2, "max_logins_per_address": 2}) as proxy:
        first = await connect_greeted(proxy, "127.0.0.2")
        await connect_greeted(proxy, "127.0.0.3")
        await expect_rejection(proxy, OF_ALL_ERROR, "127.0.0.4")
        assert (await with_timeout(first.send_login()))[0] == 0
        await connect_greeted(proxy, "127.0.0.4")


async def test_shared_addresses_have_only_the_limit_for_all(tmp_path: Path) -> None:
    limits = {"max_logins": 3, "max_logins_per_address": 1, "shared_addresses": ["127.0.0.2/32"]}
    async with run_limited(tmp_path, limits) as proxy:
        for _ in range(3):
            await connect_greeted(proxy, "127.0.0.2")
        await expect_rejection(proxy, OF_ALL_ERROR, "127.0.0.2")


async def test_clients_behind_a_trusted_proxy_are_counted_by_their_own_addresses(tmp_path: Path) -> None:
    async with run_limited(tmp_path, {"max_logins_per_address": 1}, (f"{PROXY}/32",)) as proxy:
        for client in (b"192.0.2.1", b"192.0.2.2", b"192.0.2.3"):
            await connect_greeted(proxy, PROXY, b"PROXY TCP4 " + client + b" 192.0.2.9 4711 6000\r\n")
        header = b"PROXY TCP4 192.0.2.2 192.0.2.9 4712 6000\r\n"
        await expect_rejection(proxy, OF_ADDRESS_ERROR, PROXY, header)


@pytest.mark.parametrize(
    ("limits", "error"),
    [({"max_bytes_per_address": 150_000}, OF_ADDRESS_ERROR), ({"max_bytes": 150_000}, OF_ALL_ERROR)],
    ids=["address", "all"],
)
async def test_memory_of_incomplete_packets_is_limited(
    tmp_path: Path, limits: dict[str, int], error: bytes
) -> None:
    incomplete = (200_000).to_bytes(3, "little") + b"\x01" + b"\0\x82\x08\0" + bytes(60_000)
    async with run_limited(tmp_path, limits) as proxy:
        clients = [await connect_greeted(proxy) for _ in range(4)]
        for client in clients:
            client.writer.write(incomplete)
        rejections = [asyncio.create_task(client.read_packet()) for client in clients]
        await with_timeout(asyncio.wait(rejections, return_when=asyncio.FIRST_COMPLETED))
        for rejection in rejections:
            if rejection.done():
                sequence, payload = rejection.result()
                assert (sequence, payload[: len(error)]) == (2, error)
            else:
                rejection.cancel()
        for client in clients:
            client.writer.close()
        await wait_until_accepted(proxy)
