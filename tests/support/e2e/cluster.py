"""Starts a complete cluster for one test, and additional Envoys."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster, WaitTimeout
from sandbox.mariadb import MariaDb
from sandbox.server import sends_mysql_greeting
from sandbox.tidb_sim.greeting import NATIVE_PASSWORD
from sandbox.tidb_sim.packets import Capability, MySqlCommand, frame
from tests.support.controlplane.api_server import stored_events
from tests.support.module.bootstrap import require_module, require_supervisor
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient, error_code

_Key = TypeVar("_Key")
_WAIT_TIMEOUT_SECONDS = 30.0


class CountingClient(RawClient):
    """A client that counts the bytes of its commands and of their responses."""

    sent_bytes = received_bytes = 0

    async def read_packet(self) -> tuple[int, bytes]:
        """Read the next packet. Raises TimeoutError."""
        async with asyncio.timeout(_WAIT_TIMEOUT_SECONDS):
            sequence, payload = await super().read_packet()
        self.received_bytes += 4 + len(payload)
        return sequence, payload

    async def log_in(
        self,
        user: str = "root",
        password: bytes = b"",
        *,
        plugin: str = NATIVE_PASSWORD,
        tls: ssl.SSLContext | None = None,
    ) -> bytes:
        """Log in, over TLS if `tls` is set. Return the first response, or a greeting that is an error.

        `password` is the authentication response: it is sent without hashing.
        """
        _, greeting = await self.read_packet()
        if greeting[:1] == b"\xff":
            return greeting
        capabilities, sequence = CAPABILITIES, 1
        if tls is not None:
            capabilities |= Capability.SSL
            self.writer.write(frame(1, struct.pack("<IIB23x", capabilities, 1 << 24, 45)))
            await self.writer.start_tls(tls, server_hostname="127.0.0.1")
            sequence = 2
        head = struct.pack("<IIB23x", capabilities, 1 << 24, 45) + user.encode() + b"\0"
        self.writer.write(
            frame(sequence, head + bytes((len(password),)) + password + plugin.encode() + b"\0")
        )
        _, response = await self.read_packet()
        self.sent_bytes = self.received_bytes = 0
        return response

    def write_command(self, command: int, body: bytes = b"") -> None:
        """Send a command; read its response with `read_packet`."""
        data = frame(0, bytes((command,)) + body)
        self.sent_bytes += len(data)
        self.writer.write(data)

    async def send_command(self, command: int, body: bytes = b"") -> bytes:
        """Send a command; return the payload of the first response packet."""
        self.write_command(command, body)
        return (await self.read_packet())[1]

    async def query(self, text: bytes | str) -> bytes:
        """Run a statement; return the payload of the first response packet."""
        return await self.send_command(MySqlCommand.QUERY, text.encode() if isinstance(text, str) else text)

    async def read_to_end(self) -> bytes:
        """Return the data until the FIN. Raises ConnectionResetError on a reset."""
        async with asyncio.timeout(_WAIT_TIMEOUT_SECONDS):
            return await self.reader.read()


@asynccontextmanager
async def counting_client(port: int) -> AsyncIterator[CountingClient]:
    """Connect without sending anything. Abort the connection at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield CountingClient(reader, writer)
    finally:
        writer.transport.abort()


async def open_session(
    exit_stack: AsyncExitStack, port: int, tls: ssl.SSLContext | None = None
) -> CountingClient:
    """Log in as root, over TLS if `tls` is set. The session ends when `exit_stack` is closed."""
    client = await exit_stack.enter_async_context(counting_client(port))
    assert error_code(await client.log_in(tls=tls)) == 0
    return client


@asynccontextmanager
async def run_cluster(
    directory: Path,
    mariadb: MariaDb,
    *,
    nodes: int = 1,
    arguments: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
    module: bool = True,
    expects_listener: bool = True,
    workers: int = 2,
    supervised: bool = False,
) -> AsyncIterator[LocalCluster]:
    """Run a cluster. Yield it when all nodes are in service. No client has connected to its Envoy yet.

    Each simulated server gets `arguments`. `expects_listener`: whether the Envoy must get a listener.
    `supervised`: whether the supervisor runs the Envoy.
    """
    start = LocalCluster.start(
        directory,
        nodes=0,
        mariadb=mariadb,
        settings=settings,
        concurrency=workers,
        module=require_module() if module else None,
        envoy_supervisor=require_supervisor() if supervised else None,
    )
    async with start as stack:
        for _ in range(nodes):
            await stack.add_tidb(*arguments)
        await stack.wait_until(
            lambda: stack.has_active_nodes(nodes), f"{nodes} active nodes", _WAIT_TIMEOUT_SECONDS
        )
        await stack.wait_until(
            lambda: is_up_to_date(stack, "envoy-1", expects_listener),
            "the Envoy to be up to date",
            _WAIT_TIMEOUT_SECONDS,
        )
        yield stack
        assert stack.violations() == []
        assert "a bug:" not in stack.envoy.process.output()


