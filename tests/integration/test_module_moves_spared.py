"""Sessions that leave a node which has more than its share and stays in service: as many as are asked for."""

from __future__ import annotations

from pathlib import Path

from sandbox.mariadb import MariaDb
from tests.awaiting import nothing_comes, until
from tests.module_rig import Host, tell
from tests.moves_rig import Fleet, asked, fleet


class Crowd:
    """Clients on the first of two nodes, before the second one comes.

    That is drained from the start: a session that has moved would not do so again for others' sake.
    """

    def __init__(self, all_: Fleet, instance: str) -> None:
        self.all = all_
        self.instance = instance

    def ask(self, moves: str, weight: int = 1, *, wants: bool = True) -> None:
        """Tell Envoy how many sessions are to leave the first node; `{}` stands for this Envoy.

        `wants`: the second node lacks sessions.
        """
        first, second = self.all.nodes
        known = moves.format(self.instance)
        tell(
            self.all.endpoints,
            [Host(first.sql_address, moves=known), Host(second.sql_address, weight=weight, wants=wants)],
        )

    async def settled(self, *sessions: int) -> None:
        await until(lambda: self.all.sessions == list(sessions))


async def test_as_many_leave_as_were_asked_for_and_once_a_round(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance())
        clients = [await all_.client() for _ in range(10)]
        for number, client in enumerate(clients):
            await asked(client, f"set @own = {number}")
        await crowd.settled(10, 0)

        crowd.ask("7:{}=3,0000000000000000=5")
        await crowd.settled(7, 3)
        # The same round again, with other weights, asks for nothing more.
        crowd.ask("7:{}=3", weight=100)
        quiet = await all_.raw()
        await nothing_comes(quiet.reader, 1.0)
        assert sorted(all_.sessions) in ([3, 8], [4, 7])
        for number, client in enumerate(clients):
            assert await asked(client, "select @own") == [(number,)]
        for client in clients:
            await client.ensure_closed()


async def test_a_session_that_has_just_moved_stays(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb) as all_:
        crowd = Crowd(all_, await all_.proxy.instance())
        all_.drain(all_.nodes[0])
        clients = [await all_.client() for _ in range(4)]
        await crowd.settled(0, 4)
        all_.drain(all_.nodes[1])
        await crowd.settled(4, 0)
        crowd.ask("1:{}=4")
        newcomer = await all_.raw()
        await nothing_comes(newcomer.reader, 1.0)
        assert sum(all_.sessions) == 5
        assert all_.sessions[0] >= 4
        for client in clients:
            await client.ensure_closed()


async def test_what_is_asked_of_others_or_cannot_be_read_moves_nothing(
    tmp_path: Path, mariadb: MariaDb
) -> None:
    async with fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance())
        client = await all_.client()
        await crowd.settled(1, 0)
        for moves in ("1:0123456789abcdef=4", "x:{}=1", "{}=1", "2:{}"):
            crowd.ask(moves)
        quiet = await all_.raw()
        await nothing_comes(quiet.reader, 1.0)
        assert await asked(client, "select @@hostname") == await asked(client, "select @@hostname")
        assert all_.sessions[0] >= 1
        await client.ensure_closed()


async def test_sessions_go_only_where_they_are_wanted(tmp_path: Path, mariadb: MariaDb) -> None:
    async with fleet(tmp_path, mariadb, drained=[1]) as all_:
        crowd = Crowd(all_, await all_.proxy.instance())
        clients = [await all_.client() for _ in range(4)]
        await crowd.settled(4, 0)
        crowd.ask("1:{}=4", wants=False)
        await all_.proxy.reports({("migrations", all_.nodes[0].sql_address, "no_node", "stayed"): 4})
        assert all_.sessions == [4, 0]
        crowd.ask("2:{}=2")
        await crowd.settled(2, 2)
        for client in clients:
            await client.ensure_closed()
