"""HAProxy (Debian package) in front of Envoys or nodes."""

from __future__ import annotations

import asyncio
import csv
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.child_process import find_program
from sandbox.ports import Ports
from sandbox.server import Server

_PAGE = Path(__file__).parents[3] / "docs/operate/load-balancers.md"
CHECK_INTERVAL_MILLISECONDS = 200
CHECKS_THAT_FAIL = 2


@dataclass(frozen=True, slots=True)
class BalancedServer:
    """A server of the backend: where clients connect, and the port of its health checks."""

    name: str
    address: str


class HaProxy(Server):
    """HAProxy in TCP mode. Subclasses define the sections that say where it listens and what is behind it."""

    config_suffix = ".cfg"

    def __init__(self, directory: Path, ports: Ports) -> None:
        super().__init__("haproxy", directory)
        self.sql_port, self._admin_port = ports.allocate(), ports.allocate()

    @abstractmethod
    def proxies(self) -> str:
        """Return the sections `listen`, or `frontend` and `backend`."""

    def listen_ports(self) -> list[int]:
        return [self.sql_port, self._admin_port]

    def command(self) -> list[str]:
        return [find_program("haproxy", "haproxy"), "-db", "-f", str(self.config_file)]

    def configuration(self) -> str:
        return (
            f"global\n    nbthread 1\n    stats socket ipv4@127.0.0.1:{self._admin_port} level admin\n"
            "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 8h\n    timeout server 8h\n"
            f"{self.proxies()}"
        )

    async def run_command(self, command: str) -> str:
        """Run a command of the admin socket, and return its output."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._admin_port)
        try:
            writer.write(f"{command}\n".encode())
            return (await reader.read()).decode().strip()
        finally:
            writer.close()
            await writer.wait_closed()

    async def servers_of(self, proxy: str) -> dict[str, dict[str, str]]:
        """Return the statistics of each server, by the names of the servers and of HAProxy's columns."""
        table = (await self.run_command("show stat")).removeprefix("# ")
        rows = csv.DictReader(table.splitlines())
        return {row["svname"]: row for row in rows if row["pxname"] == proxy}


class HaProxyOfEnvoys(HaProxy):
    """HAProxy in front of Envoys, which have the same health port, as on the page about load balancers."""

    def __init__(
        self, directory: Path, ports: Ports, servers: Sequence[BalancedServer], health_port: int
    ) -> None:
        super().__init__(directory, ports)
        self._servers, self._health_port = servers, health_port

    def proxies(self) -> str:
        backend = render_backend(_PAGE.read_text(), self._servers, self._health_port)
        return f"frontend sql\n    bind 127.0.0.1:{self.sql_port}\n    default_backend tidevoy\n{backend}"

    async def is_serving(self) -> bool:
        return bool(await self.servers_of("tidevoy"))

    async def is_up(self, server: str) -> bool:
        """Return whether the health checks of this server have succeeded."""
        servers = await self.servers_of("tidevoy")
        return server in servers and servers[server]["status"] == "UP"


def render_backend(page: str, servers: Sequence[BalancedServer], health_port: int) -> str:
    """Return the page's backend with these servers, this health port, and a shorter interval of checks."""
    (block,) = re.findall(r"^```\n(backend tidevoy\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    text, replaced = re.subn(
        r"\bport \d+ inter \w+ fall \d+",
        f"port {health_port} inter {CHECK_INTERVAL_MILLISECONDS}ms fall {CHECKS_THAT_FAIL}",
        block,
    )
    assert replaced == 1, block
    head, *examples = re.split(r"^    server .*\n", text, flags=re.MULTILINE)
    assert len(examples) == 2, block
    return head + "".join(f"    server {server.name} {server.address}\n" for server in servers)
