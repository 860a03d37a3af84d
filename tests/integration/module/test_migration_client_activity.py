"""What a client may do while its session is on its way: nothing is lost, said twice, or in another order."""

from __future__ import annotations

import random

import pytest

from sandbox.tidb_sim.packets import (
    AUTOCOMMIT,
    MAX_PACKET_PAYLOAD,
    MySqlCommand,
    eof,
    frame,
    frames,
    single_row_result,
)
from tests.support.migration.fault_arena import HELD_STEPS, VARIABLE_VALUE, FaultArenas, MigrationScenario
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.scripted_node import (
    CHECK_STATEMENT,
    OK_PACKET,
    GateAction,
    ScriptedNode,
    reset_connection,
)
from tests.support.module.envoy import with_timeout
from tests.support.waiting import (
    assert_never,
    assert_nothing_received,
    wait_until,
    wait_until_peer_blocked,
    wait_until_read,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
LONG = 20 * MIB
QUIT = frame(0, bytes((MySqlCommand.QUIT,)))
QUIET, LONG_UNREAD = 0.2, 3.5
"""Seconds in which nothing may happen; the latter are longer than a session waits after a failure."""


def serves(play: MigrationScenario, step: str) -> ScriptedNode:
    """The node that gets what the client sends in that step."""
    return play.new if step in HELD_STEPS and step != "undo" else play.old


async def leaves(play: MigrationScenario, way: str) -> None:
    """The client does so."""
    match way:
        case "client: FIN":
            play.client.writer.write_eof()
        case "client: RST":
            await reset_connection(
                play.client.writer.get_extra_info("socket"), play.client.writer.transport.abort
            )
        case "client: COM_QUIT":
            play.client.writer.write(QUIT)


ENDS = failure_cases("client", "FIN", "RST", "COM_QUIT")
AROUND = [
    (case, order) for case in ENDS for order in ("before", "after")[: 2 if case.step == "switch" else 1]
]


@pytest.mark.parametrize(("case", "order"), AROUND, ids=[f"{case} - {order}" for case, order in AROUND])
async def test_a_client_leaves(arenas: FaultArenas, case: FailureCase, order: str) -> None:
    """`order`: before or after the last answer that the move waits for."""
    async with arenas.scenario(case) as play:
        play.arena.ignored_nodes.add(play.old.name)
        gate = await play.reach_step(case.step)
        if order == "after":
            link = await gate.wait_reached()
            link.send(OK_PACKET)
            gate.proceed(GateAction.ALREADY_ANSWERED)
        await leaves(play, case.fault)
        gate.proceed()
        if case.fault != "client: RST":
            rest = await with_timeout(play.client.reader.read())
            assert case.step == "wait" or not rest
        await wait_until(lambda: not (play.old.open_connections or play.new.open_connections))
        if case.fault == "client: COM_QUIT":
            assert serves(play, case.step).quit_count == 1


@pytest.mark.parametrize("case", failure_cases("client", "pipelined commands"), ids=str)
async def test_a_client_sends_two_commands_at_once(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step)
        play.send("insert 5", CHECK_STATEMENT)
        if case.step in ("connect", "tls"):
            await answered(play, play.old, 5)
            gate.proceed()
        else:
            gate.proceed()
            if case.step == "wait":
                await play.expect_insert_ok(2)
            await answered(play, serves(play, case.step), 5)
        assert b"insert 5" in serves(play, case.step).statements
        await play.expect_outcome(case)
        assert sum(node.statements.count(b"insert 5") for node in (play.old, play.new)) == 1


async def answered(play: MigrationScenario, node: ScriptedNode, rows: int) -> None:
    """The answers to these two, from there."""
    await play.expect_insert_ok(rows)
    assert await play.read_row() == (VARIABLE_VALUE, str(rows), node.name)
    play.rows = -1


@pytest.mark.parametrize("case", failure_cases("client", "20 MiB statement"), ids=str)
async def test_a_client_sends_a_long_statement(arenas: FaultArenas, case: FailureCase) -> None:
    """In pieces, in the middle of which the move goes on."""
    dice = random.Random(case.step)
    statement = dice.randbytes(LONG)
    sent = frames(0, [bytes((MySqlCommand.QUERY,)) + statement]) + frame(0, b"\x03insert 6")
    around = (0, 4, 5, MAX_PACKET_PAYLOAD + 4, MAX_PACKET_PAYLOAD + 5, len(sent))
    goes = dice.choice((*around, dice.randrange(len(sent))))
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step)
        at = 0
        while at < len(sent):
            piece = dice.choice((1, 3, 4, 5, 1000, 1 << 16, 1 << 22))
            end = min(at + piece, goes if at < goes else len(sent))
            play.client.writer.write(sent[at:end])
            at = end
            if at >= goes:
                gate.proceed()
            # In other steps nobody reads before the gate is open.
            if (at >= goes or case.step in ("connect", "tls")) and dice.random() < 0.3:
                await wait_until_read(play.client.writer)
        gate.proceed()
        if case.step == "wait":
            await play.expect_insert_ok(2)
        size, node = await play.read_row()
        assert int(size) == LONG
        await play.expect_insert_ok(6)
        play.rows = 6
        if case.step in HELD_STEPS:
            assert node == serves(play, case.step).name
        await play.expect_outcome(case)
        assert sum(node.statements.count(statement[:199]) for node in (play.old, play.new)) == 1


def result(size: int) -> bytes:
    """A text result set of about so many bytes."""
    dice = random.Random(2)
    payloads = single_row_result([("c", "")], AUTOCOMMIT, deprecate_eof=False)[:3]
    payloads += [b"\xfa" + dice.randbytes(250) for _ in range(size // 255)]
    return frames(1, [*payloads, eof(AUTOCOMMIT)])


@pytest.mark.parametrize("case", failure_cases("client", "10 MiB result, unread"), ids=str)
async def test_a_client_does_not_read(arenas: FaultArenas, case: FailureCase) -> None:
    """Its session is left alone until it does."""
    answer = result(10 * MIB)
    async with arenas.scenario(case) as play:
        play.old.canned_answers[b"much"] = answer
        transport = play.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        if case.step == "wait":
            gate = play.old.hold_at("statement")
            play.send("much")
            await gate.wait_reached()
            play.drain()
            await wait_until(lambda: bool(play.new.connections))
        else:
            gate = await play.reach_step(case.step)
            play.send("much")
            await wait_until(lambda: b"much" in play.old.statements)
        gate.proceed()
        await wait_until_peer_blocked(play.client.writer)
        await assert_never(lambda: play.old.export_count > 0, QUIET)
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await with_timeout(play.client.reader.readexactly(len(answer))) == answer
        play.rows = -1
        await play.expect_outcome(case)
        await assert_nothing_received(play.client.reader, QUIET)
        assert play.old.statements.count(b"much") == 1


async def test_a_client_that_has_long_not_read_moves_as_soon_as_it_has(arenas: FaultArenas) -> None:
    """That it could not move meanwhile is no failure, for which it would have to wait."""
    answer = result(10 * MIB)
    async with (await arenas.arena_for("wait")).scenario("unread for long") as play:
        play.old.canned_answers[b"much"] = answer
        transport = play.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        play.send("much")
        await wait_until_peer_blocked(play.client.writer)
        play.drain()
        await assert_never(lambda: bool(play.new.connections or play.old.export_count), LONG_UNREAD)
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await with_timeout(play.client.reader.readexactly(len(answer))) == answer
        play.rows = -1
        await wait_until(play.new.migration_completed.is_set, 2.0)
        await play.expect_migrated()
