"""HAProxy as the balancer that clients use, for tests of a move from another load balancer to Tidevoy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sandbox.local_cluster import LocalCluster
from sandbox.ports import Ports
from sandbox.server import sends_mysql_greeting
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.e2e.haproxy import BalancedServer, HaProxy
from tests.support.waiting import wait_until

_PROXY = "sql"


class ClientBalancer(HaProxy):
    """HAProxy with servers that are switched by its admin socket."""

    def __init__(self, directory: Path, ports: Ports, servers: list[BalancedServer], check: str = "") -> None:
        super().__init__(directory, ports)
        self._servers, self._check = servers, check

    def proxies(self) -> str:
        servers = "".join(f"    server {each.name} {each.address} {self._check}\n" for each in self._servers)
        return f"listen {_PROXY}\n    bind 127.0.0.1:{self.sql_port}\n    balance leastconn\n{servers}"

    async def is_serving(self) -> bool:
        return await sends_mysql_greeting(self.sql_port)

    async def add_server(self, name: str, port: int) -> None:
        """Add a server with health checks, which gets sessions at once."""
        added = await self.run_command(f"add server {_PROXY}/{name} 127.0.0.1:{port} check")
        assert "New server registered" in added
        assert await self.run_command(f"enable health {_PROXY}/{name}") == ""
        await self.set_state("ready", name)

    async def set_state(self, state: str, *servers: str) -> None:
        for server in servers:
            assert await self.run_command(f"set server {_PROXY}/{server} state {state}") == ""

    async def count_sessions(self, server: str) -> int:
        return int((await self.servers_of(_PROXY))[server]["scur"])

    async def has_sessions(self, server: str, count: int) -> bool:
        return await self.count_sessions(server) == count


async def import_settings(command: str, configuration: Path) -> dict[str, Any]:
    """Return the settings that `tidevoy COMMAND` prints for a configuration."""
    result = await run_tidevoy("http://127.0.0.1:1", command, str(configuration))
    assert result.exit_code == 0, result.stderr
    settings: dict[str, Any] = yaml.safe_load(result.stdout)
    return settings


async def has_sessions(stack: LocalCluster, count: int) -> bool:
    """Return whether Tidevoy serves so many sessions."""
    return sum(node["sessions"] or 0 for node in (await stack.nodes()).values()) == count


async def drain_used_node(stack: LocalCluster) -> None:
    """Drain the node that has most sessions, wait until they have moved, and return it to service."""
    nodes = await stack.nodes()
    address = max(nodes, key=lambda node: nodes[node]["sessions"] or 0)
    assert nodes[address]["sessions"]
    (await stack.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()

    async def is_drained() -> bool:
        return bool((await stack.nodes())[address]["state"] == "drained")

    await wait_until(is_drained)
    (await stack.api.post(f"/v1/nodes/{address}/undrain")).raise_for_status()
