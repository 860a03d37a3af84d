"""The target of a move fails, in each step and in each way: the session goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import err, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import full_backlog, refusing_port
from tests.support.migration.fault_arena import LOGIN_DENIED, FaultArenas, MigrationScenario, node_tls_context
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.fleet import NodeSpec, run_fleet
from tests.support.migration.scripted_node import OK_PACKET, SHUTDOWN_ERROR, GateAction, NodeConnection
from tests.support.module.bootstrap import Host
from tests.support.waiting import assert_nothing_received, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATE = 0.2
"""Seconds; what is a handshake's time over a bad line."""
BROKEN = b"\x03\0\0\x01abc"
ERRORS = {
    "connect": frame(0, err(1040, "Too many connections", None)),
    "tls": frame(1, err(1040, "Too many connections", None)),
    "wait": frame(1, SHUTDOWN_ERROR),
    "export": frame(1, SHUTDOWN_ERROR),
    "login": LOGIN_DENIED,
    "states": frame(1, err(1064, "You have an error in your SQL syntax", "42000")),
}
GARBAGE = {"connect": b"HTTP/1.1 400 Bad Request\r\n\r\n", "switch": OK_PACKET + BROKEN}


async def goes_on(play: MigrationScenario, step: str) -> None:
    """The target has failed; all others go on."""
    if step == "wait":
        await play.wait_target_released()
    play.gate.proceed(
        GateAction.STAY_SILENT if step in ("connect", "tls", "login", "states") else GateAction.ANSWER
    )
    if step == "wait":
        await play.expect_insert_ok(2)


async def fails(play: MigrationScenario, case: FailureCase) -> None:
    """In that step, and so."""
    link = play.new.connections[-1]
    if case.step == "switch":
        await dies(play, link, case.fault)
        return
    match case.fault:
        case "target: FIN":
            await link.send_fin()
        case "target: gone" | "target: gone, another is there":
            await play.new.stop_listening()
            await link.send_fin()
        case "target: RST":
            await link.reset()
        case "target: ERR":
            link.send(ERRORS[case.step])
        case "target: garbage":
            link.send(GARBAGE.get(case.step, BROKEN))
    await goes_on(play, case.step)


async def dies(play: MigrationScenario, link: NodeConnection, way: str) -> None:
    """Behind its last OK."""
    if way == "target: garbage":
        link.send(GARBAGE["switch"])
    else:
        if way.startswith("target: gone"):
            await play.new.stop_listening()
        link.send(OK_PACKET)
        play.arena.expect_migration(play.old, "ok", "moved")
        match way:
            case "target: RST":
                await link.wait_until_read()
                await link.reset()
            case "target: ERR":
                await link.wait_until_read()
                link.send(frame(0, SHUTDOWN_ERROR))
                await link.send_fin()
            case _:
                await link.send_fin()
    play.gate.proceed(GateAction.ALREADY_ANSWERED)


WAYS = [*failure_cases("target", "FIN", "RST", "gone", "ERR", "garbage")]


@pytest.mark.parametrize("case", WAYS, ids=str)
async def test_a_target_breaks_off(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        await play.reach_step(case.step)
        await fails(play, case)
        await play.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("target", "gone, another is there"), ids=str)
async def test_another_target_is_taken(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case, third=True) as play:
        await play.reach_step(case.step)
        await fails(play, case)
        await within_third(play, case.step)


async def within_third(play: MigrationScenario, step: str) -> None:
    await wait_until(play.third.migration_completed.is_set, 5.0)
    await play.expect_on(play.third)
    assert len(play.new.connections) == 1
    if step != "switch":
        play.arena.expect_migration(play.old, "unreachable", "stayed")
        play.arena.expect_migration(play.old, "ok", "moved")


@pytest.mark.parametrize("case", failure_cases("target", "refused", "says nothing"), ids=str)
async def test_a_target_does_not_answer(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        if case.step == "connect":
            with refusing_port() if case.fault == "target: refused" else full_backlog() as endpoint:
                play.new.endpoint = endpoint
                play.drain()
                await play.wait_failure_counted(case.reason)
                play.undrain()
                await play.expect_on(play.old)
                play.arena.expect_failures(play.old, case.reason)
            return
        gate = await play.reach_step(case.step)
        gate.proceed(GateAction.STAY_SILENT)
        await play.expect_outcome(case)


async def test_a_target_accepts_and_does_not_greet(arenas: FaultArenas) -> None:
    async with (await arenas.arena_for("connect")).scenario("no greeting") as play:
        gate = await play.reach_step("connect")
        gate.proceed(GateAction.STAY_SILENT)
        await play.expect_stayed("slow")


@pytest.mark.parametrize("case", failure_cases("target", "byte by byte, late"), ids=str)
async def test_a_target_answers_late(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step, bytewise=case.step != "tls")
        if case.step == "tls":
            await assert_nothing_received(play.client.reader, LATE)
        gate.proceed()
        await play.expect_outcome(case)


async def test_a_target_changes_its_priority(arenas: FaultArenas) -> None:
    """It is not one that sessions are to leave, not even for a moment."""
    async with (await arenas.arena_for("login")).scenario("another priority") as play:
        gate = await play.reach_step("login")
        new = Host(play.new.endpoint, play.new.name, priority=1)
        play.arena.publish(Host(play.old.endpoint, play.old.name, state="draining"), new)

        async def is_known() -> bool:
            return (await play.arena.proxy.hosts("tidb"))[new.endpoint].get("priority") == 1

        await wait_until(is_known)
        gate.proceed()
        await play.expect_migrated()


@pytest.mark.parametrize("case", failure_cases("target", "wrong certificate"), ids=str)
async def test_a_target_has_a_certificate_of_somebody_else(
    tmp_path: Path, arenas: FaultArenas, case: FailureCase
) -> None:
    async with arenas.scenario(case) as play:
        play.new.tls = node_tls_context(PemFiles.create(tmp_path))
        await play.reach_step("connect")
        play.gate.proceed()
        await play.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("target", "dies under a statement"), ids=str)
async def test_a_target_dies_under_the_first_statement(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        play.send("insert 3")
        await play.expect_insert_ok(3)
        gate = await play.reach_step(case.step)
        play.send("insert 4")
        runs = play.new.hold_at("statement")
        gate.proceed()
        await (await runs.wait_reached()).reset()
        runs.proceed(GateAction.STAY_SILENT)
        await play.expect_outcome(case)
        play.arena.expect_migration(play.old, "ok", "moved")
        assert play.old.statements[-1] == b"insert 3"


REAL = failure_cases("target", "expired token", "older, refuses states")


@pytest.mark.parametrize("case", REAL, ids=str)
async def test_a_target_does_not_let_it_in(
    tmp_path: Path, mariadb: MariaDb, database: str, case: FailureCase
) -> None:
    """With a stand-in for TiDB, which checks what it is given."""
    wrong = (
        MigrationRules(clock_skew_seconds=120)
        if case.fault == "target: expired token"
        else MigrationRules(rejects_set_states=True)
    )
    made = [NodeSpec(MigrationRules(show_changes_row_count=True)), NodeSpec(wrong)]
    async with run_fleet(tmp_path, mariadb, specs=made, drained=[1]) as nodes:
        wire = await nodes.connect_answer_client(database=database)
        await wire.query("create table t (id int)")
        await wire.query("set @a = 7")
        await wire.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.wait_stayed(case.reason)
        assert await wire.query_row("select @a, row_count(), database()") == (b"7", b"2", database.encode())
        await nodes.wait_session_counts(1, 0)
        if case.fault == "target: expired token":
            assert all("it has expired" in what for what in nodes.pop_violations())
