"""A cluster with two supervised Envoys behind HAProxy. Each Envoy can be replaced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from tests.support.e2e.cluster import reload_settings, run_cluster
from tests.support.e2e.haproxy import BalancedServer, HaProxyOfEnvoys
from tests.support.module.bootstrap import require_module, require_supervisor

# Longer than HAProxy needs to notice: two checks that fail, 200 ms apart.
END_WAIT_SECONDS = 1.0
END_TIMEOUT_SECONDS = 30.0
_TIMEOUT_SECONDS = 60.0
# Envoys on different addresses can have the same health port, as on different machines.
_HOSTS = ("127.0.0.2", "127.0.0.3")


@dataclass(frozen=True, slots=True)
class BalancedEnvoy:
    process: EnvoyProcess
    address: str
    """Where HAProxy connects."""


class BalancedEnvoys:
    """The Envoys, and HAProxy in front of them."""

    def __init__(
        self, stack: LocalCluster, haproxy: HaProxyOfEnvoys, envoys: Mapping[str, BalancedEnvoy]
    ) -> None:
        self.stack, self.haproxy, self._envoys = stack, haproxy, envoys

    async def replace_all(self) -> None:
        """Replace one Envoy after the other, as an operator does."""
        for name in self._envoys:
            await self.stop(name)
            await self.start(name)

    async def stop(self, name: str) -> None:
        """End an Envoy gracefully."""
        process = self._envoys[name].process.process
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            assert await process.wait() == 0, process.tail()
        assert "stopping Envoy: no client is left" in process.output()

    async def start(self, name: str) -> None:
        """Start an Envoy, and wait until HAProxy sends it clients."""
        envoy = self._envoys[name]
        # An Envoy keeps the address that it got first, so each start may have another one.
        await reload_settings(self.stack, sql=_sql_settings(envoy.address))
        await envoy.process.launch()
        await self.stack.wait_until(
            lambda: self.haproxy.is_up(name), f"HAProxy to use {name}", _TIMEOUT_SECONDS
        )

    def bugs(self) -> list[str]:
        """Return the lines about bugs that the modules have logged."""
        return [line for envoy in self._envoys.values() for line in envoy.process.bugs()]


@asynccontextmanager
async def run_envoys_behind_haproxy(directory: Path, mariadb: MariaDb) -> AsyncIterator[BalancedEnvoys]:
    """Run two simulated TiDB servers, a control plane, and two Envoys. Yield when HAProxy uses both."""
    with Ports() as ports:
        sql_port, health_port = ports.allocate(), ports.allocate()
        first, second = (f"{host}:{sql_port}" for host in _HOSTS)
        settings = {
            "sql": _sql_settings(first),
            "envoy_health": {"listen": f"{_HOSTS[0]}:{health_port}"},
            "end": {"wait": END_WAIT_SECONDS, "timeout": END_TIMEOUT_SECONDS},
        }
        async with run_cluster(directory, mariadb, nodes=2, settings=settings, supervised=True) as stack:
            bootstrap = render_bootstrap(
                stack.control_plane.parsed_settings(),
                control_planes=[f"127.0.0.1:{stack.advertised.xds}"],
                node_id="envoy-2",
                admin="127.0.0.1:0",
                module=str(require_module()),
                health=f"{_HOSTS[1]}:{health_port}",
            )
            other = EnvoyProcess(
                bootstrap, directory, name="envoy-2", concurrency=2, supervisor=require_supervisor()
            )
            envoys = {
                "envoy-1": BalancedEnvoy(stack.envoy, first),
                "envoy-2": BalancedEnvoy(other, second),
            }
            servers = [BalancedServer(name, envoy.address) for name, envoy in envoys.items()]
            haproxy = HaProxyOfEnvoys(directory, ports, servers, health_port)
            async with haproxy:
                cluster = BalancedEnvoys(stack, haproxy, envoys)
                try:
                    await cluster.start("envoy-2")
                    await stack.wait_until(lambda: haproxy.is_up("envoy-1"), "HAProxy to use envoy-1")
                    yield cluster
                    assert cluster.bugs() == []
                finally:
                    if other.is_running:
                        await other.terminate()


def _sql_settings(listen: str) -> dict[str, Any]:
    return {"listen": listen, "proxy_protocol": "required", "trusted_proxies": ["127.0.0.1/32"]}
