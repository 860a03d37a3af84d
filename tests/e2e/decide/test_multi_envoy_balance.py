"""Six Envoys balance as one, which they cannot without a control plane; a joining and a weaker node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.client_crowd import ClientCrowd, run_crowd
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, imbalance, is_fair, run_balanced_cluster
from tests.support.e2e.stock_envoys import run_stock_envoys

pytestmark = pytest.mark.timeout(270)

NODES, ENVOYS = 5, 6
DIRECT = 6
"""Clients that connect to one node directly: half of its share."""
CLIENTS_PER_ENVOY = 9
"""Clients of each Envoy: 60 with the direct ones, which divide evenly among five and among six nodes."""
CLIENTS_PER_STEP = 3
"""Clients of each Envoy that connect at once; few, because a migrated session then stays for a minute."""
MAX_IMBALANCE = 1.05
MIN_STOCK_IMBALANCE = 1.15
"""Minimal imbalance of a fleet in which each Envoy knows only its own sessions."""
REPETITIONS = 5
"""How often the clients connect to the stock Envoys, which pick nodes at random."""
BALANCE_SECONDS = 75.0
"""A migrated session does not migrate again for 60 s, so a balance may have to wait for sessions that
migrated while the clients connected: on a busy machine counts are late, and more sessions migrate."""
SETTINGS = {"balance": {"slow_start": 0}, "drain": {"reconnect_grace": 0}}


async def test_six_envoys_balance_as_one(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        run_balanced_cluster(
            tmp_path, mariadb, signing, nodes=NODES, envoys=ENVOYS, settings=SETTINGS
        ) as cluster,
        run_crowd() as clients,
    ):
        shared_node, weak = cluster.stack.tidb[0], cluster.stack.tidb[1]
        direct_ports = [shared_node.port] * DIRECT
        stock_counts = await count_with_stock_envoys(tmp_path, cluster, clients, direct_ports)
        stock_imbalance = fmean(imbalance(counts) for counts in stock_counts)

        for _ in range(CLIENTS_PER_ENVOY // CLIENTS_PER_STEP):
            await clients.add_clients(cluster.ports * CLIENTS_PER_STEP)
            await cluster.stack.wait_until(lambda: cluster.is_reported(clients), "the clients to be counted")
        await clients.add_clients(direct_ports)
        balanced = await cluster.wait_for_counts(
            lambda counts: imbalance(counts) <= MAX_IMBALANCE, "an even balance"
        )

        joining = await cluster.stack.add_tidb()
        started = time.monotonic()
        joined = await cluster.wait_for_counts(
            is_fair, f"{joining.address} to have its share", BALANCE_SECONDS
        )
        seconds = cluster.settled_at - started

        # With these clients, the shares of the weak node and of the others are whole numbers.
        await clients.add_clients(cluster.ports)
        await cluster.stack.wait_until(lambda: cluster.is_reported(clients), "the clients to be counted")
        half = {weak.address: 0.5}
        (await cluster.stack.api.patch(f"/v1/nodes/{weak.address}", json={"weight": 50})).raise_for_status()
        weighted = await cluster.wait_for_counts(
            lambda counts: is_fair(counts, half), "half of a share", BALANCE_SECONDS
        )
    with capsys.disabled():
        print(
            f"\n  {ENVOYS} Envoys, {NODES} nodes, {DIRECT} direct clients on one of them; maximum over mean:"
        )
        print(f"  Tidevoy {imbalance(balanced):.2f}: {format_counts(balanced)}")
        print(f"  stock Envoys {stock_imbalance:.2f}: {', '.join(map(format_counts, stock_counts))}")
        print(f"  a joining node has its share after {seconds:.1f} s: {format_counts(joined)}")
        print(
            f"  a node of half the weight has half of the others' counts: {format_counts(weighted)}",
            flush=True,
        )
    assert stock_imbalance >= MIN_STOCK_IMBALANCE
    assert (clients.errors, clients.statement_count > 0) == ([], True)


async def count_with_stock_envoys(
    directory: Path, cluster: BalancedCluster, clients: ClientCrowd, direct_ports: Sequence[int]
) -> list[dict[str, int]]:
    """Return the nodes' counts each time that clients connect through stock Envoys and to `direct_ports`."""
    nodes = [node.address for node in cluster.stack.tidb]
    counts = []
    async with run_stock_envoys(directory, cluster.stack.ports, nodes, ENVOYS) as ports:
        for _ in range(REPETITIONS):
            connected = await clients.add_clients([*ports * CLIENTS_PER_ENVOY, *direct_ports])
            counts.append(await cluster.node_connections())
            assert sum(counts[-1].values()) == len(connected)
            clients.drop_clients(connected)
            await cluster.stack.wait_until(lambda: cluster.is_reported(clients), "the clients to be gone")
    return counts


def format_counts(counts: Mapping[str, int]) -> str:
    """Return the counts of the nodes as text, highest first."""
    return "/".join(str(count) for count in sorted(counts.values(), reverse=True))
