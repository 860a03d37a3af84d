"""Rebalancing: as many sessions leave an overloaded node as the control plane requests.

The overloaded node stays in service. In numbered rounds, the control plane publishes for each Envoy how many
sessions leave it (`outgoing`), and how many each target accepts (`incoming`), as `round:instance=count`.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.migration.fleet import THREE_NODES, MigratingFleet, run_fleet
from tests.support.module.bootstrap import Host, publish_nodes
from tests.support.tidb_sim_clients import query_rows
from tests.support.waiting import assert_nothing_received, wait_until


class RebalancedFleet:
    """Publishes rebalancing rounds for a fleet whose sessions all start on the first node.

    A session that has just migrated stays, so tests start with the other nodes draining.
    """

    def __init__(self, fleet: MigratingFleet, instance: str) -> None:
        self.fleet = fleet
        self.instance = instance

    async def publish_round(self, outgoing: str, *incoming: str, weight: int = 1) -> None:
        """Publish how many sessions leave the first node, and how many each other node accepts.

        `{}` is replaced by this Envoy's instance id. Without `incoming` the second node accepts 99 sessions.
        """
        first, *others = self.fleet.nodes
        counts = [
            count.format(self.instance) for count in incoming or (f"{outgoing.partition(':')[0]}:{{}}=99",)
        ]
        counts += [""] * (len(others) - len(counts))
        targets = [
            Host(node.sql_address, weight=weight, incoming=count)
            for node, count in zip(others, counts, strict=True)
        ]
        source = Host(first.sql_address, outgoing=outgoing.format(self.instance))
        async with self.fleet.proxy.wait_applied():
            publish_nodes(self.fleet.endpoints, [source, *targets])

    async def wait_counts(self, *sessions: int) -> None:
        await wait_until(lambda: self.fleet.sessions == list(sessions))


async def test_requested_number_of_sessions_leaves_once_per_round(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        clients = [await fleet.connect_driver() for _ in range(10)]
        for number, client in enumerate(clients):
            await query_rows(client, f"set @own = {number}")
        await rebalanced.wait_counts(10, 0)

        await rebalanced.publish_round("7:{}=3,0000000000000000=5")
        await rebalanced.wait_counts(7, 3)
        # The same round with other weights requests no further migrations.
        await rebalanced.publish_round("7:{}=3", weight=100)
        idle = await fleet.connect_raw()
        await assert_nothing_received(idle.reader, 1.0)
        assert sorted(fleet.sessions) in ([3, 8], [4, 7])
        for number, client in enumerate(clients):
            assert await query_rows(client, "select @own") == [(number,)]
        for client in clients:
            await client.ensure_closed()


async def test_session_that_just_migrated_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        fleet.drain(fleet.nodes[0])
        clients = [await fleet.connect_driver() for _ in range(4)]
        await rebalanced.wait_counts(0, 4)
        fleet.drain(fleet.nodes[1])
        await rebalanced.wait_counts(4, 0)
        await rebalanced.publish_round("1:{}=4")
        newcomer = await fleet.connect_raw()
        await assert_nothing_received(newcomer.reader, 1.0)
        assert sum(fleet.sessions) == 5
        assert fleet.sessions[0] >= 4
        for client in clients:
            await client.ensure_closed()


async def test_requests_for_other_envoys_or_malformed_requests_are_ignored(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        client = await fleet.connect_driver()
        await rebalanced.wait_counts(1, 0)
        for outgoing in ("1:0123456789abcdef=4", "x:{}=1", "{}=1", "2:{}"):
            await rebalanced.publish_round(outgoing, "1:{}=4")
        idle = await fleet.connect_raw()
        await assert_nothing_received(idle.reader, 1.0)
        assert await query_rows(client, "select @@hostname") == [(fleet.nodes[0].node.name,)]
        await client.ensure_closed()


async def test_sessions_migrate_only_to_nodes_that_accept_them(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        clients = [await fleet.connect_driver() for _ in range(4)]
        await rebalanced.wait_counts(4, 0)
        for incoming in ("", "1:{}=0", "1:0123456789abcdef=4", "1", "x:{}=4"):
            await rebalanced.publish_round("1:{}=4", incoming)
        await rebalanced.publish_round("2:{}=2")
        await rebalanced.wait_counts(2, 2)
        await fleet.proxy.wait_for_metrics({("migrations", fleet.nodes[0].sql_address, "ok", "moved"): 2})
        assert await fleet.count_migrations("stayed", "no_node") == 0, (
            "Envoy starts no migration that no node accepts"
        )
        for client in clients:
            await client.ensure_closed()


async def test_no_node_receives_more_sessions_than_it_accepts(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        clients = [await fleet.connect_driver() for _ in range(8)]
        await rebalanced.wait_counts(8, 0, 0)
        await rebalanced.publish_round("1:{}=8", "1:{}=1,0123456789abcdef=5", "1:{}=4")
        await rebalanced.wait_counts(3, 1, 4)
        # The round continues, but no node accepts more sessions.
        await rebalanced.publish_round("1:{}=8", "1:{}=1", "1:{}=4", weight=3)
        idle = await fleet.connect_raw()
        await assert_nothing_received(idle.reader, 0.5)
        await fleet.proxy.wait_for_metrics({("migrations", fleet.nodes[0].sql_address, "ok", "moved"): 5})
        for client in clients:
            await client.ensure_closed()


async def test_other_sessions_migrate_instead_of_pinned_ones(tmp_path: Path, mariadb: MariaDb) -> None:
    """A session that cannot migrate does not count against the outgoing or incoming numbers."""
    async with run_fleet(tmp_path, mariadb, drained=[1]) as fleet:
        rebalanced = RebalancedFleet(fleet, await fleet.proxy.instance_id())
        clients = [await fleet.connect_driver() for _ in range(6)]
        for number, client in enumerate(clients[:4]):
            await query_rows(client, f"select get_lock('spared{number}', 0)")
        await rebalanced.wait_counts(6, 0)
        await rebalanced.publish_round("1:{}=2", "1:{}=2")
        await rebalanced.wait_counts(4, 2)
        for client in clients:
            await client.ensure_closed()
