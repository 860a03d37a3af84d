"""Start the compared proxies: HAProxy, Envoy, Tidevoy, or any command. `direct` stands for no proxy."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2

from bench.control_plane.registrations import count_up_to_date_envoys, unchecked_settings
from bench.load_client import LoadTarget, Tls
from bench.machine import cpu_seconds, memory_mib, processes_of_session, version_of
from bench.programs import find_built_module
from bench.proxies import haproxy
from bench.proxies.backends import DatabaseBackend
from bench.proxies.workloads import Encryption
from bench.revisions import ControlPlaneOfBuild, ModuleBuild, render_bootstrap
from controlplane.errors import TidevoyError
from controlplane.version import VERSION
from sandbox.child_process import ProcessFailed, ProgramMissing, find_program
from sandbox.envoy import EnvoyProcess, envoy_binary
from sandbox.ports import Ports
from sandbox.server import Server, accepts_connections, sends_mysql_greeting
from sandbox.session_certificate import SessionCertificate

DIRECT, HAPROXY, ENVOY, TIDEVOY = "direct", "HAProxy", "Envoy", "Tidevoy"
_STARTUP_TIMEOUT_SECONDS = 30.0  # until an Envoy has its configuration
_POLL_SECONDS = 0.05
_KB_PER_MIB = 1024 * 1024 / 1000
_KEEPALIVE_IDLE_SECONDS = 7_200
"""Longer than any run. Otherwise, the kernel probes thousands of idle sessions at the same moment, which
overflows loopback's queue (net.core.netdev_max_backlog). Then probes are lost, and the kernel closes their
sessions."""


class InvalidPeer(TidevoyError):
    """A `--peer` option is invalid."""


@dataclass(frozen=True, slots=True)
class ProxySite:
    """The resources to start a proxy: a directory, ports, the server behind the proxy, and TLS."""

    directory: Path
    ports: Ports
    backend: DatabaseBackend
    certificate: SessionCertificate
    encryption: Encryption = Encryption.NONE

    def for_proxy(self, name: str) -> ProxySite:
        """Return the same site with a directory for this proxy."""
        return replace(self, directory=self.directory / re.sub(r"[^\w-]", "-", f"{name}-{self.encryption}"))


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A running proxy.

    `target`: where clients connect; `leader`: the leader of its Unix session, None without a proxy; `api`:
    base URL of its control plane, or empty.
    """

    target: LoadTarget
    leader: int | None = None
    api: str = ""

    def processes(self) -> list[int]:
        return [] if self.leader is None else processes_of_session(self.leader)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of the proxy, from the kernel's scheduler.

        This includes soft interrupts: over loopback, the kernel processes a packet within the system call
        that sends it, and charges the sender.
        """
        return sum(cpu_seconds(pid) for pid in self.processes())

    def resident_kb(self) -> float:
        return sum(memory_mib(pid) for pid in self.processes()) * _KB_PER_MIB


@dataclass(frozen=True, slots=True)
class Contender:
    """A proxy that can be started. `encryptions`: the TLS modes that it supports."""

    name: str
    version: str
    start: Callable[[ProxySite], AbstractAsyncContextManager[RunningProxy]]
    encryptions: Sequence[Encryption] = (Encryption.NONE,)


def direct_contender(backend: DatabaseBackend) -> Contender:
    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        yield RunningProxy(LoadTarget(site.backend.port))

    return Contender(DIRECT, backend.version, start)


def standard_contenders() -> list[Contender]:
    """Return HAProxy, Envoy and Tidevoy. Raises ProgramMissing if a program is not installed or built."""
    envoy = version_of(str(envoy_binary()))
    return [
        Contender(HAPROXY, version_of(haproxy.find_haproxy(), "-v"), _start_haproxy, tuple(Encryption)),
        Contender(ENVOY, envoy, envoy_starter(ModuleBuild(None))),
        Contender(
            TIDEVOY,
            f"{VERSION} in Envoy {envoy}",
            envoy_starter(ModuleBuild(find_built_module())),
            tuple(Encryption),
        ),
    ]


@asynccontextmanager
async def _start_haproxy(site: ProxySite) -> AsyncIterator[RunningProxy]:
    async with _tls_terminator(site) as server:
        port = site.ports.allocate()
        terminates_tls = site.encryption is not Encryption.NONE
        text = haproxy.render_configuration(
            listen=port,
            server=server,
            log=site.ports.allocate(),
            maxconn=haproxy.max_connections(),
            certificate=site.certificate.cert if terminates_tls else None,
            server_ca=site.certificate.cert if site.encryption is Encryption.BOTH else None,
        )
        async with _haproxy(site.directory, port, text, tls=terminates_tls) as process:
            yield RunningProxy(LoadTarget(port, "first" if terminates_tls else "none"), process.process.pid)


def _haproxy(directory: Path, port: int, configuration: str, *, tls: bool) -> _ProxyProcess:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "haproxy.cfg"
    file.write_text(configuration)
    # `-db`: one process in the foreground.
    return _ProxyProcess(
        "haproxy", directory, port, [haproxy.find_haproxy(), "-db", "-f", str(file)], tls=tls
    )


@asynccontextmanager
async def _tls_terminator(site: ProxySite) -> AsyncIterator[int]:
    """Yield the port to which HAProxy connects.

    HAProxy starts TLS with the first byte, which no MySQL server accepts. So with TLS to the server, a second
    HAProxy in front of the server terminates this TLS. Its CPU is not counted.
    """
    if site.encryption is not Encryption.BOTH:
        yield site.backend.port
        return
    port = site.ports.allocate()
    text = haproxy.render_configuration(
        listen=port, server=site.backend.port, log=site.ports.allocate(), certificate=site.certificate.cert
    )
    async with _haproxy(site.directory / "server-side", port, text, tls=True):
        yield port


def envoy_starter(
    build: ModuleBuild, more_settings: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[ProxySite], AbstractAsyncContextManager[RunningProxy]]:
    """Return a function that starts Envoy and a control plane; the function may raise ProcessFailed."""

    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        port = site.ports.allocate()
        settings = {**control_plane_settings(site, port), **more_settings}
        control_plane = ControlPlaneOfBuild(site.directory, settings)
        control_plane.build = build
        async with control_plane:
            bootstrap = await asyncio.to_thread(
                render_bootstrap,
                build,
                control_plane.config_file,
                "--id",
                "measured",
                "--admin",
                "127.0.0.1:0",
            )
            async with EnvoyProcess(bootstrap, site.directory) as process:
                try:
                    async with asyncio.timeout(_STARTUP_TIMEOUT_SECONDS):
                        while not (  # noqa: ASYNC110 - neither process sends an event
                            await _is_up_to_date(control_plane) and await sends_mysql_greeting(port)
                        ):
                            await asyncio.sleep(_POLL_SECONDS)
                except TimeoutError:
                    reason = (
                        f"with {build.module or 'no module'} did not serve in time; a module of another"
                        " revision may need the control plane of that revision: --rev"
                    )
                    raise ProcessFailed("Envoy", reason, process.failure_summary(process.process)) from None
                tls: Tls = "none" if site.encryption is Encryption.NONE else "mysql"
                yield RunningProxy(LoadTarget(port, tls), process.process.pid, control_plane.api_url)

    return start


def control_plane_settings(site: ProxySite, listen: int) -> dict[str, Any]:
    """Return the defaults, with the changes that the benchmark and this machine require."""
    certificate = {"cert": str(site.certificate.cert), "key": str(site.certificate.key)}
    tls: dict[str, Any] = {}
    if site.encryption is not Encryption.NONE:
        tls["client"] = {"mode": "required", **certificate}
    if site.encryption is Encryption.BOTH:
        tls["backend"] = {"mode": "required", "ca": str(site.backend.ca)}
    settings = unchecked_settings(site.ports, site.directory / "state") | site.backend.settings()
    keepalive = {"keepalive_idle": _KEEPALIVE_IDLE_SECONDS}
    settings |= {"sql": {"listen": f"127.0.0.1:{listen}", **keepalive}, "backend": keepalive}
    return settings | ({"tls": tls} if tls else {})


async def _is_up_to_date(control_plane: ControlPlaneOfBuild) -> bool:
    filter_name = "none" if control_plane.build.module is None else "module"
    async with httpx2.AsyncClient(base_url=control_plane.api_url, trust_env=False) as api:
        return await count_up_to_date_envoys(api, filter_name) > 0


_PLACEHOLDERS = re.compile(r"\{(listen|server|pd|directory)\}")


def contender_from_command(text: str) -> Contender:
    """Parse `NAME=COMMAND` into a contender. Raises InvalidPeer."""
    name, _, command = text.partition("=")
    name = name.strip()
    if not name or "{listen}" not in command or not re.search(r"\{(server|pd)\}", command):
        raise InvalidPeer(
            f"cannot use the peer {text!r}: write NAME=COMMAND, where the command contains {{listen}} for the"
            " address on which it must listen, and {server} for the server's address or {pd} for PD's"
        )
    try:
        program, *parameters = shlex.split(command)
        path = find_program(program, "")
    except ValueError as error:
        raise InvalidPeer(f"cannot read the command of peer {name}: {error}") from None
    except ProgramMissing:
        raise InvalidPeer(f"there is no program {program} for peer {name}; write its path") from None

    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        port = site.ports.allocate()
        site.directory.mkdir(parents=True, exist_ok=True)
        arguments = fill_placeholders(parameters, port, site)
        async with _ProxyProcess(name, site.directory, port, [path, *arguments]) as server:
            yield RunningProxy(LoadTarget(port), server.process.pid)

    return Contender(name, "", start)


def fill_placeholders(arguments: Sequence[str], listen: int, site: ProxySite) -> list[str]:
    """Replace the placeholders in a command's arguments. Other braces remain unchanged."""
    values: Mapping[str, str] = {
        "listen": f"127.0.0.1:{listen}",
        "server": f"127.0.0.1:{site.backend.port}",
        "pd": site.backend.pd,
        "directory": str(site.directory),
    }
    return [_PLACEHOLDERS.sub(lambda match: values[match[1]], argument) for argument in arguments]


class _ProxyProcess(Server):
    """A proxy that a command runs in the foreground. `tls`: clients begin with TLS at the first byte."""

    def __init__(
        self, name: str, directory: Path, port: int, command: list[str], *, tls: bool = False
    ) -> None:
        super().__init__(re.sub(r"[^\w.-]", "-", name), directory)
        self._port = port
        self._command = command
        self._tls = tls

    def command(self) -> list[str]:
        return self._command

    def listen_ports(self) -> list[int]:
        return [self._port]

    async def is_serving(self) -> bool:
        return await (accepts_connections(self._port) if self._tls else sends_mysql_greeting(self._port))
