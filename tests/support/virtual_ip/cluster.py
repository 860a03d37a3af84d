"""Two machines with an Envoy and keepalived each, a client's machine, and a control plane beside them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from sandbox.server import launch_all
from tests.support.controlplane.cli_process import CliResult, run_tidevoy
from tests.support.e2e.cluster import CountingClient
from tests.support.load.always_ok_node import FastLoginNode, run_fast_login_node
from tests.support.module.bootstrap import require_module
from tests.support.tidb_sim_clients import error_code
from tests.support.virtual_ip.bridged_network import GATEWAY, Machine
from tests.support.virtual_ip.connect_probe import ConnectProbe, connect, run_connect_probe
from tests.support.virtual_ip.keepalived import Keepalived, render_configuration
from tests.support.waiting import wait_until

VIRTUAL_ADDRESS = "10.0.0.100"
_WAIT_TIMEOUT_SECONDS = 30.0


class MachineEnvoy(EnvoyProcess):
    """An Envoy on a machine."""

    def __init__(self, machine: Machine, bootstrap: str, directory: Path, *, name: str) -> None:
        super().__init__(bootstrap, directory, name=name)
        self._machine = machine

    def command(self) -> list[str]:
        return self._machine.command(*super().command())


@dataclass(slots=True)
class Balancer:
    """A machine with an Envoy and keepalived."""

    machine: Machine
    envoy: MachineEnvoy
    keepalived: Keepalived

    @property
    def holds_address(self) -> bool:
        return VIRTUAL_ADDRESS in self.machine.addresses()

    def check_result(self, script: str) -> bool:
        """Return the current result of one of keepalived's checks."""
        results = re.findall(rf"VRRP_Script\({script}\) (succeeded|failed)", self.keepalived.process.output())
        return bool(results) and results[-1] == "succeeded"

    @property
    def is_ready(self) -> bool:
        """Whether keepalived has seen that its Envoy is ready."""
        return self.check_result("envoy_alive") and self.check_result("envoy_ready")


class VirtualIpCluster:
    """The parts of the cluster. `balancers` have the Envoys envoy-1 and envoy-2."""

    def __init__(
        self,
        balancers: list[Balancer],
        client: Machine,
        control_plane: ControlPlaneProcess,
        node: FastLoginNode,
    ) -> None:
        self.balancers, self.client, self.node = balancers, client, node
        self._api_url = control_plane.api_url
        self._settings = control_plane.parsed_settings()

    async def set_ready(self, balancer: Balancer, *, is_ready: bool) -> None:
        """Set an Envoy to ready or not ready, as an operator does, and wait until keepalived has seen it."""
        verb = "ready" if is_ready else "not-ready"
        result = await run_tidevoy(self._api_url, "envoys", verb, balancer.envoy.name)
        assert result.exit_code == 0, result
        await self.wait_until(lambda: balancer.check_result("envoy_ready") == is_ready)

    async def wait_for_holder(self, holder: Balancer) -> None:
        """Wait until this machine, and no other, has the virtual address."""

        def is_only_holder() -> bool:
            return [balancer for balancer in self.balancers if balancer.holds_address] == [holder]

        await self.wait_until(is_only_holder)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        await wait_until(condition, _WAIT_TIMEOUT_SECONDS)

    def holder_and_backup(self) -> tuple[Balancer, Balancer]:
        """Return the machine with the virtual address, and the other one."""
        first, second = self.balancers
        assert first.holds_address != second.holds_address
        return (first, second) if first.holds_address else (second, first)

    async def lose_machine(self, balancer: Balancer) -> None:
        """Cut a machine off, then kill its processes: they can tell the other machine nothing."""
        balancer.machine.disconnect()
        await asyncio.gather(balancer.keepalived.kill(), balancer.envoy.kill())

    async def boot_machine(self, balancer: Balancer) -> None:
        """Start a machine that was lost. Its addresses are those after a boot."""
        balancer.machine.remove_address(VIRTUAL_ADDRESS)
        balancer.machine.connect()
        await launch_all([balancer.envoy, balancer.keepalived])
        await self.wait_until(lambda: balancer.is_ready)

    @asynccontextmanager
    async def replaced_envoy(self, balancer: Balancer, directory: Path) -> AsyncIterator[CliResult]:
        """Replace an Envoy on its machine by a new one. Yield the result while the new one runs."""
        old = balancer.envoy
        async with create_envoy(balancer.machine, self._settings, directory, name="replacement") as new:
            admins = [envoy.admin_url.removeprefix("http://") for envoy in (old, new)]
            options = ("--old-admin", admins[0], "--new-admin", admins[1])
            yield await run_tidevoy(self._api_url, "envoys", "replace", *options)

    async def move_address_to(self, balancer: Balancer) -> None:
        """Make a machine hold the address, while both Envoys are ready at the end."""
        (other,) = (one for one in self.balancers if one is not balancer)
        await self.set_ready(other, is_ready=False)
        await self.wait_for_holder(balancer)
        await self.set_ready(other, is_ready=True)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[CountingClient]:
        """Log in from the client's machine at the virtual address. Abort the connection at the end."""
        session = await connect(self.client, VIRTUAL_ADDRESS, self._sql_port)
        try:
            assert error_code(await session.log_in()) == 0
            yield session
        finally:
            session.writer.transport.abort()

    def run_probe(self) -> AbstractAsyncContextManager[ConnectProbe]:
        """Log in all the time from the client's machine at the virtual address."""
        return run_connect_probe(self.client, VIRTUAL_ADDRESS, self._sql_port)

    @property
    def _sql_port(self) -> int:
        return addresses.split(self._settings.sql.listen)[1]


