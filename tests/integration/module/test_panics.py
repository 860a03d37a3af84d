"""A panic in a hook of an Envoy module ends only the connection in which it happens.

The module under test (filters/envoy-abi/examples/panics.rs) uses the crate `envoy-abi`, as the product's
module does. It panics at every second call of one hook.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from sandbox.server import http_client
from tests.support.fake_servers import run_fake_server
from tests.support.module.envoy import with_timeout
from tests.support.waiting import wait_until

FILTERS = Path(__file__).parents[3] / "filters"
TYPE = "type.googleapis.com/envoy.extensions"
LOOPBACK = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def panicking_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the module that panics. Return its file."""
    target = tmp_path_factory.mktemp("cargo")
    command = ["cargo", "build", "--quiet", "--locked", "--package", "envoy-abi", "--example", "panics"]
    path = f"{os.environ['PATH']}{os.pathsep}{Path.home() / '.cargo' / 'bin'}"
    environment = {**os.environ, "PATH": path, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(command, cwd=FILTERS, env=environment, check=True)
    return target / "debug" / "examples" / "libpanics.so"


class BootstrapBuilder:
    """Builds the bootstrap of an Envoy that uses the module for one extension."""

    def __init__(self, module: Path) -> None:
        self._module = {
            "name": "panics",
            "do_not_close": True,
            "module": {"local": {"filename": str(module)}},
        }

    def extension(self, kind: str, message: str, field: str, name: str) -> dict[str, Any]:
        """Return the configuration of an extension that the module implements."""
        config = {
            "@type": f"{TYPE}.{kind}.dynamic_modules.v3.{message}",
            "dynamic_module_config": self._module,
            f"{field}_name": name,
        }
        return {"name": "panics", "typed_config": config}

    def bootstrap(self, where: str, hook: str, upstream: str) -> dict[str, Any]:
        """Return a bootstrap. `where`: the kind of extension that the module implements (see `match`)."""
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
        envoy_bootstrap: dict[str, Any] = {
            "admin": {"address": LOOPBACK},
            "static_resources": {
                "listeners": [{"name": "l", "address": LOOPBACK, "filter_chains": [chain]}],
                "clusters": [cluster],
            },
        }
        socket = ("transport_sockets", "DynamicModuleTransportSocket", "transport_socket", hook)
        match where:
            case "listener":
                envoy_bootstrap["static_resources"]["listeners"][0]["listener_filters"] = [
                    self.extension("filters.listener", "DynamicModuleListenerFilter", "filter", hook)
                ]
            case "filter":
                chain["filters"].insert(
                    0, self.extension("filters.network", "DynamicModuleNetworkFilter", "filter", hook)
                )
            case "client":
                chain["transport_socket"] = self.extension(*socket)
            case "node":
                cluster["transport_socket"] = self.extension(*socket)
            case "policy":
                policy = self.extension(
                    "load_balancing_policies", "DynamicModulesLoadBalancerConfig", "lb_policy", hook
                )
                cluster["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
            case "http":
                http_filter = self.extension("filters.http", "DynamicModuleFilter", "filter", hook)
                direct_response = {"match": {"prefix": "/"}, "direct_response": {"status": 204}}
                chain["filters"] = [http_connection_manager([http_filter], direct_response)]
            case "extension":
                extension = self.extension("bootstrap", "DynamicModuleBootstrapExtension", "extension", hook)
                envoy_bootstrap["bootstrap_extensions"] = [extension]
        return envoy_bootstrap


def http_connection_manager(filters: Sequence[Any], route: Mapping[str, Any]) -> dict[str, Any]:
    router = {"@type": f"{TYPE}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "t",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, {"name": "router", "typed_config": router}],
    }
    return {"name": "http", "typed_config": manager}


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)


@asynccontextmanager
async def run_envoy(directory: Path, bootstrap: Mapping[str, Any]) -> AsyncIterator[tuple[EnvoyProcess, int]]:
    """Run an Envoy. Yield it and the port of its listener."""
    async with EnvoyProcess(json.dumps(bootstrap), directory) as envoy:
        await wait_until(envoy.is_live)
        (listener,) = (await envoy.get("/listeners?format=json")).json()["listener_statuses"]
        yield envoy, listener["local_address"]["socket_address"]["port_value"]
        await envoy.stop()
        assert envoy.process.returncode == 0, envoy.process.tail()


@asynccontextmanager
async def run_panicking_envoy(
    directory: Path, module: Path, where: str, hook: str
) -> AsyncIterator[tuple[EnvoyProcess, int]]:
    """Run an Envoy in front of an echo server; the module's extension at `where` panics in `hook`."""
    async with run_fake_server(echo) as upstream:
        bootstrap = BootstrapBuilder(module).bootstrap(where, hook, upstream.endpoint)
        async with run_envoy(directory, bootstrap) as envoy_and_port:
            yield envoy_and_port


async def is_echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Return True if the connection echoes, and False if it is closed."""
    writer.write(b"hello")
    try:
        return await with_timeout(reader.readexactly(5)) == b"hello"
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


@pytest.mark.parametrize(
    ("where", "hook", "logged_hook"),
    [
        ("listener", "accept", "listener_filter_on_accept"),
        ("listener", "inspect", "listener_filter_on_data"),
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
async def test_panic_ends_only_its_own_connection(
    tmp_path: Path, panicking_module: Path, where: str, hook: str, logged_hook: str
) -> None:
    async with run_panicking_envoy(tmp_path, panicking_module, where, hook) as (envoy, port):
        connections = []
        served = []
        for _ in range(6):
            connections.append(await asyncio.open_connection("127.0.0.1", port))
            served.append(await is_echoed(*connections[-1]))
        assert served == [True, False] * 3
        # Envoy still serves the connections that had no panic.
        for connection, is_served in zip(connections, served, strict=True):
            if is_served:
                assert await is_echoed(*connection)
            connection[1].transport.abort()
        assert f"a bug: {logged_hook} panicked" in envoy.process.output()
        assert "on purpose" in envoy.process.output()


@pytest.mark.parametrize(
    ("where", "hook", "logged_hook"),
    [
        ("client", "attached", "transport_socket_set_callbacks"),
        ("client", "connected", "transport_socket_on_connected"),
        ("client", "closed", "transport_socket_close"),
        ("node", "attached", "transport_socket_set_callbacks"),
        ("node", "closed", "transport_socket_close"),
        ("extension", "tick", "bootstrap_extension_timer_fired"),
    ],
)
async def test_panic_in_a_notification_hook_ends_no_connection(
    tmp_path: Path, panicking_module: Path, where: str, hook: str, logged_hook: str
) -> None:
    async with run_panicking_envoy(tmp_path, panicking_module, where, hook) as (envoy, port):
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await is_echoed(reader, writer)
            writer.write_eof()
            assert await with_timeout(reader.read()) == b""
            writer.close()

        async def is_logged() -> bool:
            return f"a bug: {logged_hook} panicked" in envoy.process.output()

        await wait_until(is_logged)


async def test_panic_in_the_http_filter_answers_with_an_error(tmp_path: Path, panicking_module: Path) -> None:
    async with run_panicking_envoy(tmp_path, panicking_module, "http", "respond") as (envoy, port):
        async with http_client(f"http://127.0.0.1:{port}") as client:
            responses = [await client.get("/any") for _ in range(4)]
        assert [response.status_code for response in responses] == [200, 500, 200, 500]
        assert responses[0].text == "responded"
        assert "a bug: http_filter_request_headers panicked" in envoy.process.output()


async def test_panic_rejects_a_configuration(tmp_path: Path, panicking_module: Path) -> None:
    bootstrap = BootstrapBuilder(panicking_module).bootstrap("filter", "configuration", "127.0.0.1:1")
    with pytest.raises(ProcessFailed, match='network filter "configuration" is refused: a panic'):
        async with run_envoy(tmp_path, bootstrap):
            pass
