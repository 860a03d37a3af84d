"""An Envoy with the module and a configuration of its own, and nodes that follow a script."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane import address as addresses
from controlplane.publish import module_file
from controlplane.version import VERSION
from sandbox.envoy import EnvoyProcess
from sandbox.tidb_sim.greeting import OFFERED, greeting, new_salt
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, err, frame, ok
from tests.awaiting import until
from tests.clients.server import Certificates
from tests.tidb_sim_rig import CAPABILITIES, Raw

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_NAMED = {"name": "tidevoy", "do_not_close": True, "metrics_namespace": "tidevoy"}
_LIVE_CONFIG = "tidevoy.live-config"
_T = TypeVar("_T")
_SECONDS = 20.0
"""Every wait ends after so long; what is awaited takes milliseconds, a report about a second."""

Series = Mapping[Any, int]
"""By name, followed by the values of the labels, sorted by label."""

CLIENT: Mapping[str, Any] = {
    "tls": "disabled",
    "cert": "",
    "key": "",
    "client_ca": "",
    "compression": "off",
    "rsa_key": "",
}
NODE: Mapping[str, Any] = {
    "tls": "disabled",
    "ca": "",
    "verify": "none",
    "cert": "",
    "key": "",
    "proxy_protocol": "off",
    "allow_cleartext_backend": False,
    "eject_seconds": 5.0,
    "sentinels": False,
}
SESSION: Mapping[str, Any] = {"max_connections": 0}
LIVE: Mapping[str, Any] = {"group": "", "login_timeout": 20, "idle_timeout": 0}
POLICY: Mapping[str, Any] = {
    "group": "",
    "moves_per_second": 500,
    "moves_at_once": 64,
    "states_max_bytes": 4 << 20,
    "states_budget_bytes": 256 << 20,
    "connect_attempts": 20,
}


@dataclass(frozen=True)
class Host:
    """A node as Envoy knows it. `name`: what the control plane calls it; empty: as its endpoint."""

    endpoint: str
    name: str = ""
    weight: int = 1
    state: str = "active"
    close: bool = False
    moves: str = ""
    wants: str = ""
    version: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Parts:
    """What the module's parts are configured with, beside what stands above; times in seconds."""

    client: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    version: str = VERSION
    attempts: int = 3
    connect_timeout: float = 10.0
    listen: str = "127.0.0.1"
    port: int = 0
    module: Path | None = None
    own_pools: bool = True
    endpoints: Path | None = None
    """A file with the endpoints, for tests that change nodes (`tell`); see also `live_config_file`."""


def found() -> Path:
    """The module's file. Without one the test fails: it is what is tested."""
    module = module_file.find()
    if module is None:
        pytest.fail("libtidevoy.so is not built; run: make filters/target/release/libtidevoy.so")
    return module