@asynccontextmanager
async def run_virtual_ip_cluster(directory: Path, machines: list[Machine]) -> AsyncIterator[VirtualIpCluster]:
    """Run the cluster on these machines, of which the last is the client's.

    Yield it when both Envoys are ready and one machine has the virtual address.
    """
    *balancer_machines, client = machines
    async with AsyncExitStack() as exit_stack:
        ports = exit_stack.enter_context(Ports())
        node = await exit_stack.enter_async_context(run_fast_login_node(host=GATEWAY))
        settings = {
            "nodes": [{"address": node.endpoint}],
            "health": {"status": {"enabled": False}},
            "sql": {"listen": f"0.0.0.0:{ports.allocate()}"},
            "envoy_health": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "xds": {"listen": f"{GATEWAY}:{ports.allocate()}"},
            "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "state_dir": str(directory / "state"),
            "allow_unauthenticated": True,
        }
        control_plane = ControlPlaneProcess(directory, settings)
        await exit_stack.enter_async_context(control_plane)
        parsed = control_plane.parsed_settings()
        balancers = []
        for own, peer in zip(balancer_machines, reversed(balancer_machines), strict=True):
            envoy = create_envoy(own, parsed, directory, name=own.name)
            configuration = render_configuration(
                VIRTUAL_ADDRESS=VIRTUAL_ADDRESS,
                INTERFACE=own.interface,
                OWN_ADDRESS=own.address,
                PEER_ADDRESS=peer.address,
                HEALTH_URL=f"http://{parsed.envoy_health.listen}",
            )
            keepalived = Keepalived(own, directory / own.name, configuration)
            balancers.append(Balancer(own, envoy, keepalived))
            await exit_stack.enter_async_context(envoy)
            await exit_stack.enter_async_context(keepalived)
        cluster = VirtualIpCluster(balancers, client, control_plane, node)
        await cluster.wait_until(lambda: all(balancer.is_ready for balancer in balancers))
        await cluster.wait_until(lambda: sum(balancer.holds_address for balancer in balancers) == 1)
        yield cluster
        assert [bug for balancer in balancers for bug in balancer.envoy.bugs()] == []


def create_envoy(machine: Machine, settings: Settings, directory: Path, *, name: str) -> MachineEnvoy:
    """Create an Envoy on a machine without starting it. `name` is its id."""
    bootstrap = render_bootstrap(
        settings,
        control_planes=[settings.xds.listen],
        node_id=name,
        admin=f"{machine.address}:0",
        module=str(require_module()),
    )
    return MachineEnvoy(machine, bootstrap, directory / machine.name, name=name)
