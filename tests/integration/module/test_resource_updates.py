"""Listeners, clusters and certificates change while Envoy runs: nothing is left, nobody is hurt."""

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
KINDS = {"listeners": f"{API}.listener.v3.Listener", "clusters": f"{API}.cluster.v3.Cluster"}


class Changing:
    """An Envoy that reads listener and cluster from files."""

    def __init__(self, directory: Path, hosts: list[Host], drain: int) -> None:
        self._directory, self._hosts = directory, hosts
        self._versions = 0
        self._drain = drain

    def put(self, parts: ModuleConfig) -> dict[str, Any]:
        """What Envoy has from now on; returns the bootstrap that reads it."""
        self._versions += 1
        made = bootstrap(self._hosts, parts)
        for kind, resources in made.pop("static_resources").items():
            typed = [{"@type": KINDS[kind], **resource} for resource in resources]
            file = self._directory / f"{kind}.json"
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps({"version_info": str(self._versions), "resources": typed}))
            fresh.rename(file)
        sources = {
            name: {
                "path_config_source": {"path": str(self._directory / f"{kind}.json")},
                "resource_api_version": "V3",
            }
            for name, kind in (("lds_config", "listeners"), ("cds_config", "clusters"))
        }
        return {**made, "dynamic_resources": sources}

    @asynccontextmanager
    async def run(self, parts: ModuleConfig) -> AsyncIterator[ModuleEnvoy]:
        """Such an Envoy."""
        arguments = ("--drain-time-s", str(self._drain))
        process = ModuleEnvoy(
            json.dumps(self.put(parts)), self._directory, concurrency=2, arguments=arguments
        )
        async with serve_envoy(process, parts):
            yield process

    async def change(self, proxy: ModuleEnvoy, parts: ModuleConfig) -> None:
        """Put it, and wait until Envoy has taken it."""
        names = ["listener_manager.listener_modified", "cluster_manager.cluster_modified"]
        before = await proxy.stats("_modified$")
        self.put(parts)

        async def is_taken() -> bool:
            now = await proxy.stats("_modified$")
            return all(now[name] > before[name] for name in names)

        await wait_until(is_taken)


@pytest.fixture
def pair(tmp_path: Path) -> PemFiles:
    return PemFiles.create(tmp_path / "certificates")


def parts_with(pair: PemFiles, ports: Ports) -> ModuleConfig:
    tls = {"tls": "optional", "cert": str(pair.cert), "key": str(pair.key)}
    node = {"tls": "preferred", "ca": str(pair.ca), "verify": "full"}
    return ModuleConfig(client=tls, node=node, port=ports.allocate())


def with_number(parts: ModuleConfig, number: int) -> ModuleConfig:
    """The same with other times, so that it counts as a change."""
    live = {**parts.live, "login_timeout": 20 + number}
    return dataclasses.replace(parts, live=live, connect_timeout=10.0 + number)


async def test_nothing_is_left_of_replaced_listeners_and_clusters(
    tmp_path: Path, ports: Ports, pair: PemFiles
) -> None:
    async with run_fake_server(serve_ok) as node:
        changing = Changing(tmp_path, [Host(node.endpoint)], drain=1)
        parts = parts_with(pair, ports)
        async with changing.run(parts) as proxy:

            async def replace(numbers: range) -> None:
                for number in numbers:
                    await changing.change(proxy, with_number(parts, number))
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


async def test_a_changed_listener_does_not_forget_the_clients_of_the_old_one(
    tmp_path: Path, ports: Ports, pair: PemFiles
) -> None:
    async with run_fake_server(serve_ok) as node:
        changing = Changing(tmp_path, [Host(node.endpoint)], drain=600)
        parts = dataclasses.replace(parts_with(pair, ports), session={"max_connections": 2})
        async with changing.run(parts) as proxy:
            old = [await connect_logged_in(proxy) for _ in range(2)]
            await changing.change(proxy, with_number(parts, 1))
            told = await read_to_end(await proxy.connect())
            assert told[4:7] == b"\xff\x10\x04"
            for client in old:
                assert (await with_timeout(client.send_command(0x0E)))[0] == 0


async def session(proxy: ModuleEnvoy, ca: Path) -> Any:
    """A driver's session over TLS."""
    trust = ssl.create_default_context(cafile=str(ca))
    return await asyncio.to_thread(pymysql.connect, host=proxy.host, port=proxy.port, user="root", ssl=trust)


async def certificate(proxy: ModuleEnvoy, ca: Path) -> bytes:
    """What a new client with TLS is shown."""
    with await session(proxy, ca) as connection:
        shown: bytes = connection._sock.getpeercert(binary_form=True)
        return shown


async def test_certificates_change_without_hurting_a_session(tmp_path: Path, pair: PemFiles) -> None:
    tls = {"tls": "required", "cert": str(pair.cert), "key": str(pair.key)}
    async with (
        run_fake_server(serve_ok) as node,
        run_envoy(tmp_path, [node.endpoint], ModuleConfig(client=tls)) as proxy,
    ):
        held = await session(proxy, pair.ca)
        first = await certificate(proxy, pair.ca)
        for number in range(3):
            fresh = PemFiles.create(tmp_path / f"fresh-{number}")
            fresh.key.rename(pair.key)
            fresh.cert.rename(pair.cert)

            async def is_shown(ca: Path = fresh.ca) -> bool:
                try:
                    return await certificate(proxy, ca) != first
                except pymysql.OperationalError as error:
                    return "certificate verify failed" not in str(error)

            await wait_until(is_shown)
        pair.key.write_text("this is no key")
        await wait_until(lambda: logged(proxy, "new clients get the old certificates"))
        assert await certificate(proxy, fresh.ca) != first
        await asyncio.to_thread(held.ping, reconnect=False)
        held.close()


async def logged(proxy: ModuleEnvoy, text: str) -> bool:
    return text in proxy.log
