"""Start the compared proxies: the server itself, HAProxy, Envoy, Tidevoy, and any other proxy by command."""

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

from bench.load_client import LoadTarget, Tls
from bench.machine import cpu_seconds, memory_mib, processes_of_session, version_of
from bench.proxies import haproxy
from bench.proxies.backends import DatabaseBackend
from bench.proxies.haproxy import HaProxy
from bench.proxies.workloads import Encryption
from controlplane.errors import TidevoyError
from controlplane.version import VERSION
from controlplane.xds.bootstrap import module_path
from sandbox.child_process import ProcessFailed, ProgramMissing, describe_exit, find_program
from sandbox.control_plane import ControlPlaneProcess, tidevoy_command
from sandbox.envoy import EnvoyProcess, envoy_binary
from sandbox.ports import Ports
from sandbox.server import Server, sends_mysql_greeting
from sandbox.session_certificate import SessionCertificate

DIRECT, HAPROXY, ENVOY, TIDEVOY = "direct", "HAProxy", "Envoy", "Tidevoy"
_STARTUP_TIMEOUT_SECONDS = 30.0  # until an Envoy has its configuration
_POLL_SECONDS = 0.05
_KB_PER_MIB = 1024 * 1024 / 1000
_KEEPALIVE_IDLE_SECONDS = 7_200
"""Longer than any run: otherwise the kernel probes thousands of sessions that became idle together at the
same moment, which overflows loopback's queue (net.core.netdev_max_backlog), and closes sessions whose probes
are lost."""


class InvalidPeer(TidevoyError):
    """A `--peer` option is invalid."""


@dataclass(frozen=True, slots=True)
class ProxySite:
    """The resources to start a proxy: its own directory, ports, the server behind it, and TLS."""

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

    `target`: where clients connect; `leader`: the process that leads its session, None without a proxy;
    `api`: base URL of its control plane, or empty.
    """

    target: LoadTarget
    leader: int | None = None
    api: str = ""

    def processes(self) -> list[int]:
        """Return all its processes."""
        return [] if self.leader is None else processes_of_session(self.leader)

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes, from the kernel's scheduler.

        Includes the network soft interrupts that the proxy causes: over loopback, the kernel handles a packet
        within the system call that sends it, and charges the sender.
        """
        return sum(cpu_seconds(pid) for pid in self.processes())

    def resident_kb(self) -> float:
        """Return the resident memory in 1,000 bytes."""
        return sum(memory_mib(pid) for pid in self.processes()) * _KB_PER_MIB


@dataclass(frozen=True, slots=True)
class Contender:
    """A proxy that can be started. `encryptions`: the TLS modes that it supports."""

    name: str
    version: str
    start: Callable[[ProxySite], AbstractAsyncContextManager[RunningProxy]]
    encryptions: Sequence[Encryption] = (Encryption.NONE,)


@dataclass(frozen=True, slots=True)
class ModuleBuild:
    """A module file, or None for Envoy without it. `checkout`: that of its control plane; None: this one."""

    module: Path | None
    checkout: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment variables for programs of its checkout."""
        return {} if self.checkout is None else {"PYTHONPATH": str(self.checkout)}

    def main_module(self) -> str:
        """Return the module with `main` in its checkout: `api.cli.main` before `cli` became a package."""
        is_old = self.checkout is not None and not (self.checkout / "cli" / "main.py").exists()
        return "api.cli.main" if is_old else "cli.main"


def direct_contender(backend: DatabaseBackend) -> Contender:
    """Return the contender that is the server itself."""

    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        yield RunningProxy(LoadTarget(site.backend.port))

    return Contender(DIRECT, backend.version, start)


def standard_contenders() -> list[Contender]:
    """Return HAProxy, Envoy and Tidevoy. Raises ProgramMissing if one is not installed or not built."""
    envoy = version_of(str(envoy_binary()))
    return [
        Contender(HAPROXY, haproxy.installed_version(), _start_haproxy, tuple(Encryption)),
        Contender(ENVOY, envoy, envoy_starter(ModuleBuild(None))),
        Contender(
            TIDEVOY,
            f"{VERSION} in Envoy {envoy}",
            envoy_starter(ModuleBuild(find_built_module())),
            tuple(Encryption),
        ),
    ]


def find_built_module() -> Path:
    """Return the module of this checkout. Raises ProgramMissing if it is not built."""
    module = module_path.find_module()
    if module is None:
        raise ProgramMissing("Tidevoy's module for Envoy", "make bench, which builds it")
    return module


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
        async with HaProxy(site.directory, port, text, tls=terminates_tls) as process:
            yield RunningProxy(LoadTarget(port, "first" if terminates_tls else "none"), process.process.pid)


@asynccontextmanager
async def _tls_terminator(site: ProxySite) -> AsyncIterator[int]:
    """Yield the server port for a proxy that cannot start TLS within MySQL's handshake.

    Its TLS starts with the first byte, which no MySQL server accepts. A second HAProxy, whose CPU is not
    counted, terminates this TLS.
    """
    if site.encryption is not Encryption.BOTH:
        yield site.backend.port
        return
    port = site.ports.allocate()
    text = haproxy.render_configuration(
        listen=port, server=site.backend.port, log=site.ports.allocate(), certificate=site.certificate.cert
    )
    async with HaProxy(site.directory / "server-side", port, text, tls=True):
        yield port


def envoy_starter(build: ModuleBuild) -> Callable[[ProxySite], AbstractAsyncContextManager[RunningProxy]]:
    """Return a starter of an Envoy with its own control plane. It raises ProcessFailed on timeout."""

    @asynccontextmanager
    async def start(site: ProxySite) -> AsyncIterator[RunningProxy]:
        port = site.ports.allocate()
        control_plane = _ControlPlaneOfBuild(site.directory, control_plane_settings(site, port))
        control_plane.build, control_plane.main_module = build, build.main_module()
        async with control_plane:
            bootstrap = await asyncio.to_thread(_make_bootstrap, control_plane)
            async with EnvoyProcess(bootstrap, site.directory) as process:
                try:
                    async with asyncio.timeout(_STARTUP_TIMEOUT_SECONDS):
                        filter_name = "none" if build.module is None else "module"
                        while not (  # noqa: ASYNC110 - neither process sends an event
                            await _is_up_to_date(control_plane, filter_name)
                            and await sends_mysql_greeting(port)
                        ):
                            await asyncio.sleep(_POLL_SECONDS)
                except TimeoutError:
                    reason = (
                        f"with {build.module or 'no module'} did not serve within"
                        f" {_STARTUP_TIMEOUT_SECONDS:.0f} s;"
                        " a module of another revision may need the control plane of that revision: --rev"
                    )
                    raise ProcessFailed("Envoy", reason, process.failure_summary(process.process)) from None
                tls: Tls = "none" if site.encryption is Encryption.NONE else "mysql"
                yield RunningProxy(LoadTarget(port, tls), process.process.pid, control_plane.api_url)

    return start


class _ControlPlaneOfBuild(ControlPlaneProcess):
    build: ModuleBuild

    def environment(self) -> Mapping[str, str]:
        """Return the environment with the code of the build's checkout."""
        return {**super().environment(), **self.build.environment()}


