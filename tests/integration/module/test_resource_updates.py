"""Listeners, clusters and certificates change while Envoy runs: no session ends, and nothing leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.ports import Ports
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap
from tests.support.module.envoy import (
    ModuleEnvoy,
    connect_logged_in,
    read_to_end,
    run_envoy,
    serve_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.waiting import wait_until

API = "type.googleapis.com/envoy.config"
TYPE_URLS = {"listeners": f"{API}.listener.v3.Listener", "clusters": f"{API}.cluster.v3.Cluster"}


class ReconfigurableEnvoy:
    """An Envoy that reads its listener and cluster from files."""

    def __init__(self, directory: Path, hosts: list[Host], drain: int) -> None:
        self._directory, self._hosts = directory, hosts
        self._versions = 0
        self._drain = drain

    def write(self, config: ModuleConfig) -> dict[str, Any]:
        """Write the resources for Envoy. Return the bootstrap that reads them."""
        self._versions += 1
        envoy_bootstrap = bootstrap(self._hosts, config)
        for kind, resources in envoy_bootstrap.pop("static_resources").items():
            typed = [{"@type": TYPE_URLS[kind], **resource} for resource in resources]
            file = self._directory / f"{kind}.json"
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps({"version_info": str(self._versions), "resources": typed}))
            temporary.rename(file)
        sources = {
            name: {
                "path_config_source": {"path": str(self._directory / f"{kind}.json")},
                "resource_api_version": "V3",
            }
            for name, kind in (("lds_config", "listeners"), ("cds_config", "clusters"))
        }
        return {**envoy_bootstrap, "dynamic_resources": sources}

    @asynccontextmanager
    async def run(self, config: ModuleConfig) -> AsyncIterator[ModuleEnvoy]:
        """Run the Envoy."""
        arguments = ("--drain-time-s", str(self._drain))
        process = ModuleEnvoy(
            json.dumps(self.write(config)), self._directory, concurrency=2, arguments=arguments
        )
        async with serve_envoy(process, config):
            yield process

    async def change(self, proxy: ModuleEnvoy, config: ModuleConfig) -> None:
        """Write the resources, and wait until Envoy has applied them."""
        names = ["listener_manager.listener_modified", "cluster_manager.cluster_modified"]
        before = await proxy.stats("_modified$")
        self.write(config)

        async def is_applied() -> bool:
            now = await proxy.stats("_modified$")
            return all(now[name] > before[name] for name in names)

        await wait_until(is_applied)


@pytest.fixture
def certificates(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


def config_with_tls(certificates: PemFiles, ports: Ports) -> ModuleConfig:
    tls = {"tls": "optional", "cert": str(certificates.cert), "key": str(certificates.key)}
    node = {"tls": "preferred", "ca": str(certificates.ca), "verify": "full"}
    return ModuleConfig(client=tls, node=node, port=ports.allocate())


def variant(config: ModuleConfig, number: int) -> ModuleConfig:
    """Return `config` with other timeouts, so that it counts as a change."""
    live = {**config.live, "login_timeout": 20 + number}
    return dataclasses.replace(config, live=live, connect_timeout=10.0 + number)


async def test_replaced_listeners_and_clusters_leak_nothing(
    tmp_path: Path, ports: Ports, certificates: PemFiles
) -> None:
    async with run_fake_server(serve_ok) as node:
        reconfigurable = ReconfigurableEnvoy(tmp_path, [Host(node.endpoint)], drain=1)
        config = config_with_tls(certificates, ports)
        async with reconfigurable.run(config) as proxy:

            async def replace(numbers: range) -> None:
                for number in numbers:
                    await reconfigurable.change(proxy, variant(config, number))
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
        reconfigurable = ReconfigurableEnvoy(tmp_path, [Host(node.endpoint)], drain=600)
        config = dataclasses.replace(config_with_tls(certificates, ports), session={"max_connections": 2})
        async with reconfigurable.run(config) as proxy:
            old = [await connect_logged_in(proxy) for _ in range(2)]
            await reconfigurable.change(proxy, variant(config, 1))
            error = await read_to_end(await proxy.connect())
            assert error[4:7] == b"\xff\x10\x04"
            for client in old:
                assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def session(proxy: ModuleEnvoy, ca: Path) -> Any:
    """Open a driver's session over TLS."""
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
        await wait_until(lambda: has_logged(proxy, "new clients get the old certificates"))
        assert await certificate(proxy, renewed.ca) != first
        await asyncio.to_thread(connection.ping, reconnect=False)
        connection.close()


async def has_logged(proxy: ModuleEnvoy, text: str) -> bool:
    return text in proxy.log
