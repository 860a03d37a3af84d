"""Moves that fail in rare ways, or twice, and sessions whose node stops at the wrong moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, err, frame
from tests.support.migration.fault_arena import LOGIN_DENIED, FaultArenas, MigrationScenario
from tests.support.migration.fault_cases import SKIP_REASONS, FailureCase, failure_cases, format_results
from tests.support.migration.scripted_node import (
    LOGIN_OK,
    OK_PACKET,
    GateAction,
    NodeConnection,
    ScriptedNode,
    session_states_result,
)
from tests.support.module.envoy import greeting_packet
from tests.support.waiting import wait_until

module = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = frame(1, err(1064, "You have an error in your SQL syntax", "42000"))
GREETING = greeting_packet()
DETAILS: dict[str, tuple[str, bytes, bool, str]] = {
    "greets with less than was agreed": (
        "connect",
        greeting_packet(offered=Capability.PROTOCOL_41),
        False,
        "invalid",
    ),
    "greets with half a greeting": ("connect", GREETING[:30], True, "unreachable"),
    "greets and says more": ("connect", GREETING + b"\0", False, "invalid"),
    "asks for another method": ("login", frame(2, b"\xfemysql_native_password\0salt\0"), False, "invalid"),
    "lets it in and says more": ("login", frame(2, LOGIN_OK) + b"\x03\0\0\x01abc", False, "invalid"),
    "does not prepare": ("prepare", UNKNOWN, False, "not_restored"),
    "counts wrongly": ("states", frame(3, LOGIN_OK), False, "invalid"),
    "gives half an answer": ("states", OK_PACKET[:6], True, "unreachable"),
}
"""The step, what the target says there, whether it closes then, and why the session stays."""


@pytest.mark.parametrize("way", DETAILS)
@module
async def test_a_target_that_fails_costs_the_session_nothing(arenas: FaultArenas, way: str) -> None:
    step, said, closes, reason = DETAILS[way]
    async with (await arenas.arena_for(step)).scenario(way) as play:
        if step == "prepare":
            gate = play.new.hold_at(step)
            await play.reach_step("login")
            play.gate.proceed()
        else:
            gate = await play.reach_step(step)
        link = await gate.wait_reached()
        link.send(said)
        if closes:
            await play.new.stop_listening()
            await link.send_fin()
        gate.proceed(GateAction.STAY_SILENT)
        await play.expect_stayed(reason)


@pytest.mark.parametrize("early", [b"\x07", frame(2, b"\xfemysql_clear_password\0")])
@module
async def test_a_target_that_speaks_before_tls_gets_no_token(arenas: FaultArenas, early: bytes) -> None:
    """What no TLS protects may be anybody's."""
    async with (await arenas.arena_for("tls")).scenario("speaks before TLS") as play:
        gate = await play.reach_step("connect")
        link = await gate.wait_reached()
        link.send(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL) + early)
        gate.proceed(GateAction.STAY_SILENT)
        await play.expect_stayed("invalid")
        assert play.old.export_count == 0


@module
async def test_states_in_another_character_set_are_not_moved(arenas: FaultArenas) -> None:
    async with (await arenas.arena_for("export")).scenario("another character set") as play:
        gate = await play.reach_step("export")
        (await gate.wait_reached()).send(session_states_result(b'{"affected-rows":2,"x":"\xb9"}', b"token"))
        gate.proceed(GateAction.ALREADY_ANSWERED)
        await play.expect_stayed("states")


@module
async def test_two_targets_fail_one_after_the_other(arenas: FaultArenas) -> None:
    """Then the first one has another chance."""
    async with (await arenas.arena_for("login")).scenario("two failures", third=True) as play:
        refuses = play.third.hold_at("states")
        gate = await play.reach_step("login")
        (await gate.wait_reached()).send(LOGIN_DENIED)
        gate.proceed(GateAction.STAY_SILENT)
        (await refuses.wait_reached()).send(UNKNOWN)
        refuses.proceed(GateAction.STAY_SILENT)
        await play.expect_migrated()
        play.arena.expect_migration(play.old, "denied", "stayed")
        play.arena.expect_migration(play.old, "not_restored", "stayed")