def control_plane_settings(site: ProxySite, listen: int) -> dict[str, Any]:
    """Return settings for one Envoy: the defaults, except for what this machine and the benchmark need."""
    certificate = {"cert": str(site.certificate.cert), "key": str(site.certificate.key)}
    tls: dict[str, Any] = {}
    if site.encryption is not Encryption.NONE:
        tls["client"] = {"mode": "required", **certificate}
    if site.encryption is Encryption.BOTH:
        tls["backend"] = {"mode": "required", "ca": str(site.backend.ca)}
    return {
        **site.backend.settings(),
        "sql": {"listen": f"127.0.0.1:{listen}", "keepalive_idle": _KEEPALIVE_IDLE_SECONDS},
        "backend": {"keepalive_idle": _KEEPALIVE_IDLE_SECONDS},
        "xds": {"listen": f"127.0.0.1:{site.ports.allocate()}"},
        "api": {"listen": f"127.0.0.1:{site.ports.allocate()}"},
        "state_dir": str(site.directory / "state"),
        **({"tls": tls} if tls else {}),
    }


def _make_bootstrap(control_plane: _ControlPlaneOfBuild) -> str:
    """Return the output of `tidevoy bootstrap` of the build's checkout."""
    options = ["--config", str(control_plane.config_file), "--id", "measured", "--admin", "127.0.0.1:0"]
    module = control_plane.build.module
    options += [] if module is None else ["--module", str(module)]
    command = [*tidevoy_command(control_plane.main_module), "bootstrap", *options]
    result = subprocess.run(
        command, capture_output=True, text=True, env=control_plane.environment(), timeout=60, check=False
    )
    if result.returncode != 0:
        raise ProcessFailed("tidevoy bootstrap", describe_exit(result.returncode), result.stderr.strip())
    return result.stdout


async def _is_up_to_date(control_plane: ControlPlaneProcess, filter_name: str) -> bool:
    """Return whether its Envoy runs the published version with the right filter."""
    async with httpx2.AsyncClient(base_url=control_plane.api_url, trust_env=False) as api:
        envoys = (await api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    return any(
        envoy["filter"] == filter_name and envoy["acked_version"] == envoy["published_version"] != ""
        for envoy in envoys
    )


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
        async with _PeerProxy(name, site.directory, port, [path, *arguments]) as server:
            yield RunningProxy(LoadTarget(port), server.process.pid)

    return Contender(name, "", start)


def fill_placeholders(arguments: Sequence[str], listen: int, site: ProxySite) -> list[str]:
    """Replace the placeholders in a command's arguments; other braces stay."""
    values: Mapping[str, str] = {
        "listen": f"127.0.0.1:{listen}",
        "server": f"127.0.0.1:{site.backend.port}",
        "pd": site.backend.pd,
        "directory": str(site.directory),
    }
    return [_PLACEHOLDERS.sub(lambda match: values[match[1]], argument) for argument in arguments]


class _PeerProxy(Server):
    """A proxy that a command of the user runs in the foreground."""

    def __init__(self, name: str, directory: Path, port: int, command: list[str]) -> None:
        super().__init__(re.sub(r"[^\w.-]", "-", name), directory)
        self._port = port
        self._command = command

    def command(self) -> list[str]:
        """Return the user's command."""
        return self._command

    def listen_ports(self) -> list[int]:
        """Return its port."""
        return [self._port]

    async def is_serving(self) -> bool:
        """Return whether the server behind it sends a greeting."""
        return await sends_mysql_greeting(self._port)
