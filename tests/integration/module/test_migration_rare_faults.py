"""Moves that fail in rare ways, or twice, and sessions whose node stops at the wrong moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandbox.tidb_sim.greeting import OFFERED
from sandbox.tidb_sim.packets import Capability, err, frame
from tests.support.migration.fault_arena import DENIED, Arenas, Play
from tests.support.migration.fault_cases import WHY, Case, cases, table
from tests.support.migration.scripted_node import LET_IN, OK, Actor, Link, Next, exported
from tests.support.module.envoy import greets
from tests.support.waiting import until

module = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = frame(1, err(1064, "You have an error in your SQL syntax", "42000"))
GREETING = greets()
DETAILS: dict[str, tuple[str, bytes, bool, str]] = {
    "greets with less than was agreed": ("connect", greets(offered=Capability.PROTOCOL_41), False, "invalid"),
    "greets with half a greeting": ("connect", GREETING[:30], True, "unreachable"),
    "greets and says more": ("connect", GREETING + b"\0", False, "invalid"),
    "asks for another method": ("login", frame(2, b"\xfemysql_native_password\0salt\0"), False, "invalid"),
    "lets it in and says more": ("login", frame(2, LET_IN) + b"\x03\0\0\x01abc", False, "invalid"),
    "does not prepare": ("prepare", UNKNOWN, False, "not_restored"),
    "counts wrongly": ("states", frame(3, LET_IN), False, "invalid"),
    "gives half an answer": ("states", OK[:6], True, "unreachable"),
}
"""The step, what the target says there, whether it closes then, and why the session stays."""


@pytest.mark.parametrize("way", DETAILS)
@module
async def test_a_target_that_fails_costs_the_session_nothing(arenas: Arenas, way: str) -> None:
    step, said, closes, reason = DETAILS[way]
    async with (await arenas.of(step)).play(way) as play:
        if step == "prepare":
            gate = play.new.hold(step)
            await play.reach("login")
            play.gate.open()
        else:
            gate = await play.reach(step)
        link = await gate.here()
        link.send(said)
        if closes:
            await play.new.stop_listening()
            await link.fin()
        gate.open(Next.NOTHING)
        await play.stays(reason)


@pytest.mark.parametrize("early", [b"\x07", frame(2, b"\xfemysql_clear_password\0")])
@module
async def test_a_target_that_speaks_before_tls_gets_no_token(arenas: Arenas, early: bytes) -> None:
    """What no TLS protects may be anybody's."""
    async with (await arenas.of("tls")).play("speaks before TLS") as play:
        gate = await play.reach("connect")
        link = await gate.here()
        link.send(greets(offered=OFFERED | Capability.SSL) + early)
        gate.open(Next.NOTHING)
        await play.stays("invalid")
        assert play.old.exports == 0


@module
async def test_states_in_another_character_set_are_not_moved(arenas: Arenas) -> None:
    async with (await arenas.of("export")).play("another character set") as play:
        gate = await play.reach("export")
        (await gate.here()).send(exported(b'{"affected-rows":2,"x":"\xb9"}', b"token"))
        gate.open(Next.SAID)
        await play.stays("states")


@module
async def test_two_targets_fail_one_after_the_other(arenas: Arenas) -> None:
    """Then the first one has another chance."""
    async with (await arenas.of("login")).play("two failures", third=True) as play:
        refuses = play.third.hold("states")
        gate = await play.reach("login")
        (await gate.here()).send(DENIED)
        gate.open(Next.NOTHING)
        (await refuses.here()).send(UNKNOWN)
        refuses.open(Next.NOTHING)
        await play.moves()
        play.arena.expect(play.old, "denied", "stayed")
        play.arena.expect(play.old, "not_restored", "stayed")


@asynccontextmanager
async def unjudged(arenas: Arenas, what: str) -> AsyncIterator[Play]:
    """A session with another node to go to, whose moves may be counted in any way."""
    async with (await arenas.of("undo")).play(what, third=True) as play:
        play.arena.unjudged.add(play.old.name)
        yield play


async def end(link: Link, how: str) -> None:
    """The node ends this connection."""
    await (link.fin() if how == "FIN" else link.reset())


async def stop(node: Actor, link: Link, how: str) -> None:
    """The node stops listening, and ends this connection."""
    await node.stop_listening()
    await end(link, how)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_an_idle_session_whose_node_stops_is_restored_elsewhere(arenas: Arenas, how: str) -> None:
    """It was exported less than a minute ago, and has run nothing since."""
    async with unjudged(arenas, f"{how} when idle") as play:
        await stop(play.old, await play.fail_to_move(), how)
        await until(play.third.arrived.is_set, 5.0)
        await play.is_on(play.third)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_an_idle_session_whose_node_still_listens_was_killed(arenas: Arenas, how: str) -> None:
    """So it is not restored elsewhere, although its states are known."""
    async with unjudged(arenas, f"{how} by a KILL") as play:
        await end(await play.fail_to_move(), how)
        await play.ends()
        assert not play.third.arrived.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_states_from_before_a_statement_are_not_used(arenas: Arenas, how: str) -> None:
    async with unjudged(arenas, f"{how} behind a statement") as play:
        (await play.reach("undo")).open()
        play.ask("set @a = 8")
        await play.inserted(0)
        await stop(play.old, play.old.links[-1], how)
        await play.ends()
        assert not play.third.arrived.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_a_statement_is_never_executed_twice(arenas: Arenas, how: str) -> None:
    """Its node stops while it runs: nobody knows whether it was executed."""
    async with unjudged(arenas, f"{how} under a statement") as play:
        gate = await play.reach("undo")
        runs = play.old.hold("statement")
        gate.open()
        play.ask("insert 3")
        await stop(play.old, await runs.here(), how)
        runs.open(Next.NOTHING)
        await play.ends()
        assert b"insert 3" not in play.new.said + play.third.said


@pytest.mark.parametrize("third", [False, True], ids=["the same is tried again", "another is there"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_both_nodes_go_between_export_and_switch(arenas: Arenas, how: str, third: bool) -> None:
    async with (await arenas.of("login")).play(f"{how} of both", third=third) as play:
        play.arena.unjudged.add(play.old.name)
        gate = await play.reach("login")
        old, new = play.old.links[-1], await gate.here()
        await stop(play.old, old, how)
        if third:
            await play.new.stop_listening()
        await end(new, how)
        gate.open(Next.NOTHING)
        there = play.third if third else play.new
        await until(there.arrived.is_set, 5.0)
        await play.is_on(there)


def test_the_table_has_all_of_them() -> None:
    every: list[Case] = [case for side in ("target", "old node", "client", "Envoy") for case in cases(side)]
    told = "\n".join(table({(case.way, case.step): True for case in every}))
    assert "not run" not in told
    assert "FAILED" not in told
    assert len({(case.way, case.step) for case in every}) == len(every)
    assert all(f"- {letter}" in told for letter in WHY)