def bootstrap(hosts: Sequence[Host], parts: Parts) -> dict[str, Any]:
    """A whole Envoy: one listener, one cluster, the admin port."""

    def part(
        kind: str, message: str, field_name: str, name: str, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        return _part(kind, message, field_name, name, {"version": parts.version, **config})

    def socket(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        packed = part("transport_sockets", "DynamicModuleTransportSocket", "transport_socket", name, config)
        return {"name": name, "typed_config": packed}

    session = part(
        "filters.network", "DynamicModuleNetworkFilter", "filter", "session", {**SESSION, **parts.session}
    )
    policy = part(
        *("load_balancing_policies", "DynamicModulesLoadBalancerConfig", "lb_policy", "least_sessions"),
        {**POLICY, **parts.policy},
    )
    tcp_proxy = {
        "@type": f"{_EXTENSIONS}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "sql",
        "cluster": "tidb",
        "idle_timeout": "0s",
        "max_connect_attempts": parts.attempts,
        "backoff_options": {"base_interval": "0.01s", "max_interval": "0.02s"},
        "hash_policy": [{"filter_state": {"key": "envoy.hashable_string"}}],
    }
    listener = {
        "name": "sql",
        "address": _socket_address(parts.listen, parts.port),
        "listener_filters": [_live_config(hosts, parts)],
        "filter_chains": [
            {
                "filters": [
                    {"name": "session", "typed_config": session},
                    {"name": "tcp_proxy", "typed_config": tcp_proxy},
                ],
                "transport_socket": socket("client", {**CLIENT, **parts.client}),
            }
        ],
    }
    limits = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    cluster = {
        "name": "tidb",
        "connect_timeout": f"{parts.connect_timeout}s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "connection_pool_per_downstream_connection": parts.own_pools,
        "circuit_breakers": {"thresholds": [limits]},
        "transport_socket": socket("node", {**NODE, **parts.node}),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "least_sessions", "typed_config": policy}}]
        },
        **_where(hosts, parts.endpoints),
    }
    telemetry = part(
        "bootstrap", "DynamicModuleBootstrapExtension", "extension", "telemetry", parts.telemetry
    )
    telemetry["dynamic_module_config"] = _NAMED | {
        "module": {"local": {"filename": str(parts.module or found())}}
    }
    return {
        "node": {"id": "test", "cluster": "tidevoy"},
        "admin": {"address": _socket_address("127.0.0.1", 0)},
        "bootstrap_extensions": [{"name": "tidevoy", "typed_config": telemetry}],
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _part(kind: str, message: str, field_name: str, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "@type": f"{_EXTENSIONS}.{kind}.dynamic_modules.v3.{message}",
        "dynamic_module_config": _NAMED,
        f"{field_name}_name": name,
        f"{field_name}_config": {"@type": "type.googleapis.com/google.protobuf.Struct", "value": config},
    }


def _live_config(hosts: Sequence[Host], parts: Parts) -> dict[str, Any]:
    config = _live_config_part(hosts, {**LIVE, **parts.live}, parts.version)
    if parts.endpoints is None:
        return {"name": _LIVE_CONFIG, "typed_config": config}
    publish(parts.endpoints, hosts, parts.live, version=parts.version)
    source = {
        "path_config_source": {"path": str(live_config_file(parts.endpoints))},
        "resource_api_version": "V3",
    }
    return {
        "name": _LIVE_CONFIG,
        "config_discovery": {"config_source": source, "type_urls": [config["@type"]]},
    }


def _live_config_part(hosts: Sequence[Host], live: Mapping[str, Any], version: str) -> dict[str, Any]:
    nodes = [_node_info(host) for host in hosts]
    config = {"version": version, "published": {**live, "nodes": nodes}}
    message = "DynamicModuleListenerFilter"
    return _part("filters.listener", message, "filter", "live_config", config)


def live_config_file(endpoints: Path) -> Path:
    """The file with the live configuration that belongs to those endpoints."""
    return endpoints.with_name(f"{endpoints.name}.live")


def publish(
    endpoints: Path,
    hosts: Sequence[Host],
    live: Mapping[str, Any] | None = None,
    *,
    version: str = VERSION,
) -> None:
    """Change the live configuration only."""
    config = _live_config_part(hosts, {**LIVE, **(live or {})}, version)
    kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    _replace(live_config_file(endpoints), {"@type": kind, "name": _LIVE_CONFIG, "typed_config": config})


def _replace(file: Path, resource: Mapping[str, Any]) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"resources": [resource]}))
    new.rename(file)  # Envoy looks for files that are moved there


def _where(hosts: Sequence[Host], endpoints: Path | None) -> dict[str, Any]:
    if endpoints is None:
        return {"type": "STATIC", "load_assignment": _assignment(hosts)}
    tell_endpoints(endpoints, hosts)
    source = {"path_config_source": {"path": str(endpoints)}, "resource_api_version": "V3"}
    return {"type": "EDS", "eds_cluster_config": {"eds_config": source}}


def tell(endpoints: Path, hosts: Sequence[Host], group: str = "") -> None:
    """Change the nodes of a group, in the endpoints and in the live configuration."""
    tell_endpoints(endpoints, hosts, f"tidb-{group}" if group else "tidb")
    publish(endpoints, hosts, {"group": group})


