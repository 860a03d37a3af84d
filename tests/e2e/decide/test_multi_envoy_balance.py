"""Six Envoys balance as one, where each by itself cannot; a node that joins, and one that is weaker."""

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
"""Clients that one node has beside the fleet: half of its share."""
EACH = 9
"""Clients of each Envoy: 60 with the direct ones, which five nodes and six can share evenly."""
AT_ONCE = 3
"""Clients of each Envoy that come at once. Few go wrong then: what moves now would stay for a minute."""
EVEN = 1.05
ALONE = 1.15
"""What a fleet has at least of which each Envoy knows of its own sessions alone."""
TURNS = 5
"""How often the clients come to that fleet: each of its Envoys picks by chance."""
BALANCE_SECONDS = 75.0
"""A session that was moved does not move again for 60 s. So a balance may have to wait for sessions that were
moved while the clients came: on a busy machine the counts that decide are late, and more of them move."""
SETTINGS = {"balance": {"slow_start": 0}, "drain": {"fleet_return": 0}}


async def test_six_envoys_balance_as_one(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        run_balanced_cluster(
            tmp_path, mariadb, signing, nodes=NODES, envoys=ENVOYS, settings=SETTINGS
        ) as there,
        run_crowd() as people,
    ):
        crowded, weak = there.stack.tidb[0], there.stack.tidb[1]
        beside = [crowded.port] * DIRECT
        alone = await by_themselves(tmp_path, there, people, beside)
        stock = fmean(imbalance(counts) for counts in alone)

        for _ in range(EACH // AT_ONCE):
            await people.add_clients(there.ports * AT_ONCE)
            await there.stack.wait_until(lambda: there.is_reported(people), "the clients to be known")
        await people.add_clients(beside)
        together = await there.wait_for_counts(lambda counts: imbalance(counts) <= EVEN, "an even balance")

        new = await there.stack.add_tidb()
        began = time.monotonic()
        joined = await there.wait_for_counts(is_fair, f"{new.address} to have its share", BALANCE_SECONDS)
        seconds = there.settled_at - began

        # Together with these, the weak node's share and that of each other are whole numbers.
        await people.add_clients(there.ports)
        await there.stack.wait_until(lambda: there.is_reported(people), "the clients to be known")
        half = {weak.address: 0.5}
        (await there.stack.api.patch(f"/v1/nodes/{weak.address}", json={"weight": 50})).raise_for_status()
        weighed = await there.wait_for_counts(
            lambda counts: is_fair(counts, half), "half of a share", BALANCE_SECONDS
        )
    with capsys.disabled():
        print(
            f"\n  {ENVOYS} Envoys, {NODES} nodes, {DIRECT} direct clients on one of them; fullest over mean:"
        )
        print(f"  Tidevoy {imbalance(together):.2f}: {told(together)}")
        print(f"  stock Envoys {stock:.2f}: {', '.join(map(told, alone))}")
        print(f"  a node that joins has its share after {seconds:.1f} s: {told(joined)}")
        print(f"  one of half the weight has half of what each other has: {told(weighed)}", flush=True)
    assert stock >= ALONE
    assert (people.errors, people.statement_count > 0) == ([], True)


async def by_themselves(
    directory: Path, there: BalancedCluster, people: ClientCrowd, beside: Sequence[int]
) -> list[dict[str, int]]:
    """What the nodes have each time that clients come through stock Envoys, and `beside` to these ports."""
    nodes = [node.address for node in there.stack.tidb]
    seen = []
    async with run_stock_envoys(directory, there.stack.ports, nodes, ENVOYS) as ports:
        for _ in range(TURNS):
            came = await people.add_clients([*ports * EACH, *beside])
            seen.append(await there.node_connections())
            assert sum(seen[-1].values()) == len(came)
            people.drop_clients(came)
            await there.stack.wait_until(lambda: there.is_reported(people), "the clients to be gone")
    return seen


def told(counts: Mapping[str, int]) -> str:
    """The counts of the nodes, from the fullest."""
    return "/".join(str(count) for count in sorted(counts.values(), reverse=True))
