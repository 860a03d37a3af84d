"""What a client may do while its session is on its way: nothing is lost, said twice, or in another order."""

from __future__ import annotations

import random

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, FULL, Command, eof, frame, frames, one_row
from tests.support.migration.fault_arena import HELD, A, Arenas, Play
from tests.support.migration.fault_cases import Case, cases
from tests.support.migration.scripted_node import CHECK, OK, Actor, Next, reset
from tests.support.module.envoy import within
from tests.support.waiting import never, nothing_comes, stuck, taken, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
LONG = 20 * MIB
QUIT = frame(0, bytes((Command.QUIT,)))
QUIET, LONG_UNREAD = 0.2, 3.5
"""Seconds in which nothing may happen; the latter are longer than a session waits after a failure."""


def serves(play: Play, step: str) -> Actor:
    """The node that gets what the client sends in that step."""
    return play.new if step in HELD and step != "undo" else play.old


async def leaves(play: Play, way: str) -> None:
    """The client does so."""
    match way:
        case "client: FIN":
            play.client.writer.write_eof()
        case "client: RST":
            await reset(play.client.writer.get_extra_info("socket"), play.client.writer.transport.abort)
        case "client: COM_QUIT":
            play.client.writer.write(QUIT)


ENDS = cases("client", "FIN", "RST", "COM_QUIT")
AROUND = [
    (case, order) for case in ENDS for order in ("before", "after")[: 2 if case.step == "switch" else 1]
]


@pytest.mark.parametrize(("case", "order"), AROUND, ids=[f"{case} - {order}" for case, order in AROUND])
async def test_a_client_leaves(arenas: Arenas, case: Case, order: str) -> None:
    """`order`: before or after the last answer that the move waits for."""
    async with arenas.play(case) as play:
        play.arena.unjudged.add(play.old.name)
        gate = await play.reach(case.step)
        if order == "after":
            link = await gate.here()
            link.send(OK)
            gate.open(Next.SAID)
        await leaves(play, case.way)
        gate.open()
        if case.way != "client: RST":
            rest = await within(play.client.reader.read())
            assert case.step == "wait" or not rest
        await until(lambda: not (play.old.open_links or play.new.open_links))
        if case.way == "client: COM_QUIT":
            assert serves(play, case.step).quits == 1


@pytest.mark.parametrize("case", cases("client", "pipelined commands"), ids=str)
async def test_a_client_sends_two_commands_at_once(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step)
        play.ask("insert 5", CHECK)
        if case.step in ("connect", "tls"):
            await answered(play, play.old, 5)
            gate.open()
        else:
            gate.open()
            if case.step == "wait":
                await play.inserted(2)
            await answered(play, serves(play, case.step), 5)
        assert b"insert 5" in serves(play, case.step).said
        await play.comes_to(case)
        assert sum(node.said.count(b"insert 5") for node in (play.old, play.new)) == 1


async def answered(play: Play, node: Actor, rows: int) -> None:
    """The answers to these two, from there."""
    await play.inserted(rows)
    assert await play.row() == (A, str(rows), node.name)
    play.rows = -1


@pytest.mark.parametrize("case", cases("client", "20 MiB statement"), ids=str)
async def test_a_client_sends_a_long_statement(arenas: Arenas, case: Case) -> None:
    """In pieces, in the middle of which the move goes on."""
    dice = random.Random(case.step)
    statement = dice.randbytes(LONG)
    sent = frames(0, [bytes((Command.QUERY,)) + statement]) + frame(0, b"\x03insert 6")
    around = (0, 4, 5, FULL + 4, FULL + 5, len(sent))
    goes = dice.choice((*around, dice.randrange(len(sent))))
    async with arenas.play(case) as play:
        gate = await play.reach(case.step)
        at = 0
        while at < len(sent):
            piece = dice.choice((1, 3, 4, 5, 1000, 1 << 16, 1 << 22))
            end = min(at + piece, goes if at < goes else len(sent))
            play.client.writer.write(sent[at:end])
            at = end
            if at >= goes:
                gate.open()
            # In other steps nobody reads before the gate is open.
            if (at >= goes or case.step in ("connect", "tls")) and dice.random() < 0.3:
                await taken(play.client.writer)
        gate.open()
        if case.step == "wait":
            await play.inserted(2)
        size, node = await play.row()
        assert int(size) == LONG
        await play.inserted(6)
        play.rows = 6
        if case.step in HELD:
            assert node == serves(play, case.step).name
        await play.comes_to(case)
        assert sum(node.said.count(statement[:199]) for node in (play.old, play.new)) == 1


def result(size: int) -> bytes:
    """A text result set of about so many bytes."""
    dice = random.Random(2)
    payloads = one_row([("c", "")], AUTOCOMMIT, deprecate_eof=False)[:3]
    payloads += [b"\xfa" + dice.randbytes(250) for _ in range(size // 255)]
    return frames(1, [*payloads, eof(AUTOCOMMIT)])


@pytest.mark.parametrize("case", cases("client", "10 MiB result, unread"), ids=str)
async def test_a_client_does_not_read(arenas: Arenas, case: Case) -> None:
    """Its session is left alone until it does."""
    answer = result(10 * MIB)
    async with arenas.play(case) as play:
        play.old.answers[b"much"] = answer
        transport = play.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        if case.step == "wait":
            gate = play.old.hold("statement")
            play.ask("much")
            await gate.here()
            play.drain()
            await until(lambda: bool(play.new.links))
        else:
            gate = await play.reach(case.step)
            play.ask("much")
            await until(lambda: b"much" in play.old.said)
        gate.open()
        await stuck(play.client.writer)
        await never(lambda: play.old.exports > 0, QUIET)
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await within(play.client.reader.readexactly(len(answer))) == answer
        play.rows = -1
        await play.comes_to(case)
        await nothing_comes(play.client.reader, QUIET)
        assert play.old.said.count(b"much") == 1


async def test_a_client_that_has_long_not_read_moves_as_soon_as_it_has(arenas: Arenas) -> None:
    """That it could not move meanwhile is no failure, for which it would have to wait."""
    answer = result(10 * MIB)
    async with (await arenas.of("wait")).play("unread for long") as play:
        play.old.answers[b"much"] = answer
        transport = play.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        play.ask("much")
        await stuck(play.client.writer)
        play.drain()
        await never(lambda: bool(play.new.links or play.old.exports), LONG_UNREAD)
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await within(play.client.reader.readexactly(len(answer))) == answer
        play.rows = -1
        await until(play.new.arrived.is_set, 2.0)
        await play.moves()
