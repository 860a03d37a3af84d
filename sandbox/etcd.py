"""etcd servers in place of PD: one, or a cluster, plain or with TLS (Debian package etcd-server)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.child_process import find_program
from sandbox.ports import Ports
from sandbox.server import Server, http_responds

PACKAGE = "etcd-server"


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """TLS on the client port: PEM files. With `client_ca`, clients need a certificate that chains to it."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class EtcdPorts:
    """Ports of one etcd, all on 127.0.0.1. `metrics` answers /health without TLS."""

    client: int
    peer: int
    metrics: int

    @classmethod
    def allocate(cls, ports: Ports, client: int | None = None) -> Self:
        """Allocate three ports from `ports`; `client` replaces the first if it is already claimed."""
        return cls(client or ports.allocate(), ports.allocate(), ports.allocate())


class Etcd(Server):
    """One etcd, alone or a member of a cluster.

    Its timings are etcd's own unless `pd_timings`: PD runs etcd with a tick of 500 ms and an election timeout
    of 3 s, and etcd grants no lease shorter than one and a half election timeouts.
    """

    start_timeout_seconds = 40.0

    def __init__(
        self,
        directory: Path,
        ports: EtcdPorts,
        *,
        name: str = "etcd",
        tls: EtcdTls | None = None,
        cluster: Mapping[str, EtcdPorts] | None = None,
        pd_timings: bool = False,
    ) -> None:
        super().__init__(name, directory)
        self._listen_ports = ports
        self._tls = tls
        self._cluster = cluster or {name: ports}
        self._pd_timings = pd_timings

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        name: str = "etcd",
        tls: EtcdTls | None = None,
        pd_timings: bool = False,
    ) -> Etcd:
        """Create a single etcd on free ports, for use as `async with Etcd.start(directory) as etcd`."""
        ports = Ports()
        etcd = cls(directory, EtcdPorts.allocate(ports), name=name, tls=tls, pd_timings=pd_timings)
        etcd.ports = ports
        return etcd

    @property
    def port(self) -> int:
        """Its client port."""
        return self._listen_ports.client

    @property
    def url(self) -> str:
        """Its client URL."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def _scheme(self) -> str:
        return "https" if self._tls else "http"

    def listen_ports(self) -> list[int]:
        """Return its client, peer and metrics ports."""
        return [self._listen_ports.client, self._listen_ports.peer, self._listen_ports.metrics]

    def command(self) -> list[str]:
        """Return the etcd command with all settings as options."""
        peer = f"http://127.0.0.1:{self._listen_ports.peer}"
        members = [f"{name}=http://127.0.0.1:{ports.peer}" for name, ports in self._cluster.items()]
        command = [
            find_program("etcd", PACKAGE),
            f"--name={self.name}",
            f"--data-dir={self.directory / (self.name + '.data')}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(members)}",
            f"--listen-metrics-urls=http://127.0.0.1:{self._listen_ports.metrics}",
            "--logger=zap",
            "--log-level=warn",
        ]
        if self._tls:
            command += [f"--cert-file={self._tls.cert}", f"--key-file={self._tls.key}"]
            if self._tls.client_ca:
                command += ["--client-cert-auth", f"--trusted-ca-file={self._tls.client_ca}"]
        if self._pd_timings:
            command += ["--heartbeat-interval=500", "--election-timeout=3000"]
        return command

    def environment(self) -> Mapping[str, str]:
        """Return our environment without ETCD_*, which etcd would read as flags."""
        return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}

    async def is_serving(self) -> bool:
        """Return whether it has a leader and answers."""
        return await http_responds(f"http://127.0.0.1:{self._listen_ports.metrics}/health")


class EtcdCluster:
    """Several etcd servers that form one cluster. `async with` starts and stops all of them."""

    def __init__(
        self, directory: Path, *, size: int = 3, tls: EtcdTls | None = None, pd_timings: bool = False
    ) -> None:
        self._ports = Ports()
        layout = {f"etcd-{index}": EtcdPorts.allocate(self._ports) for index in range(size)}
        self.members = [
            Etcd(directory, ports, name=name, tls=tls, cluster=layout, pd_timings=pd_timings)
            for name, ports in layout.items()
        ]

    @property
    def urls(self) -> list[str]:
        """The client URLs of all members."""
        return [member.url for member in self.members]

    async def __aenter__(self) -> Self:
        try:
            # In parallel: none serves before a majority runs.
            async with asyncio.TaskGroup() as tasks:
                for member in self.members:
                    tasks.create_task(member.launch())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self.members:
                    if member.is_running:
                        tasks.create_task(member.terminate())
        finally:
            self._ports.close()