async def get_envoys(stack: LocalCluster) -> dict[str, dict[str, Any]]:
    """Return the Envoys of `GET /v1/envoys` by id."""
    return {envoy["id"]: envoy for envoy in (await stack.api.get("/v1/envoys")).json()["envoys"]}


async def is_up_to_date(stack: LocalCluster, envoy: str, expects_listener: bool = True) -> bool:
    """Return whether an Envoy is connected and, if `expects_listener`, has acknowledged the last version."""
    status = (await get_envoys(stack)).get(envoy)
    if status is None or status["connected_since"] is None:
        return False
    return not expects_listener or status["acked_version"] == status["published_version"] != ""


async def wait_for_values(
    stack: LocalCluster, expected: Mapping[_Key, Any], read: Callable[[], Awaitable[Mapping[_Key, Any]]]
) -> None:
    """Wait until `read` returns all expected values. Raises AssertionError with the last values."""
    last: dict[_Key, Any] = {}

    async def matches() -> bool:
        current = await read()
        last.clear()
        last.update({key: current.get(key) for key in expected})
        return last == dict(expected)

    try:
        await stack.wait_until(matches, "the expected values", _WAIT_TIMEOUT_SECONDS)
    except WaitTimeout as timeout:
        raise AssertionError(f"expected {dict(expected)}, last values: {last}") from timeout


MetricKey = tuple[str, frozenset[tuple[str, str]]]


def metric_key(name: str, **labels: str) -> MetricKey:
    """Return the key of a sample in `get_metrics`; the label `class` is given as `class_`."""
    return name, frozenset((label.rstrip("_"), value) for label, value in labels.items())


async def get_metrics(stack: LocalCluster) -> dict[MetricKey, float]:
    """Return the samples of `GET /metrics`."""
    return {
        metric_key(sample.name, **sample.labels): sample.value
        for family in text_string_to_metric_families((await stack.api.get("/metrics")).text)
        for sample in family.samples
    }


async def get_events(stack: LocalCluster, *kinds: str) -> list[dict[str, Any]]:
    """Return all events of these kinds so far."""
    return [event for event in await stored_events(stack.api) if event["kind"] in kinds]


async def reload_settings(stack: LocalCluster, **settings: Any) -> dict[str, Any]:
    """Replace these sections of the configuration. Return the response of the reload."""
    stack.control_plane.settings = {**stack.control_plane.settings, **settings}
    await stack.control_plane.prepare()
    response: dict[str, Any] = (await stack.api.post("/v1/config/reload")).raise_for_status().json()
    return response


async def restart_envoy(stack: LocalCluster) -> None:
    """Kill the Envoy, start it, and wait until it has acknowledged the published version and serves."""
    await stack.envoy.kill()
    connected_since = (await get_envoys(stack))["envoy-1"]["connected_since"]

    async def has_reconnected() -> bool:
        status = (await get_envoys(stack))["envoy-1"]
        return status["connected_since"] not in (None, connected_since) and await is_up_to_date(
            stack, "envoy-1"
        )

    await stack.envoy.launch()
    await stack.wait_until(has_reconnected, "the Envoy to reconnect", _WAIT_TIMEOUT_SECONDS)
    await stack.wait_until(stack.envoy.is_live, "the Envoy to serve", _WAIT_TIMEOUT_SECONDS)


@asynccontextmanager
async def run_another_envoy(
    stack: LocalCluster,
    name: str,
    *,
    module: Path | None,
    claimed_version: str | None = None,
    group: str = "",
    zone: str = "",
) -> AsyncIterator[int]:
    """Run one more Envoy with the id `name`, and yield its SQL port.

    `claimed_version`: the module version that the Envoy announces instead of its real version. `group`: the
    only group that the Envoy serves.

    A changed `sql.listen` applies only to Envoys that start later. So this Envoy gets its own port, and the
    other Envoys keep theirs.
    """
    port = stack.ports.allocate()
    await reload_settings(stack, sql={"listen": f"127.0.0.1:{port}"})
    bootstrap = render_bootstrap(
        stack.control_plane.parsed_settings(),
        control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
        node_id=name,
        admin="127.0.0.1:0",
        module=None if module is None else str(module),
        group=group,
        zone=zone,
    )
    if claimed_version is not None:
        changed = bootstrap.replace('"tidevoy.module": "', f'"tidevoy.module": "{claimed_version}" # "')
        assert changed != bootstrap
        bootstrap = changed
    async with EnvoyProcess(bootstrap, stack.directory / name, name=name):
        await stack.wait_until(lambda: sends_mysql_greeting(port), f"{name} to serve", _WAIT_TIMEOUT_SECONDS)
        await stack.wait_until(
            lambda: is_up_to_date(stack, name), f"{name} to be up to date", _WAIT_TIMEOUT_SECONDS
        )
        yield port