def tell_endpoints(endpoints: Path, hosts: Sequence[Host], cluster: str = "tidb") -> None:
    """Change the endpoints only."""
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    _replace(endpoints, {"@type": kind, **_assignment(hosts, cluster)})


def _assignment(hosts: Sequence[Host], cluster: str = "tidb") -> dict[str, Any]:
    priorities = range(max((host.priority for host in hosts), default=0) + 1)
    return {
        "cluster_name": cluster,
        "endpoints": [
            {
                "priority": priority,
                "lb_endpoints": [_endpoint(host) for host in hosts if host.priority == priority],
            }
            for priority in priorities
        ],
    }


def _endpoint(host: Host) -> dict[str, Any]:
    health = {"draining": "DRAINING", "unhealthy": "UNHEALTHY"}.get(host.state, "HEALTHY")
    return {
        "health_status": health,
        "endpoint": {"address": _socket_address(*addresses.split(host.endpoint))},
        "load_balancing_weight": host.weight,
    }


def _node_info(host: Host) -> dict[str, Any]:
    known: dict[str, Any] = {
        "endpoint": host.endpoint,
        "address": host.name or host.endpoint,
        "state": host.state,
    }
    known |= {"close": True} if host.close else {}
    known |= {"moves": host.moves} if host.moves else {}
    known |= {"wants": host.wants} if host.wants else {}
    known |= {"version": host.version} if host.version else {}
    return known


def _socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


class Envoy(EnvoyProcess):
    """An Envoy that serves SQL on `host:port`."""

    host: str
    port: int
    listeners: dict[str, int]
    """Ports, by name."""
    clients: list[Raw]

    @property
    def _bootstrap_file(self) -> Path:
        # Not YAML: Envoy reads its fractions as strings where no field says that they are numbers.
        return self.directory / f"{self.name}.json"

    async def client(self) -> Raw:
        """A connection that can send anything; cut at the end, if not before."""
        client = Raw(*await within(asyncio.open_connection(self.host, self.port)))
        self.clients.append(client)
        return client

    async def metrics(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """The module's series: by name without `tidevoy_`, and the values of its labels, sorted by label."""
        page = await self.get("/stats/prometheus?filter=^tidevoy")
        return {
            (sample.name.removeprefix("envoy_tidevoy_").removesuffix("_total"), _labels(sample.labels)): int(
                sample.value
            )
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
        }

    async def reports(self, expected: Series) -> None:
        """Wait until each series (name, then the values of its labels, sorted by label) has its value.

        The module reports once a second. A series that is not there has the value 0.
        """
        seen: dict[tuple[str, ...], int] = {}

        async def are_there() -> bool:
            every = await self.metrics()
            seen.update({key: every.get((key[0], key[1:]), 0) for key in expected})
            return seen == expected

        try:
            await until(are_there)
        except TimeoutError:
            told = {
                " ".join((name, *labels)): value for (name, labels), value in (await self.metrics()).items()
            }
            pytest.fail(f"expected {dict(expected)}, got {seen}; all: {json.dumps(told, indent=1)}")

    async def instance(self) -> str:
        """How the module names this process."""

        names: list[str] = []

        async def is_told() -> bool:
            names.extend(labels[0] for name, labels in await self.metrics() if name == "module_info")
            return bool(names)

        await until(is_told)
        return names[0]

    async def memory(self) -> int:
        """Bytes that are allocated (`GET /memory` of the admin port)."""
        return int((await self.get("/memory")).json()["allocated"])

    def descriptors(self) -> int:
        """Open files of its process."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> list[str]:
        """Names of its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sorted((task / "comm").read_text().strip() for task in tasks)

    @property
    def pid(self) -> int:
        """Of Envoy itself: the program that ties it to us is replaced by it."""
        return self.process.pid

    @property
    def log(self) -> str:
        """All that it has logged."""
        return self.process.output()


def _labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(value for name, value in sorted(labels.items()))


@asynccontextmanager
async def envoy(
    directory: Path, hosts: Sequence[Host | str], parts: Parts | None = None, *, workers: int = 1
) -> AsyncIterator[Envoy]:
    """An Envoy with the module that accepts clients. At the end SIGTERM must end it with exit code 0."""
    parts = parts or Parts()
    known = [Host(host) if isinstance(host, str) else host for host in hosts]
    process = Envoy(json.dumps(bootstrap(known, parts)), directory, concurrency=workers)
    async with serving(process, parts):
        yield process


@asynccontextmanager
async def serving(process: Envoy, parts: Parts) -> AsyncIterator[None]:
    """The same of an Envoy with another bootstrap."""
    process.host, process.listeners, process.clients = parts.listen, {}, []
    async with process:
        await until(process.live)
        for listener in (await process.get("/listeners?format=json")).json()["listener_statuses"]:
            process.listeners[listener["name"]] = listener["local_address"]["socket_address"]["port_value"]
        process.port = process.listeners["sql"]
        try:
            yield
            if process.running:
                await process.stop()
        finally:
            for client in process.clients:
                client.writer.transport.abort()
    assert process.process.returncode == 0, process.log[-3000:]
    assert "a bug:" not in process.log


def greets(version: str = "8.0.11-scripted", offered: Capability = OFFERED) -> bytes:
    """A greeting, as its whole packet."""
    return frame(0, greeting(version, 7, new_salt(), offered=offered))


def refuses(code: int, text: str, state: str | None = None) -> bytes:
    """An error in place of a greeting, as its whole packet."""
    return frame(0, err(code, text, state))


OK = ok(AUTOCOMMIT)


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes = b"") -> Raw:
    """Let a client in, whoever it is; what comes next is up to the caller."""
    node = Raw(reader, writer)
    writer.write(greeting or greets())
    sequence, _ = await node.packet()
    writer.write(frame(sequence + 1, OK))
    return node


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A handler (tests.peers): a node that lets everybody in, and answers all commands with OK."""
    node = await admit(reader, writer)
    while True:
        await node.packet()
        writer.write(frame(1, OK))


async def denies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A handler: a node that denies all logins. Sessions that were to move there stay, with known states."""
    node = Raw(reader, writer)
    writer.write(greets())
    sequence, _ = await node.packet()
    writer.write(frame(sequence + 1, err(1045, "Access denied", "28000")))


