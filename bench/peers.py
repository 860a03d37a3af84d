"""What is measured side by side: no proxy, HAProxy, plain Envoy, Tidevoy, and whatever a command starts."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from bench import haproxy
from bench.costs import Proxy
from bench.haproxy import GUIDE, TUNED, HaProxy, Tuning
from bench.machine import version_of
from bench.workloads import Stage
from controlplane.errors import TidevoyError
from controlplane.publish import module_file
from controlplane.publish.bootstrap import render
from controlplane.version import VERSION
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess, envoy_binary
from sandbox.mariadb import PACKAGE as MARIADB_PACKAGE
from sandbox.ports import Ports
from sandbox.process import ProcessFailed, ProgramMissing, find_program
from sandbox.server import Server, greets

DIRECT = "direct"
REFERENCE, AGAIN = "HAProxy", "HAProxy again"
TIDEVOY = "Tidevoy"

_PATIENCE = 30.0  # seconds until an Envoy has its configuration
_POLL = 0.05


class PeerUnusable(TidevoyError):
    """A `--peer` cannot be understood."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a proxy, or a server, shows to clients that want TLS: files in PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer is started: a directory of its own, ports, the servers behind it, and how it is set up."""

    directory: Path
    ports: Ports
    servers: Sequence[int]
    certificate: Certificate
    stage: Stage


@dataclass(frozen=True, slots=True)
class Peer:
    """One of those that are compared. `start` returns when clients reach a server through it."""

    name: str
    version: str
    start: Callable[[Site], AbstractAsyncContextManager[Proxy]]


def ours() -> list[Peer]:
    """All that belong to the benchmark. ProgramMissing when something is not installed, or not built."""
    module = module_file.find()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    server = version_of(find_program("mariadbd", MARIADB_PACKAGE))
    ha_version = version_of(find_program("haproxy", haproxy.PACKAGE), "-v")
    envoy_version = version_of(str(envoy_binary()))
    return [
        Peer(DIRECT, f"MariaDB {server}", _direct),
        Peer(REFERENCE, ha_version, _haproxy(GUIDE)),
        Peer("HAProxy tuned", ha_version, _haproxy(TUNED)),
        Peer(AGAIN, ha_version, _haproxy(GUIDE)),
        Peer("Envoy", envoy_version, envoy(None)),
        Peer(TIDEVOY, f"{VERSION} in Envoy {envoy_version}", envoy(module)),
    ]


@asynccontextmanager
async def _direct(site: Site) -> AsyncIterator[Proxy]:
    yield Proxy(site.servers[0])


def _haproxy(tuning: Tuning) -> Callable[[Site], AbstractAsyncContextManager[Proxy]]:
    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        port = site.ports.take()
        text = haproxy.configuration(
            listen=port,
            servers=site.servers,
            log=site.ports.take(),
            workers=site.stage.workers,
            connections=site.stage.connections,
            certificate=site.certificate.cert if site.stage.tls else None,
            tuning=tuning,
        )
        async with HaProxy(site.directory, port, text, tls=site.stage.tls) as server:
            yield Proxy(port, server.process.pid, tls_first=site.stage.tls)

    return start


def envoy(module: Path | None) -> Callable[[Site], AbstractAsyncContextManager[Proxy]]:
    """An Envoy, with or without the module, that runs what a control plane of its own publishes to it."""

    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        port = site.ports.take()
        control_plane = ControlPlane(site.directory, settings(site, port, with_module=module is not None))
        bootstrap = render(
            control_plane.parsed(),
            control_planes=[control_plane.parsed().xds.listen],
            node_id="measured",
            admin="127.0.0.1:0",
            module=None if module is None else str(module),
        )
        process = EnvoyProcess(bootstrap, site.directory, concurrency=site.stage.workers)
        async with control_plane, process:
            wanted = "none" if module is None else "module"
            try:
                async with asyncio.timeout(_PATIENCE):
                    while not (await _runs(control_plane, wanted) and await greets(port)):  # noqa: ASYNC110 - the other processes tell us nothing by themselves
                        await asyncio.sleep(_POLL)
            except TimeoutError:
                reason = f"did not run what its control plane publishes within {_PATIENCE:.0f} s"
                raise ProcessFailed("Envoy", reason, process.process.tail()) from None
            yield Proxy(port, process.process.pid)

    return start


def settings(site: Site, listen: int, *, with_module: bool) -> dict[str, Any]:
    """A control plane for one Envoy: defaults, but for what a machine without TiDB and PD needs.

    Clients' TLS ends in the module. An Envoy without it passes TLS on, and a server answers it.
    """
    certificate = {"cert": str(site.certificate.cert), "key": str(site.certificate.key)}
    ends_tls = site.stage.tls and with_module
    return {
        "nodes": [{"address": f"127.0.0.1:{server}"} for server in site.servers],
        "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
        "sql": {"listen": f"127.0.0.1:{listen}"},
        "xds": {"listen": f"127.0.0.1:{site.ports.take()}"},
        "api": {"listen": f"127.0.0.1:{site.ports.take()}"},
        "state_dir": str(site.directory / "state"),
        **({"tls": {"client": {"mode": "optional", **certificate}}} if ends_tls else {}),
    }


async def _runs(control_plane: ControlPlane, filter_name: str) -> bool:
    """Whether its Envoy runs what is published, with the filter that is to be measured."""
    async with httpx2.AsyncClient(base_url=control_plane.api, trust_env=False) as api:
        envoys = (await api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    return any(
        envoy["filter"] == filter_name and envoy["acked_version"] == envoy["published_version"] != ""
        for envoy in envoys
    )


def by_command(text: str) -> Peer:
    """A peer from `NAME=COMMAND`. PeerUnusable."""
    name, _, command = text.partition("=")
    name = name.strip()
    if not name or "{listen}" not in command or "{servers}" not in command:
        raise PeerUnusable(
            f"cannot use the peer {text!r}: write NAME=COMMAND, where the command has {{listen}} for the"
            " address on which it must listen and {servers} for those of the servers, with commas"
        )
    try:
        program, *words = shlex.split(command)
        path = find_program(program, "")
    except ValueError as error:
        raise PeerUnusable(f"cannot read the command of peer {name}: {error}") from None
    except ProgramMissing:
        raise PeerUnusable(f"there is no program {program} for peer {name}; write its path") from None

    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        port = site.ports.take()
        arguments = filled(words, port, site.servers, site.stage.workers)
        async with _Commanded(name, site.directory, port, [path, *arguments]) as server:
            yield Proxy(port, server.process.pid)

    return Peer(name, "", start)


def filled(words: Sequence[str], listen: int, servers: Sequence[int], workers: int) -> list[str]:
    """The words of a command with {listen}, {servers} and {workers} filled in; other braces stay."""
    values: Mapping[str, str] = {
        "listen": f"127.0.0.1:{listen}",
        "servers": ",".join(f"127.0.0.1:{server}" for server in servers),
        "workers": str(workers),
    }
    return [re.sub(r"\{(listen|servers|workers)\}", lambda found: values[found[1]], word) for word in words]


class _Commanded(Server):
    """A proxy that somebody else wrote."""

    def __init__(self, name: str, directory: Path, port: int, command: list[str]) -> None:
        super().__init__(re.sub(r"[^\w.-]", "-", name), directory)
        self._port = port
        self._words = command

    def command(self) -> list[str]:
        """As it was given."""
        return self._words

    def listens(self) -> list[int]:
        """Its port."""
        return [self._port]

    async def serves(self) -> bool:
        """Whether a server behind it greets."""
        return await greets(self._port)
