"""Starts what is compared: the server itself, HAProxy, Envoy, Tidevoy, and any other proxy by its command."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from bench.load_client import Target, Tls
from bench.machine import cpu_seconds, memory_mib, session_members, version_of
from bench.proxies import haproxy
from bench.proxies.backends import Backend
from bench.proxies.haproxy import HaProxy
from bench.proxies.workloads import Encryption
from controlplane.errors import TidevoyError
from controlplane.version import VERSION
from controlplane.xds.bootstrap import module_path
from sandbox.child_process import ProcessFailed, ProgramMissing, describe_exit, find_program
from sandbox.control_plane import TIDEVOY_COMMAND, ControlPlane
from sandbox.envoy import EnvoyProcess, envoy_binary
from sandbox.ports import Ports
from sandbox.server import Server, greets
from sandbox.session_certificate import SessionCertificate

DIRECT, HAPROXY, ENVOY, TIDEVOY = "direct", "HAProxy", "Envoy", "Tidevoy"
_PATIENCE = 30.0  # seconds until an Envoy has its configuration
_POLL = 0.05
_KB_PER_MIB = 1024 * 1024 / 1000
_KEEPALIVE_IDLE = 7_200
"""Seconds, longer than any run: thousands of sessions that became idle together are else probed in one
moment, which overflows loopback's queue (net.core.netdev_max_backlog), and those whose probes were lost are
closed."""


class PeerUnusable(TidevoyError):
    """A `--peer` cannot be understood."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a proxy needs to start: a directory of its own, ports, the server behind it, and TLS."""

    directory: Path
    ports: Ports
    backend: Backend
    certificate: SessionCertificate
    encryption: Encryption = Encryption.NONE

    def of(self, name: str) -> Site:
        """The same with a directory for this proxy."""
        return replace(self, directory=self.directory / re.sub(r"[^\w-]", "-", f"{name}-{self.encryption}"))


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: how clients reach it, and the process that leads its session; None: there is no proxy.

    `api`: base URL of its control plane, if it has one.
    """

    target: Target
    leader: int | None = None
    api: str = ""

    def processes(self) -> list[int]:
        """All of its processes."""
        return [] if self.leader is None else session_members(self.leader)

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used, from the kernel's scheduler.

        It includes the network's soft interrupts that the proxy caused: over loopback, the kernel handles a
        packet within the system call that sends it, and charges that to the sender.
        """
        return sum(cpu_seconds(pid) for pid in self.processes())

    def resident_kb(self) -> float:
        """Resident memory in 1,000 bytes."""
        return sum(memory_mib(pid) for pid in self.processes()) * _KB_PER_MIB


@dataclass(frozen=True, slots=True)
class Contender:
    """A proxy that can be started. `encryptions`: those with which it can be measured."""

    name: str
    version: str
    start: Callable[[Site], AbstractAsyncContextManager[Proxy]]
    encryptions: Sequence[Encryption] = (Encryption.NONE,)


@dataclass(frozen=True, slots=True)
class Build:
    """A module's file, or None for Envoy alone. `root`: the checkout of its control plane; None: this one."""

    module: Path | None
    root: Path | None = None

    def environment(self) -> dict[str, str]:
        """For programs of its checkout."""
        return {} if self.root is None else {"PYTHONPATH": str(self.root)}


def direct(backend: Backend) -> Contender:
    """The server itself."""

    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        yield Proxy(Target(site.backend.port))

    return Contender(DIRECT, backend.version, start)


def standard() -> list[Contender]:
    """HAProxy, Envoy and Tidevoy. ProgramMissing: one of them is not installed, or not built."""
    envoy = version_of(str(envoy_binary()))
    return [
        Contender(HAPROXY, haproxy.version(), _haproxy, tuple(Encryption)),
        Contender(ENVOY, envoy, envoy_with(Build(None))),
        Contender(TIDEVOY, f"{VERSION} in Envoy {envoy}", envoy_with(Build(built())), tuple(Encryption)),
    ]


def built() -> Path:
    """The module of this checkout. ProgramMissing: it is not built."""
    module = module_path.find()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    return module


@asynccontextmanager
async def _haproxy(site: Site) -> AsyncIterator[Proxy]:
    async with _behind_tls(site) as server:
        port = site.ports.take()
        ends_tls = site.encryption is not Encryption.NONE
        text = haproxy.configuration(
            listen=port,
            server=server,
            log=site.ports.take(),
            maxconn=haproxy.most_connections(),
            certificate=site.certificate.cert if ends_tls else None,
            server_ca=site.certificate.cert if site.encryption is Encryption.BOTH else None,
        )
        async with HaProxy(site.directory, port, text, tls=ends_tls) as process:
            yield Proxy(Target(port, "first" if ends_tls else "none"), process.process.pid)


@asynccontextmanager
async def _behind_tls(site: Site) -> AsyncIterator[int]:
    """The port for a proxy that does not know MySQL's handshake, and so starts TLS with the first byte.

    No MySQL server accepts that. A second HAProxy, whose CPU is not counted, ends this TLS before the server.
    """
    if site.encryption is not Encryption.BOTH:
        yield site.backend.port
        return
    port = site.ports.take()
    text = haproxy.configuration(
        listen=port, server=site.backend.port, log=site.ports.take(), certificate=site.certificate.cert
    )
    async with HaProxy(site.directory / "server-side", port, text, tls=True):
        yield port


