"""With the control plane, six Envoys balance like one Envoy, also when a node joins or gets less weight."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.multi_envoy_cluster import BalancedCluster, imbalance, is_fair, run_balanced_cluster
from tests.support.e2e.pinging_clients import PingingClients, run_pinging_clients
from tests.support.e2e.stock_envoys import run_stock_envoys

pytestmark = pytest.mark.timeout(270)

NODES, ENVOYS = 5, 6
DIRECT = 6
"""Clients that connect to one node directly. They fill half of the node's share of the sessions."""
CLIENTS_PER_ENVOY = 9
"""Clients per Envoy. With the direct clients there are 60, which five or six nodes can share equally."""
CLIENTS_PER_STEP = 3
"""Clients per Envoy that connect at once: few, so that few sessions migrate while clients connect."""
MAX_IMBALANCE = 1.05
MIN_STOCK_IMBALANCE = 1.15
"""Minimal imbalance of a fleet in which each Envoy knows only its own sessions."""
REPETITIONS = 5
"""Number of times that the clients connect to the stock Envoys, which pick nodes at random."""
BALANCE_SECONDS = 90.0
"""Maximal time until the sessions are balanced. On a busy machine, counts arrive late, so sessions migrate
while clients connect. These sessions do not migrate again for 60 s, even if the balance requires it. Then a
pause of 10 s between two rounds may have begun just before, and the round itself takes some seconds."""
SETTINGS = {"balance": {"slow_start": 0}, "drain": {"reconnect_grace": 0}}


async def test_six_envoys_balance_as_one(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        run_balanced_cluster(
            tmp_path, mariadb, signing, nodes=NODES, envoys=ENVOYS, settings=SETTINGS
        ) as cluster,
        run_pinging_clients() as clients,
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

        # With six more clients, the shares of the weak node (6) and the other nodes (12) are whole numbers.
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
    directory: Path, cluster: BalancedCluster, clients: PingingClients, direct_ports: Sequence[int]
) -> list[dict[str, int]]:
    """Repeatedly connect clients through stock Envoys and to `direct_ports`. Return each time's counts."""
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
