"""Listeners, clusters and certificates change while Envoy runs: no session ends, and nothing leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.ports import Ports
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import (
    ModuleEnvoy,
    connect_logged_in,
    read_to_end,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.module.reconfigurable_envoy import run_reconfigurable_envoy
from tests.support.waiting import wait_until


@pytest.fixture
def certificates(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


def config_with_tls(certificates: PemFiles, ports: Ports) -> ModuleConfig:
    tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    node = {"tls": "preferred", "ca": str(certificates.ca), "verify": "full"}
    return ModuleConfig(client=tls, node=node, port=ports.allocate())


def variant(config: ModuleConfig, number: int) -> ModuleConfig:
    """Return `config` with other timeouts, so that Envoy replaces listener and cluster."""
    live_settings = {**config.live_settings, "login_timeout": 20 + number}
    return dataclasses.replace(config, live_settings=live_settings, connect_timeout=10.0 + number)


async def test_replaced_listeners_and_clusters_leak_nothing(
    tmp_path: Path, ports: Ports, certificates: PemFiles
) -> None:
    async with run_fake_server(serve_ok) as node:
        hosts, config = [Host(node.endpoint)], config_with_tls(certificates, ports)
        async with run_reconfigurable_envoy(
            tmp_path, hosts, config, "--drain-time-s", "1", workers=2
        ) as proxy:

            async def replace(numbers: range) -> None:
                for number in numbers:
                    await proxy.apply(hosts, variant(config, number))
                    client = await connect_logged_in(proxy)
                    client.writer.close()

                async def is_quiet() -> bool:
                    stats = await proxy.stats(
                        "total_listeners_draining|total_filter_chains_draining|cx_active"
                    )
                    busy = [name for name, value in stats.items() if value and "admin" not in name]
                    return not busy and proxy.thread_names().count("tidevoy-files") == 2

                await wait_until(is_quiet)

            await replace(range(1, 4))
            descriptors, memory = proxy.descriptor_count(), await proxy.allocated_bytes()
            threads = proxy.thread_names()
            await replace(range(4, 20))
            assert proxy.thread_names() == threads
            assert proxy.descriptor_count() <= descriptors + 2
            assert await proxy.allocated_bytes() < memory + 16 * 64 * 1024


async def test_changed_listener_still_counts_the_old_ones_clients(
    tmp_path: Path, ports: Ports, certificates: PemFiles
) -> None:
    async with run_fake_server(serve_ok) as node:
        hosts = [Host(node.endpoint)]
        config = dataclasses.replace(config_with_tls(certificates, ports), session={"max_connections": 2})
        async with run_reconfigurable_envoy(
            tmp_path, hosts, config, "--drain-time-s", "600", workers=2
        ) as proxy:
            old = [await connect_logged_in(proxy) for _ in range(2)]
            await proxy.apply(hosts, variant(config, 1))
            error = await read_to_end(await proxy.connect())
            assert error[4:7] == b"\xff\x10\x04"
            for client in old:
                assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def session(proxy: ModuleEnvoy, ca: Path) -> Any:
    """Connect a driver over TLS."""
    trust = ssl.create_default_context(cafile=str(ca))
    return await asyncio.to_thread(pymysql.connect, host=proxy.host, port=proxy.port, user="root", ssl=trust)


async def certificate(proxy: ModuleEnvoy, ca: Path) -> bytes:
    """Return the certificate that a new TLS client receives."""
    with await session(proxy, ca) as connection:
        der: bytes = connection._sock.getpeercert(binary_form=True)
        return der


async def test_certificates_change_without_ending_a_session(tmp_path: Path, certificates: PemFiles) -> None:
    tls = {"tls": "required", "cert": str(certificates.cert), "key": str(certificates.key)}
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=tls)) as proxy,
    ):
        connection = await session(proxy, certificates.ca)
        first = await certificate(proxy, certificates.ca)
        for number in range(3):
            renewed = PemFiles.create(tmp_path / f"fresh-{number}")
            renewed.key.rename(certificates.key)
            renewed.cert.rename(certificates.cert)

            async def is_served(ca: Path = renewed.ca) -> bool:
                try:
                    return await certificate(proxy, ca) != first
                except pymysql.OperationalError as error:
                    return "certificate verify failed" not in str(error)

            await wait_until(is_served)
        certificates.key.write_text("this is no key")
        await wait_until(lambda: "new clients get the old certificates" in proxy.log)
        assert await certificate(proxy, renewed.ca) != first
        await asyncio.to_thread(connection.ping, reconnect=False)
        connection.close()
