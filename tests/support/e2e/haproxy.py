"""HAProxy (Debian package) in front of Envoys, with the configuration of docs/operate/load-balancers.md."""

from __future__ import annotations

import asyncio
import csv
import re
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
    """HAProxy that balances TCP connections between Envoys, which have the same health port."""

    config_suffix = ".cfg"

    def __init__(
        self, directory: Path, ports: Ports, servers: Sequence[BalancedServer], health_port: int
    ) -> None:
        super().__init__("haproxy", directory)
        self.sql_port, self._admin_port = ports.allocate(), ports.allocate()
        self._servers, self._health_port = servers, health_port

    def listen_ports(self) -> list[int]:
        return [self.sql_port, self._admin_port]

    def command(self) -> list[str]:
        return [find_program("haproxy", "haproxy"), "-db", "-f", str(self.config_file)]

    def configuration(self) -> str:
        """Return the backend of the page, and the parts that each HAProxy needs."""
        sections = {
            "global": (f"stats socket ipv4@127.0.0.1:{self._admin_port} level user", "nbthread 1"),
            "defaults": ("mode tcp", "timeout connect 5s", "timeout client 8h", "timeout server 8h"),
            "frontend sql": (f"bind 127.0.0.1:{self.sql_port}", "default_backend tidevoy"),
        }
        head = "\n".join("\n    ".join((name, *lines)) for name, lines in sections.items())
        return f"{head}\n{render_backend(_PAGE.read_text(), self._servers, self._health_port)}"

    async def is_serving(self) -> bool:
        return bool(await self.server_states())

    async def is_up(self, server: str) -> bool:
        return (await self.server_states()).get(server) == "UP"

    async def server_states(self) -> dict[str, str]:
        """Return the state of each server, such as `UP`, `UP 1/2` and `DOWN`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._admin_port)
        try:
            writer.write(b"show stat\n")
            table = (await reader.read()).decode().removeprefix("# ")
        finally:
            writer.close()
            await writer.wait_closed()
        rows = csv.DictReader(table.splitlines())
        return {row["svname"]: row["status"] for row in rows if row["pxname"] == "tidevoy"}


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
