"""The target of a move fails, in each step and in each way: the session goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MoveRules
from sandbox.tidb_sim.packets import err, frame
from tests.support.clients.server import Certificates
from tests.support.fake_servers import closed_port, full_backlog
from tests.support.migration.fault_arena import DENIED, Arenas, Play, node_context
from tests.support.migration.fault_cases import Case, cases
from tests.support.migration.fleet import Made, fleet
from tests.support.migration.scripted_node import OK, STOPPING, Link, Next
from tests.support.module.bootstrap import Host
from tests.support.waiting import nothing_comes, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATE = 0.2
"""Seconds; what is a handshake's time over a bad line."""
BROKEN = b"\x03\0\0\x01abc"
ERRORS = {
    "connect": frame(0, err(1040, "Too many connections", None)),
    "tls": frame(1, err(1040, "Too many connections", None)),
    "wait": frame(1, STOPPING),
    "export": frame(1, STOPPING),
    "login": DENIED,
    "states": frame(1, err(1064, "You have an error in your SQL syntax", "42000")),
}
GARBAGE = {"connect": b"HTTP/1.1 400 Bad Request\r\n\r\n", "switch": OK + BROKEN}


async def goes_on(play: Play, step: str) -> None:
    """The target has failed; all others go on."""
    if step == "wait":
        await play.released()
    play.gate.open(Next.NOTHING if step in ("connect", "tls", "login", "states") else Next.ANSWER)
    if step == "wait":
        await play.inserted(2)


async def fails(play: Play, case: Case) -> None:
    """In that step, and so."""
    link = play.new.links[-1]
    if case.step == "switch":
        await dies(play, link, case.way)
        return
    match case.way:
        case "target: FIN":
            await link.fin()
        case "target: gone" | "target: gone, another is there":
            await play.new.stop_listening()
            await link.fin()
        case "target: RST":
            await link.reset()
        case "target: ERR":
            link.send(ERRORS[case.step])
        case "target: garbage":
            link.send(GARBAGE.get(case.step, BROKEN))
    await goes_on(play, case.step)


async def dies(play: Play, link: Link, way: str) -> None:
    """Behind its last OK."""
    if way == "target: garbage":
        link.send(GARBAGE["switch"])
    else:
        if way.startswith("target: gone"):
            await play.new.stop_listening()
        link.send(OK)
        play.arena.expect(play.old, "ok", "moved")
        match way:
            case "target: RST":
                await link.taken()
                await link.reset()
            case "target: ERR":
                await link.taken()
                link.send(frame(0, STOPPING))
                await link.fin()
            case _:
                await link.fin()
    play.gate.open(Next.SAID)


WAYS = [*cases("target", "FIN", "RST", "gone", "ERR", "garbage")]


@pytest.mark.parametrize("case", WAYS, ids=str)
async def test_a_target_breaks_off(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        await play.reach(case.step)
        await fails(play, case)
        await play.comes_to(case)


@pytest.mark.parametrize("case", cases("target", "gone, another is there"), ids=str)
async def test_another_target_is_taken(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case, third=True) as play:
        await play.reach(case.step)
        await fails(play, case)
        await within_third(play, case.step)


async def within_third(play: Play, step: str) -> None:
    await until(play.third.arrived.is_set, 5.0)
    await play.is_on(play.third)
    assert len(play.new.links) == 1
    if step != "switch":
        play.arena.expect(play.old, "unreachable", "stayed")
        play.arena.expect(play.old, "ok", "moved")


@pytest.mark.parametrize("case", cases("target", "refused", "says nothing"), ids=str)
async def test_a_target_does_not_answer(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        if case.step == "connect":
            with closed_port() if case.way == "target: refused" else full_backlog() as endpoint:
                play.new.endpoint = endpoint
                play.drain()
                await play.counted(case.reason)
                play.undrain()
                await play.is_on(play.old)
                play.arena.expect_more(play.old, case.reason)
            return
        gate = await play.reach(case.step)
        gate.open(Next.NOTHING)
        await play.comes_to(case)


async def test_a_target_accepts_and_does_not_greet(arenas: Arenas) -> None:
    async with (await arenas.of("connect")).play("no greeting") as play:
        gate = await play.reach("connect")
        gate.open(Next.NOTHING)
        await play.stays("slow")


@pytest.mark.parametrize("case", cases("target", "byte by byte, late"), ids=str)
async def test_a_target_answers_late(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step, bytewise=case.step != "tls")
        if case.step == "tls":
            await nothing_comes(play.client.reader, LATE)
        gate.open()
        await play.comes_to(case)


async def test_a_target_changes_its_priority(arenas: Arenas) -> None:
    """It is not one that sessions are to leave, not even for a moment."""
    async with (await arenas.of("login")).play("another priority") as play:
        gate = await play.reach("login")
        new = Host(play.new.endpoint, play.new.name, priority=1)
        play.arena.tell(Host(play.old.endpoint, play.old.name, state="draining"), new)

        async def is_known() -> bool:
            return (await play.arena.proxy.hosts("tidb"))[new.endpoint].get("priority") == 1

        await until(is_known)
        gate.open()
        await play.moves()


@pytest.mark.parametrize("case", cases("target", "wrong certificate"), ids=str)
async def test_a_target_has_a_certificate_of_somebody_else(
    tmp_path: Path, arenas: Arenas, case: Case
) -> None:
    async with arenas.play(case) as play:
        play.new.tls = node_context(Certificates.make(tmp_path))
        await play.reach("connect")
        play.gate.open()
        await play.comes_to(case)


@pytest.mark.parametrize("case", cases("target", "dies under a statement"), ids=str)
async def test_a_target_dies_under_the_first_statement(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        play.ask("insert 3")
        await play.inserted(3)
        gate = await play.reach(case.step)
        play.ask("insert 4")
        runs = play.new.hold("statement")
        gate.open()
        await (await runs.here()).reset()
        runs.open(Next.NOTHING)
        await play.comes_to(case)
        play.arena.expect(play.old, "ok", "moved")
        assert play.old.said[-1] == b"insert 3"


REAL = cases("target", "expired token", "older, refuses states")


@pytest.mark.parametrize("case", REAL, ids=str)
async def test_a_target_does_not_let_it_in(
    tmp_path: Path, mariadb: MariaDb, database: str, case: Case
) -> None:
    """With a stand-in for TiDB, which checks what it is given."""
    wrong = MoveRules(clock_skew=120) if case.way == "target: expired token" else MoveRules(refuse=True)
    made = [Made(MoveRules(disturb=True)), Made(wrong)]
    async with fleet(tmp_path, mariadb, made=made, drained=[1]) as nodes:
        wire = await nodes.wire(database=database)
        await wire.query("create table t (id int)")
        await wire.query("set @a = 7")
        await wire.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.stayed(case.reason)
        assert await wire.one("select @a, row_count(), database()") == (b"7", b"2", database.encode())
        await nodes.settled(1, 0)
        if case.way == "target: expired token":
            assert all("it has expired" in what for what in nodes.take_violations())