@asynccontextmanager
async def unjudged(arenas: FaultArenas, what: str) -> AsyncIterator[MigrationScenario]:
    """A session with another node to go to, whose moves may be counted in any way."""
    async with (await arenas.arena_for("undo")).scenario(what, third=True) as play:
        play.arena.ignored_nodes.add(play.old.name)
        yield play


async def end(link: NodeConnection, how: str) -> None:
    """The node ends this connection."""
    await (link.send_fin() if how == "FIN" else link.reset())


async def stop(node: ScriptedNode, link: NodeConnection, how: str) -> None:
    """The node stops listening, and ends this connection."""
    await node.stop_listening()
    await end(link, how)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_an_idle_session_whose_node_stops_is_restored_elsewhere(arenas: FaultArenas, how: str) -> None:
    """It was exported less than a minute ago, and has run nothing since."""
    async with unjudged(arenas, f"{how} when idle") as play:
        await stop(play.old, await play.fail_migration(), how)
        await wait_until(play.third.migration_completed.is_set, 5.0)
        await play.expect_on(play.third)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_an_idle_session_whose_node_still_listens_was_killed(arenas: FaultArenas, how: str) -> None:
    """So it is not restored elsewhere, although its states are known."""
    async with unjudged(arenas, f"{how} by a KILL") as play:
        await end(await play.fail_migration(), how)
        await play.expect_ended()
        assert not play.third.migration_completed.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_states_from_before_a_statement_are_not_used(arenas: FaultArenas, how: str) -> None:
    async with unjudged(arenas, f"{how} behind a statement") as play:
        (await play.reach_step("undo")).proceed()
        play.send("set @a = 8")
        await play.expect_insert_ok(0)
        await stop(play.old, play.old.connections[-1], how)
        await play.expect_ended()
        assert not play.third.migration_completed.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_a_statement_is_never_executed_twice(arenas: FaultArenas, how: str) -> None:
    """Its node stops while it runs: nobody knows whether it was executed."""
    async with unjudged(arenas, f"{how} under a statement") as play:
        gate = await play.reach_step("undo")
        runs = play.old.hold_at("statement")
        gate.proceed()
        play.send("insert 3")
        await stop(play.old, await runs.wait_reached(), how)
        runs.proceed(GateAction.STAY_SILENT)
        await play.expect_ended()
        assert b"insert 3" not in play.new.statements + play.third.statements


@pytest.mark.parametrize("third", [False, True], ids=["the same is tried again", "another is there"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
@module
async def test_both_nodes_go_between_export_and_switch(arenas: FaultArenas, how: str, third: bool) -> None:
    async with (await arenas.arena_for("login")).scenario(f"{how} of both", third=third) as play:
        play.arena.ignored_nodes.add(play.old.name)
        gate = await play.reach_step("login")
        old, new = play.old.connections[-1], await gate.wait_reached()
        await stop(play.old, old, how)
        if third:
            await play.new.stop_listening()
        await end(new, how)
        gate.proceed(GateAction.STAY_SILENT)
        there = play.third if third else play.new
        await wait_until(there.migration_completed.is_set, 5.0)
        await play.expect_on(there)


def test_the_table_has_all_of_them() -> None:
    every: list[FailureCase] = [
        case for side in ("target", "old node", "client", "Envoy") for case in failure_cases(side)
    ]
    told = "\n".join(format_results({(case.fault, case.step): True for case in every}))
    assert "not run" not in told
    assert "FAILED" not in told
    assert len({(case.fault, case.step) for case in every}) == len(every)
    assert all(f"- {letter}" in told for letter in SKIP_REASONS)
