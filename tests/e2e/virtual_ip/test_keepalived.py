"""Two Envoys share a virtual address with the keepalived configuration of deploy/keepalived.

Each Envoy has a machine of its own: a network namespace at a bridge. `make soak` moves the address 40 times.
"""

from __future__ import annotations

import shutil
import signal
import socket
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest

from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import error_code
from tests.support.virtual_ip.bridged_network import Machine, bridged_network
from tests.support.virtual_ip.cluster import VirtualIpCluster, run_virtual_ip_cluster
from tests.support.virtual_ip.connect_probe import ConnectProbe
from tests.support.waiting import assert_never, assert_nothing_received

pytestmark = pytest.mark.timeout(1800 if SOAK else 240)

Cause = Literal["not ready", "Envoy killed", "machine lost"]
MAX_GAP_SECONDS: Mapping[Cause, float] = {"not ready": 1.0, "Envoy killed": 3.0, "machine lost": 3.0}
SWITCHES: Sequence[Cause] = ("not ready", "Envoy killed", "not ready", "machine lost") * (10 if SOAK else 1)
SILENCE_SECONDS = 2.5
"""Longer than the time without advertisements after which the other machine takes the address."""
MACHINES = {"envoy-1": "10.0.0.7", "envoy-2": "10.0.0.8", "client": "10.0.0.50"}


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    if shutil.which("keepalived", path="/usr/local/sbin:/usr/sbin:/sbin") is None:
        pytest.skip("keepalived is not installed; install it with: apt-get install keepalived")
    with bridged_network(MACHINES) as created:
        yield created


@pytest.fixture
async def cluster(tmp_path: Path, machines: list[Machine]) -> AsyncIterator[VirtualIpCluster]:
    async with run_virtual_ip_cluster(tmp_path, machines) as running:
        yield running


async def switch(cluster: VirtualIpCluster, probe: ConnectProbe, cause: Cause) -> float:
    """Make the address move, then repair its former holder. Return how long no client could log in."""
    holder, backup = cluster.holder_and_backup()
    probe.restart_measurement()
    match cause:
        case "not ready":
            await cluster.set_ready(holder, is_ready=False)
        case "Envoy killed":
            await holder.envoy.kill()
        case "machine lost":
            await cluster.lose_machine(holder)
    await cluster.wait_until(lambda: backup.holds_address)
    await probe.wait_for_logins()
    gap = probe.longest_gap()
    match cause:
        case "not ready":
            await cluster.set_ready(holder, is_ready=True)
        case "Envoy killed":
            await holder.envoy.launch()
            await cluster.wait_until(lambda: holder.is_ready)
        case "machine lost":
            await cluster.boot_machine(holder)
    assert not holder.holds_address  # It does not take the address back.
    return gap


async def test_switches(cluster: VirtualIpCluster) -> None:
    gaps: dict[Cause, list[float]] = {cause: [] for cause in MAX_GAP_SECONDS}
    async with cluster.run_probe() as probe:
        for cause in SWITCHES:
            gaps[cause].append(await switch(cluster, probe, cause))
    print(f"\n{'seconds without a login':24} count    min median    max")
    for cause, seconds in gaps.items():
        figures = (min(seconds), statistics.median(seconds), max(seconds))
        print(f"{cause:24} {len(seconds):5}", *(f"{figure:6.2f}" for figure in figures))
    for cause, seconds in gaps.items():
        assert max(seconds) < MAX_GAP_SECONDS[cause], cause


async def test_a_machine_keeps_the_address_if_no_envoy_is_ready(cluster: VirtualIpCluster) -> None:
    holder, backup = cluster.holder_and_backup()
    for balancer in (backup, holder):
        await cluster.set_ready(balancer, is_ready=False)
    await assert_never(lambda: not holder.holds_address or backup.holds_address, SILENCE_SECONDS)
    async with cluster.session() as session:
        assert error_code(await session.send_command(MySqlCommand.PING)) == 0
    await cluster.set_ready(backup, is_ready=True)
    await cluster.wait_for_holder(backup)


async def test_sessions_end_when_the_address_moves(cluster: VirtualIpCluster) -> None:
    holder, backup = cluster.holder_and_backup()
    other_connections = cluster.node.open_connections
    async with cluster.session() as idle, cluster.session() as waiting:
        # Let the kernel of the client that waits for an answer probe the connection after a second.
        waiting_socket: socket.socket = waiting.writer.get_extra_info("socket")
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            waiting_socket.setsockopt(socket.IPPROTO_TCP, option, 1)
        waiting_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert cluster.node.open_connections == other_connections + 2
        await cluster.set_ready(holder, is_ready=False)
        await cluster.wait_for_holder(backup)
        # The old machine ends the sessions, so that TiDB rolls back their transactions.
        await cluster.wait_until(lambda: cluster.node.open_connections == other_connections)
        with pytest.raises(ConnectionResetError):
            await waiting.read_to_end()
        # Nothing tells a client without keepalive, until it sends something.
        await assert_nothing_received(idle.reader, SILENCE_SECONDS)
        with pytest.raises(ConnectionResetError):
            await idle.send_command(MySqlCommand.PING)


async def test_reload_and_end_of_keepalived(cluster: VirtualIpCluster) -> None:
    first, second = cluster.holder_and_backup()
    async with cluster.run_probe() as probe:
        first.keepalived.process.send_signal(signal.SIGHUP)
        await assert_never(lambda: not first.holds_address or second.holds_address, SILENCE_SECONDS)
        await first.keepalived.terminate()
        await cluster.wait_for_holder(second)
        await first.keepalived.launch()
        await cluster.wait_until(lambda: first.is_ready)
        await second.keepalived.kill()
        await cluster.wait_until(lambda: first.holds_address)
        assert second.holds_address  # A killed keepalived could not remove it. A new one does.
        await second.keepalived.launch()
        await cluster.wait_for_holder(first)
        await probe.wait_for_logins()
    assert probe.longest_gap() < MAX_GAP_SECONDS["not ready"]


async def test_replaced_envoy_keeps_the_address(cluster: VirtualIpCluster, tmp_path: Path) -> None:
    holder, backup = cluster.holder_and_backup()
    async with cluster.run_probe() as probe, cluster.replaced_envoy(holder, tmp_path) as result:
        assert result.exit_code == 0, result
        await assert_never(lambda: not holder.holds_address or backup.holds_address, SILENCE_SECONDS)
        await probe.wait_for_logins()
    assert probe.longest_gap() < MAX_GAP_SECONDS["not ready"]


async def test_one_machine_keeps_the_address_after_both_had_it(cluster: VirtualIpCluster) -> None:
    lower, higher = cluster.balancers
    # The case in which clients would keep the wrong hardware address: the machine that returns wins.
    await cluster.move_address_to(higher)
    async with cluster.run_probe() as probe:
        higher.machine.disconnect()
        await cluster.wait_until(lambda: lower.holds_address)
        await probe.wait_for_logins()
        assert higher.holds_address
        probe.restart_measurement()
        higher.machine.connect()
        await cluster.wait_for_holder(higher)
        await probe.wait_for_logins()
    assert probe.longest_gap() < MAX_GAP_SECONDS["not ready"]
