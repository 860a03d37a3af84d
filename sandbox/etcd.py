"""etcd in place of PD: one server or a cluster, with or without TLS (Debian package etcd-server)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from sandbox.child_process import find_program
from sandbox.ports import Ports
from sandbox.server import Server, http_responds, launch_all, stop_all

PACKAGE = "etcd-server"


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files for TLS on the client port. With `client_ca`, clients need a certificate of this CA."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class EtcdPorts(NamedTuple):
    """Ports of one etcd, all on 127.0.0.1. The port `metrics` answers /health without TLS."""

    client: int
    peer: int
    metrics: int

    @classmethod
    def allocate(cls, ports: Ports) -> Self:
        return cls(ports.allocate(), ports.allocate(), ports.allocate())


class Etcd(Server):
    """One etcd, alone or a member of a cluster.

    With `pd_timings`, it has PD's tick (500 ms) and election timeout (3 s) instead of etcd's defaults.
    etcd grants no lease shorter than one and a half election timeouts.
    """

    start_timeout_seconds = 40.0
    hidden_variables = "ETCD_.*"

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
        return self._listen_ports.client

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def listen_ports(self) -> list[int]:
        return list(self._listen_ports)

    def command(self) -> list[str]:
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

    async def is_serving(self) -> bool:
        """Return whether this etcd answers and knows a leader."""
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
            await launch_all(self.members)  # In parallel, since no member serves before a majority runs.
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await stop_all(self.members, gracefully=True)
        finally:
            self._ports.close()
