"""A panic in any hook ends the connection that it happened in, and nothing else.

The hooks are those of `filters/abi`, and so of the module; what panics is a module for tests
(filters/abi/examples/panics.rs), every second time that it is asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from tests.support.fake_servers import run_fake_server
from tests.support.module.envoy import with_timeout
from tests.support.waiting import wait_until

FILTERS = Path(__file__).parents[3] / "filters"
TYPE = "type.googleapis.com/envoy.extensions"
LOOPBACK = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def panics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module that panics, built."""
    target = tmp_path_factory.mktemp("cargo")
    command = ["cargo", "build", "--quiet", "--locked", "--package", "abi", "--example", "panics"]
    path = f"{os.environ['PATH']}{os.pathsep}{Path.home() / '.cargo' / 'bin'}"
    environment = {**os.environ, "PATH": path, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(command, cwd=FILTERS, env=environment, check=True)
    return target / "debug" / "examples" / "libpanics.so"


class Builder:
    """Makes an Envoy of plain parts, but for one that is the module's."""

    def __init__(self, module: Path) -> None:
        self._module = {
            "name": "panics",
            "do_not_close": True,
            "module": {"local": {"filename": str(module)}},
        }

    def part(self, kind: str, message: str, field: str, name: str) -> dict[str, Any]:
        """An extension's entry, of the module."""
        config = {
            "@type": f"{TYPE}.{kind}.dynamic_modules.v3.{message}",
            "dynamic_module_config": self._module,
            f"{field}_name": name,
        }
        return {"name": "panics", "typed_config": config}

    def bootstrap(self, where: str, hook: str, upstream: str) -> dict[str, Any]:
        """`where`: filter, client, node, policy or extension."""
        host, port = upstream.split(":")
        proxy = {"@type": f"{TYPE}.filters.network.tcp_proxy.v3.TcpProxy", "stat_prefix": "t", "cluster": "c"}
        chain: dict[str, Any] = {"filters": [{"name": "tcp_proxy", "typed_config": proxy}]}
        endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
        cluster: dict[str, Any] = {
            "name": "c",
            "connect_timeout": "0.5s",
            "load_assignment": {
                "cluster_name": "c",
                "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
            },
        }
        made: dict[str, Any] = {
            "admin": {"address": LOOPBACK},
            "static_resources": {
                "listeners": [{"name": "l", "address": LOOPBACK, "filter_chains": [chain]}],
                "clusters": [cluster],
            },
        }
        socket = ("transport_sockets", "DynamicModuleTransportSocket", "transport_socket", hook)
        match where:
            case "filter":
                chain["filters"].insert(
                    0, self.part("filters.network", "DynamicModuleNetworkFilter", "filter", hook)
                )
            case "client":
                chain["transport_socket"] = self.part(*socket)
            case "node":
                cluster["transport_socket"] = self.part(*socket)
            case "policy":
                policy = self.part(
                    "load_balancing_policies", "DynamicModulesLoadBalancerConfig", "lb_policy", hook
                )
                cluster["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
            case "extension":
                extension = self.part("bootstrap", "DynamicModuleBootstrapExtension", "extension", hook)
                made["bootstrap_extensions"] = [extension]
        return made


async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)


@asynccontextmanager
async def running(directory: Path, bootstrap: Mapping[str, Any]) -> AsyncIterator[tuple[EnvoyProcess, int]]:
    """An Envoy, and the port of its listener."""
    async with EnvoyProcess(json.dumps(bootstrap), directory) as envoy:
        await wait_until(envoy.is_live)
        (listener,) = (await envoy.get("/listeners?format=json")).json()["listener_statuses"]
        yield envoy, listener["local_address"]["socket_address"]["port_value"]
        await envoy.stop()
        assert envoy.process.returncode == 0, envoy.process.tail()


@asynccontextmanager
async def panicking(
    directory: Path, module: Path, where: str, hook: str
) -> AsyncIterator[tuple[EnvoyProcess, int]]:
    """As `running`, before a node that echoes; the module's part at `where` panics in `hook`."""
    async with run_fake_server(echoes) as upstream:
        bootstrap = Builder(module).bootstrap(where, hook, upstream.endpoint)
        async with running(directory, bootstrap) as started:
            yield started


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a connection serves; else it has been closed."""
    writer.write(b"hello")
    try:
        return await with_timeout(reader.readexactly(5)) == b"hello"
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


@pytest.mark.parametrize(
    ("where", "hook", "logged"),
    [
        ("filter", "new", "network_filter_new"),
        ("filter", "begun", "network_filter_new_connection"),
        ("client", "new", "transport_socket_new"),
        ("client", "read", "transport_socket_do_read"),
        ("client", "write", "transport_socket_do_write"),
        ("node", "new", "transport_socket_new"),
        ("node", "connected", "transport_socket_on_connected"),
        ("node", "read", "transport_socket_do_read"),
        ("node", "write", "transport_socket_do_write"),
        ("policy", "choose", "lb_choose_host"),
    ],
)
async def test_a_panic_ends_its_own_connection_only(
    tmp_path: Path, panics: Path, where: str, hook: str, logged: str
) -> None:
    async with panicking(tmp_path, panics, where, hook) as (envoy, port):
        connections = []
        served = []
        for _ in range(6):
            connections.append(await asyncio.open_connection("127.0.0.1", port))
            served.append(await echoed(*connections[-1]))
        assert served == [True, False] * 3
        # Those that were served before a panic still are.
        for connection, well in zip(connections, served, strict=True):
            if well:
                assert await echoed(*connection)
            connection[1].transport.abort()
        assert f"a bug: {logged} panicked" in envoy.process.output()
        assert "on purpose" in envoy.process.output()


@pytest.mark.parametrize(
    ("where", "hook", "logged"),
    [
        ("client", "attached", "transport_socket_set_callbacks"),
        ("client", "connected", "transport_socket_on_connected"),
        ("client", "closed", "transport_socket_close"),
        ("node", "attached", "transport_socket_set_callbacks"),
        ("node", "closed", "transport_socket_close"),
        ("extension", "tick", "bootstrap_extension_timer_fired"),
    ],
)
async def test_a_panic_where_nothing_depends_on_it_is_survived(
    tmp_path: Path, panics: Path, where: str, hook: str, logged: str
) -> None:
    async with panicking(tmp_path, panics, where, hook) as (envoy, port):
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await echoed(reader, writer)
            writer.write_eof()
            assert await with_timeout(reader.read()) == b""
            writer.close()

        async def told() -> bool:
            return f"a bug: {logged} panicked" in envoy.process.output()

        await wait_until(told)


async def test_a_panic_refuses_a_configuration(tmp_path: Path, panics: Path) -> None:
    bootstrap = Builder(panics).bootstrap("filter", "configuration", "127.0.0.1:1")
    with pytest.raises(ProcessFailed, match='network filter "configuration" is refused: a panic'):
        async with running(tmp_path, bootstrap):
            pass
