"""A running Envoy with the module, and scripted nodes and clients."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.model.traffic import SESSION_STATES
from sandbox.envoy import EnvoyProcess
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, build_greeting, new_salt
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, err, frame, ok
from tests.support.clients.server import PemFiles
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap
from tests.support.tidb_sim_clients import CAPABILITIES, RawClient
from tests.support.waiting import wait_until

_T = TypeVar("_T")
_WAIT_TIMEOUT_SECONDS = 20.0
"""Limit of every wait. Awaited events take milliseconds, the module's reports about a second."""

_APPLIED_COUNTERS = r"^(cluster\.tidb\.update_success|extension_config_discovery\..*\.config_reload)$"
"""Envoy's counters of applied endpoints and of applied live configurations."""

NO_NODE_ERROR = (
    b"\xff\x51\x04Tidevoy: no TiDB server takes new sessions at the moment; try again "
    b"(operator: `tidevoy nodes` tells why)"
)
"""The error that a client gets instead of a greeting if there is no node for it."""

MetricValues = Mapping[Any, int]
"""Values of series. A key is the name, followed by the label values, sorted by label."""


class ModuleEnvoy(EnvoyProcess):
    """An Envoy that serves SQL on `host:port`."""

    host: str
    port: int
    listeners: dict[str, int]
    """Ports by listener name."""
    clients: list[RawClient]

    # Envoy reads a fraction in YAML as a string, unless a field declares the type of the value.
    config_suffix = ".json"

    async def connect(self, source: str = "") -> RawClient:
        """Connect a client that can send any packet, from the local address `source`. Reset it at the end."""
        local = (source, 0) if source else None
        connecting = asyncio.open_connection(self.host, self.port, local_addr=local)
        client = RawClient(*await with_timeout(connecting))
        self.clients.append(client)
        return client

    async def metrics(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the module's series by name (without `tidevoy_`) and label values (sorted by label)."""
        page = await self.get("/stats/prometheus?filter=^tidevoy")
        return {
            (sample.name.removeprefix("envoy_tidevoy_").removesuffix("_total"), _labels(sample.labels)): int(
                sample.value
            )
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
        }

    async def wait_for_metrics(self, expected: MetricValues) -> None:
        """Wait until each series (name, then label values sorted by label) has its value.

        The module reports once a second. A missing series has the value 0.
        """
        current: dict[tuple[str, ...], int] = {}

        async def have_values() -> bool:
            metrics = await self.metrics()
            current.update({key: metrics.get((key[0], key[1:]), 0) for key in expected})
            return current == expected

        try:
            await wait_until(have_values)
        except TimeoutError:
            all_metrics = {
                " ".join((name, *labels)): value for (name, labels), value in (await self.metrics()).items()
            }
            pytest.fail(f"expected {dict(expected)}, got {current}; all: {json.dumps(all_metrics, indent=1)}")

    async def wait_no_sessions(self, *nodes: str) -> None:
        """Wait until the module reports no session of these nodes in any state."""
        await self.wait_for_metrics(
            {("sessions", node, state): 0 for node in nodes for state in SESSION_STATES}
        )

    @asynccontextmanager
    async def wait_applied(self) -> AsyncIterator[None]:
        """After the block, wait until Envoy has applied new endpoints and a new live configuration."""
        before = await self.stats(_APPLIED_COUNTERS)
        assert len(before) >= 2, before
        yield

        async def are_applied() -> bool:
            return all(count > before[name] for name, count in (await self.stats(_APPLIED_COUNTERS)).items())

        await wait_until(are_applied)

    async def instance_id(self) -> str:
        """Return the module's instance id of this process."""

        names: list[str] = []

        async def is_reported() -> bool:
            names.extend(labels[0] for name, labels in await self.metrics() if name == "module_info")
            return bool(names)

        await wait_until(is_reported)
        return names[0]

    async def allocated_bytes(self) -> int:
        """Return the allocated bytes (`GET /memory` of the admin port)."""
        return int((await self.get("/memory")).json()["allocated"])

    def descriptor_count(self) -> int:
        """Return the number of open files of its process."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def thread_names(self) -> list[str]:
        """Return the names of its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sorted((task / "comm").read_text().strip() for task in tasks)

    @property
    def pid(self) -> int:
        """The process id of Envoy, which runs in the process of the program that started it."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Its whole log."""
        return self.process.output()


def _labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(value for name, value in sorted(labels.items()))


@asynccontextmanager
async def run_envoy(
    directory: Path, hosts: Sequence[Host | str], config: ModuleConfig | None = None, *, workers: int = 1
) -> AsyncIterator[ModuleEnvoy]:
    """Run an Envoy with the module. At the end, SIGTERM must stop it with exit code 0."""
    config = config or ModuleConfig()
    all_hosts = [Host(host) if isinstance(host, str) else host for host in hosts]
    process = ModuleEnvoy(json.dumps(bootstrap(all_hosts, config)), directory, concurrency=workers)
    async with serve_envoy(process, config):
        yield process


@asynccontextmanager
async def serve_envoy(process: ModuleEnvoy, config: ModuleConfig) -> AsyncIterator[None]:
    """Run an Envoy with any bootstrap. At the end, SIGTERM must stop it with exit code 0."""
    process.host, process.listeners, process.clients = config.listen, {}, []
    async with process:
        await wait_until(process.is_live)
        for listener in (await process.get("/listeners?format=json")).json()["listener_statuses"]:
            process.listeners[listener["name"]] = listener["local_address"]["socket_address"]["port_value"]
        process.port = process.listeners["sql"]
        try:
            yield
            if process.is_running:
                await process.stop()
        finally:
            for client in process.clients:
                client.writer.transport.abort()
    assert process.process.returncode == 0, process.log[-3000:]
    assert "a bug:" not in process.log


def greeting_packet(version: str = "8.0.11-scripted", offered: Capability = OFFERED_CAPABILITIES) -> bytes:
    """Build the whole packet of a greeting."""
    return frame(0, build_greeting(version, 7, new_salt(), offered=offered))


def error_packet(code: int, text: str, state: str | None = None) -> bytes:
    """Build the whole packet of an error in place of a greeting."""
    return frame(0, err(code, text, state))


OK_PAYLOAD = ok(AUTOCOMMIT)


async def accept_login(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes = b""
) -> RawClient:
    """Accept any login. The caller handles the commands."""
    node = RawClient(reader, writer)
    writer.write(greeting or greeting_packet())
    sequence, _ = await node.read_packet()
    writer.write(frame(sequence + 1, OK_PAYLOAD))
    return node


async def serve_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept every login and answer all commands with OK (a handler for tests.support.fake_servers)."""
    node = await accept_login(reader, writer)
    while True:
        await node.read_packet()
        writer.write(frame(1, OK_PAYLOAD))


async def deny_logins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Deny all logins (a handler). Migrations to this node fail, and Envoy keeps the session's states."""
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    sequence, _ = await node.read_packet()
    writer.write(frame(sequence + 1, err(1045, "Access denied", "28000")))


def login_packet(capabilities: Capability = CAPABILITIES, user: str = "root", sequence: int = 1) -> bytes:
    """Build the whole packet of a client's response to the greeting, with an empty password."""
    head = struct.pack("<IIB23x", capabilities, 1 << 24, 45)
    return frame(sequence, head + user.encode() + b"\0\0mysql_native_password\0")


async def with_timeout(awaitable: Awaitable[_T]) -> _T:
    """Return the awaitable's result. Raises TimeoutError if it takes too long."""
    async with asyncio.timeout(_WAIT_TIMEOUT_SECONDS):
        return await awaitable


async def read_to_end(client: RawClient) -> bytes:
    """Return the data until the FIN. Raises ConnectionResetError on a reset."""
    return await with_timeout(client.reader.read())


async def connect_logged_in(envoy: ModuleEnvoy) -> RawClient:
    """Return a raw client that is logged in."""
    client = await envoy.connect()
    assert (await with_timeout(client.login()))[0] == 0
    return client


def client_tls_config(
    pair: PemFiles,
    mode: str = "required",
    *,
    allow_cleartext_backend: bool = False,
    passthrough_compression: bool = False,
) -> ModuleConfig:
    """Return a configuration with TLS for clients and none for nodes."""
    client = {"tls": mode, "cert": str(pair.cert), "key": str(pair.key)}
    compression = {"compression": "passthrough" if passthrough_compression else "off"}
    return ModuleConfig(
        client=client | compression, node={"allow_cleartext_backend": allow_cleartext_backend}
    )


async def connect_with_tls(
    proxy: ModuleEnvoy, pair: PemFiles, capabilities: Capability = CAPABILITIES, *, answer: bytes = OK_PAYLOAD
) -> RawClient:
    """Log in over TLS. The response must start with `answer`."""
    client = await proxy.connect()
    await with_timeout(client.read_packet())
    capabilities |= Capability.SSL
    client.writer.write(frame(1, login_packet(capabilities)[4:36]))
    await with_timeout(
        client.writer.start_tls(ssl.create_default_context(cafile=str(pair.ca)), server_hostname="localhost")
    )
    client.writer.write(login_packet(capabilities, sequence=2))
    assert (await with_timeout(client.read_packet()))[1].startswith(answer)
    return client