def response(capabilities: Capability = CAPABILITIES, user: str = "root", sequence: int = 1) -> bytes:
    """A client's answer to the greeting, with an empty password, as its whole packet."""
    head = struct.pack("<IIB23x", capabilities, 1 << 24, 45)
    return frame(sequence, head + user.encode() + b"\0\0mysql_native_password\0")


async def within(awaitable: Awaitable[_T]) -> _T:
    """Its result; TimeoutError when it takes too long."""
    async with asyncio.timeout(_SECONDS):
        return await awaitable


async def rest(client: Raw) -> bytes:
    """What comes until the FIN. A reset raises ConnectionResetError."""
    return await within(client.reader.read())


async def logged_in(envoy: Envoy) -> Raw:
    """A raw client that is logged in."""
    client = await envoy.client()
    assert (await within(client.login()))[0] == 0
    return client


def secured(
    pair: Certificates, mode: str = "required", *, allowed: bool = False, passed: bool = False
) -> Parts:
    """TLS with clients, none with nodes."""
    client = {"tls": mode, "cert": str(pair.cert), "key": str(pair.key)}
    compression = {"compression": "passthrough" if passed else "off"}
    return Parts(client=client | compression, node={"allow_cleartext_backend": allowed})


async def secure(
    proxy: Envoy, pair: Certificates, capabilities: Capability = CAPABILITIES, *, answer: bytes = OK
) -> Raw:
    """A client that has sent its login over TLS. The answer must begin with `answer`."""
    client = await proxy.client()
    await within(client.packet())
    capabilities |= Capability.SSL
    client.writer.write(frame(1, response(capabilities)[4:36]))
    await within(
        client.writer.start_tls(ssl.create_default_context(cafile=str(pair.ca)), server_hostname="localhost")
    )
    client.writer.write(response(capabilities, sequence=2))
    assert (await within(client.packet()))[1].startswith(answer)
    return client
