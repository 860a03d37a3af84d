"""Sessions that leave a node which has more than its share and stays in service: as many as are asked for."""

from __future__ import annotations

from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.support.migration.fleet import THREE_NODES, MigratingFleet, query_rows, run_fleet
from tests.support.module.bootstrap import Host, publish_nodes
from tests.support.waiting import assert_nothing_received, wait_until


class Crowd:
    """Clients on the first of two nodes, before the second one comes.

    That is drained from the start: a session that has moved would not do so again for others' sake.
    """

    def __init__(self, all_: MigratingFleet, instance: str) -> None:
        self.all = all_
        self.instance = instance

    def ask(self, moves: str, *wants: str, weight: int = 1) -> None:
        """Tell Envoy how many sessions are to leave the first node, and how many each other is to get.

        `{}` stands for this Envoy. Without `wants` the second node is to get more than there are.
        """
        first, *others = self.all.nodes
        wanted = [each.format(self.instance) for each in wants or (f"{moves.partition(':')[0]}:{{}}=99",)]
        wanted += [""] * (len(others) - len(wanted))
        takers = [
            Host(node.sql_address, weight=weight, incoming=each)
            for node, each in zip(others, wanted, strict=True)
        ]
        publish_nodes(
            self.all.endpoints, [Host(first.sql_address, outgoing=moves.format(self.instance)), *takers]
        )

    async def settled(self, *sessions: int) -> None:
        await wait_until(lambda: self.all.sessions == list(sessions))


async def test_as_many_leave_as_were_asked_for_and_once_a_round(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        clients = [await all_.connect_driver() for _ in range(10)]
        for number, client in enumerate(clients):
            await query_rows(client, f"set @own = {number}")
        await crowd.settled(10, 0)

        crowd.ask("7:{}=3,0000000000000000=5")
        await crowd.settled(7, 3)
        # The same round again, with other weights, asks for nothing more.
        crowd.ask("7:{}=3", weight=100)
        quiet = await all_.connect_raw()
        await assert_nothing_received(quiet.reader, 1.0)
        assert sorted(all_.sessions) in ([3, 8], [4, 7])
        for number, client in enumerate(clients):
            assert await query_rows(client, "select @own") == [(number,)]
        for client in clients:
            await client.ensure_closed()


async def test_a_session_that_has_just_moved_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        all_.drain(all_.nodes[0])
        clients = [await all_.connect_driver() for _ in range(4)]
        await crowd.settled(0, 4)
        all_.drain(all_.nodes[1])
        await crowd.settled(4, 0)
        crowd.ask("1:{}=4")
        newcomer = await all_.connect_raw()
        await assert_nothing_received(newcomer.reader, 1.0)
        assert sum(all_.sessions) == 5
        assert all_.sessions[0] >= 4
        for client in clients:
            await client.ensure_closed()


async def test_what_is_asked_of_others_or_cannot_be_read_moves_nothing(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        client = await all_.connect_driver()
        await crowd.settled(1, 0)
        for moves in ("1:0123456789abcdef=4", "x:{}=1", "{}=1", "2:{}"):
            crowd.ask(moves, "1:{}=4")
        quiet = await all_.connect_raw()
        await assert_nothing_received(quiet.reader, 1.0)
        assert await query_rows(client, "select @@hostname") == await query_rows(client, "select @@hostname")
        assert all_.sessions[0] >= 1
        await client.ensure_closed()


async def test_sessions_go_only_where_they_are_wanted(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        clients = [await all_.connect_driver() for _ in range(4)]
        await crowd.settled(4, 0)
        for wants in ("", "1:{}=0", "1:0123456789abcdef=4", "1", "x:{}=4"):
            crowd.ask("1:{}=4", wants)
        crowd.ask("2:{}=2")
        await crowd.settled(2, 2)
        await all_.proxy.wait_for_metrics({("migrations", all_.nodes[0].sql_address, "ok", "moved"): 2})
        assert await all_.count_migrations("stayed", "no_node") == 0, "what nobody wants is not begun"
        for client in clients:
            await client.ensure_closed()


async def test_no_node_gets_more_than_it_wants(tmp_path: Path, mariadb: MariaDb) -> None:
    async with run_fleet(tmp_path, mariadb, specs=THREE_NODES, drained=[1, 2]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        clients = [await all_.connect_driver() for _ in range(8)]
        await crowd.settled(8, 0, 0)
        crowd.ask("1:{}=8", "1:{}=1,0123456789abcdef=5", "1:{}=4")
        await crowd.settled(3, 1, 4)
        # The round goes on, and nobody wants more.
        crowd.ask("1:{}=8", "1:{}=1", "1:{}=4", weight=3)
        quiet = await all_.connect_raw()
        await assert_nothing_received(quiet.reader, 0.5)
        await all_.proxy.wait_for_metrics({("migrations", all_.nodes[0].sql_address, "ok", "moved"): 5})
        for client in clients:
            await client.ensure_closed()


async def test_others_go_for_those_that_cannot(tmp_path: Path, mariadb: MariaDb) -> None:
    """A session that does not move uses up nothing: neither what its node gives, nor what another wants."""
    async with run_fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance_id())
        clients = [await all_.connect_driver() for _ in range(6)]
        for number, client in enumerate(clients[:4]):
            await query_rows(client, f"select get_lock('spared{number}', 0)")
        await crowd.settled(6, 0)
        crowd.ask("1:{}=2", "1:{}=2")
        await crowd.settled(4, 2)
        for client in clients:
            await client.ensure_closed()