def envoy_with(build: Build) -> Callable[[Site], AbstractAsyncContextManager[Proxy]]:
    """An Envoy that runs what a control plane of its own publishes. ProcessFailed: it does not serve."""

    @asynccontextmanager
    async def start(site: Site) -> AsyncIterator[Proxy]:
        port = site.ports.take()
        control_plane = _ControlPlaneOf(site.directory, settings(site, port))
        control_plane.build = build
        async with control_plane:
            bootstrap = await asyncio.to_thread(_bootstrap, control_plane)
            async with EnvoyProcess(bootstrap, site.directory) as process:
                try:
                    async with asyncio.timeout(_PATIENCE):
                        wanted = "none" if build.module is None else "module"
                        while not (await _runs(control_plane, wanted) and await greets(port)):  # noqa: ASYNC110 - no event
                            await asyncio.sleep(_POLL)
                except TimeoutError:
                    reason = f"with {build.module or 'no module'} did not serve within {_PATIENCE:.0f} s"
                    advice = (
                        "; a module of another revision may need the control plane of that revision: --rev"
                    )
                    raise ProcessFailed(
                        "Envoy", reason + advice, process.complaint(process.process)
                    ) from None
                tls: Tls = "none" if site.encryption is Encryption.NONE else "mysql"
                yield Proxy(Target(port, tls), process.process.pid, control_plane.api)

    return start


class _ControlPlaneOf(ControlPlane):
    build: Build

    def environment(self) -> Mapping[str, str]:
        """With the code of the build's checkout."""
        return {**super().environment(), **self.build.environment()}


def settings(site: Site, listen: int) -> dict[str, Any]:
    """A control plane for one Envoy: defaults, but for what this machine and the benchmark need."""
    certificate = {"cert": str(site.certificate.cert), "key": str(site.certificate.key)}
    tls: dict[str, Any] = {}
    if site.encryption is not Encryption.NONE:
        tls["client"] = {"mode": "required", **certificate}
    if site.encryption is Encryption.BOTH:
        tls["backend"] = {"mode": "required", "ca": str(site.backend.ca)}
    return {
        **site.backend.settings(),
        "sql": {"listen": f"127.0.0.1:{listen}", "keepalive_idle": _KEEPALIVE_IDLE},
        "backend": {"keepalive_idle": _KEEPALIVE_IDLE},
        "xds": {"listen": f"127.0.0.1:{site.ports.take()}"},
        "api": {"listen": f"127.0.0.1:{site.ports.take()}"},
        "state_dir": str(site.directory / "state"),
        **({"tls": tls} if tls else {}),
    }


def _bootstrap(control_plane: _ControlPlaneOf) -> str:
    """As the command `tidevoy bootstrap` of the build's checkout prints it."""
    options = ["--config", str(control_plane.config_file), "--id", "measured", "--admin", "127.0.0.1:0"]
    module = control_plane.build.module
    options += [] if module is None else ["--module", str(module)]
    command = [*TIDEVOY_COMMAND, "bootstrap", *options]
    said = subprocess.run(
        command, capture_output=True, text=True, env=control_plane.environment(), timeout=60, check=False
    )
    if said.returncode != 0:
        raise ProcessFailed("tidevoy bootstrap", describe_exit(said.returncode), said.stderr.strip())
    return said.stdout


async def _runs(control_plane: ControlPlane, filter_name: str) -> bool:
    """Whether its Envoy runs what is published, with the right filter."""
    async with httpx2.AsyncClient(base_url=control_plane.api, trust_env=False) as api:
        envoys = (await api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    return any(
        envoy["filter"] == filter_name and envoy["acked_version"] == envoy["published_version"] != ""
        for envoy in envoys
    )


_PLACEHOLDERS = re.compile(r"\{(listen|server|pd|directory)\}")


def by_command(text: str) -> Contender:
    """A contender from `NAME=COMMAND`. PeerUnusable."""
    name, _, command = text.partition("=")
    name = name.strip()
    if not name or "{listen}" not in command or not re.search(r"\{(server|pd)\}", command):
        raise PeerUnusable(
            f"cannot use the peer {text!r}: write NAME=COMMAND, where the command has {{listen}} for the"
            " address on which it must listen, and {server} for that of the server or {pd} for that of PD"
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
        site.directory.mkdir(parents=True, exist_ok=True)
        arguments = filled(words, port, site)
        async with _PeerProxy(name, site.directory, port, [path, *arguments]) as server:
            yield Proxy(Target(port), server.process.pid)

    return Contender(name, "", start)


def filled(words: Sequence[str], listen: int, site: Site) -> list[str]:
    """The words of a command with its placeholders filled in; other braces stay."""
    values: Mapping[str, str] = {
        "listen": f"127.0.0.1:{listen}",
        "server": f"127.0.0.1:{site.backend.port}",
        "pd": site.backend.pd,
        "directory": str(site.directory),
    }
    return [_PLACEHOLDERS.sub(lambda found: values[found[1]], word) for word in words]


class _PeerProxy(Server):
    """A proxy that the user's command starts in the foreground."""

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
