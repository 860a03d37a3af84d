"""The node that a session leaves fails meanwhile: behind the export it is not needed any more."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import err, frame
from tests.support.migration.fault_arena import FaultArenas, MigrationScenario
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.scripted_node import (
    OK_PACKET,
    SHUTDOWN_ERROR,
    GateAction,
    NodeConnection,
    session_states_result,
)
from tests.support.module.envoy import read_to_end, with_timeout
from tests.support.waiting import assert_nothing_received, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATE, SOON = 0.2, 5.0
"""Seconds."""
LATER_THAN_AN_EXPORT_MAY_BE = 2.3
"""Seconds."""
BROKEN = b"\x03\0\0\x01abc"
OWN = ("wait", "export", "undo")
"""Steps in which the old node is asked something."""
REFUSED = frame(1, err(8146, "cannot migrate the current session: temporary tables", "HY000"))


async def breaks(play: MigrationScenario, case: FailureCase) -> None:
    """The old node does so. `play.old.links[-1]` is the session's."""
    link = play.old.connections[-1]
    if case.fault.startswith("old node: gone"):
        await play.old.stop_listening()
    match case.fault.replace("gone, ", ""):
        case "old node: sends bytes":
            link.send(BROKEN if case.step in OWN else OK_PACKET)
        case "old node: ERR 1053 and FIN":
            link.send(frame(1 if case.step in OWN else 0, SHUTDOWN_ERROR))
            await link.send_fin()
        case "old node: FIN":
            await link.send_fin()
        case "old node: RST":
            await link.reset()


async def switches(play: MigrationScenario, case: FailureCase, order: str) -> None:
    """That, and the target's last OK, in this order."""
    link: NodeConnection = await play.gate.wait_reached()
    if order == "before":
        await breaks(play, case)
    link.send(OK_PACKET)
    play.gate.proceed(GateAction.ALREADY_ANSWERED)
    if order == "after":
        await breaks(play, case)


HOW = ("ERR 1053 and FIN", "FIN", "RST")
BREAKS = failure_cases("old node", "sends bytes", *HOW, *(f"gone, {how}" for how in HOW))


@pytest.mark.parametrize("case", [case for case in BREAKS if case.step not in ("switch", "undo")], ids=str)
async def test_the_old_node_breaks_off(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        await play.reach_step(case.step)
        await breaks(play, case)
        play.gate.proceed(GateAction.STAY_SILENT if case.step in OWN else GateAction.ANSWER)
        if case.result == "served":
            assert await with_timeout(play.client.reader.readexactly(len(OK_PACKET))) == OK_PACKET
            await play.expect_on(play.old)
            return
        says_why = case.fault.endswith("ERR 1053 and FIN")
        if says_why and case.step == "wait":
            # The error is the statement's answer. Behind it the node may be asked for the states, before its
            # end is seen; then the client is told so once more.
            play.arena.ignored_nodes.add(play.old.name)
            told = await read_to_end(play.client)
            assert told.startswith(frame(1, SHUTDOWN_ERROR))
            assert told[4 + len(SHUTDOWN_ERROR) :][4:7] in (b"", SHUTDOWN_ERROR[:3])
            return
        if says_why and case.step == "export":
            play.arena.expect_migration(play.old, "refused", "stayed")
        await play.expect_outcome(case)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("case", [case for case in BREAKS if case.step == "switch"], ids=str)
async def test_the_old_node_breaks_off_around_the_switch(
    arenas: FaultArenas, case: FailureCase, order: str
) -> None:
    async with arenas.scenario(case) as play:
        await play.reach_step("switch")
        if case.result == "ends":
            play.arena.ignored_nodes.add(play.old.name)  # it may have moved before it ends
        await switches(play, case, order)
        await play.expect_outcome(case)


@pytest.mark.parametrize("case", [case for case in BREAKS if case.step == "undo"], ids=str)
async def test_the_old_node_breaks_off_when_the_session_was_to_stay(
    arenas: FaultArenas, case: FailureCase
) -> None:
    """Its states and a token are at hand, and there is another node."""
    async with arenas.scenario(case, third=True) as play:
        await play.reach_step("undo")
        play.arena.ignored_nodes.add(play.old.name)
        await breaks(play, case)
        play.gate.proceed(GateAction.STAY_SILENT)
        if case.result == "ends":
            await play.expect_ended()
            return
        await wait_until(play.third.migration_completed.is_set, SOON)
        await play.expect_on(play.third)


@pytest.mark.parametrize("case", failure_cases("old node", "byte by byte"), ids=str)
async def test_the_old_node_answers_byte_by_byte(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step, bytewise=True)
        gate.proceed()
        if case.step == "wait":
            await play.expect_insert_ok(2)
        await play.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("old node", "late"), ids=str)
async def test_the_old_node_answers_late(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step)
        late = LATER_THAN_AN_EXPORT_MAY_BE if case.result == "slow" else LATE
        await assert_nothing_received(play.client.reader, late)
        gate.proceed()
        if case.step == "wait":
            await play.expect_insert_ok(2)
        await play.expect_outcome(case)


LETS_NOT_GO = failure_cases("old node", "ERR 8146", "has no certificate", "states nobody can read")


@pytest.mark.parametrize("case", LETS_NOT_GO, ids=str)
async def test_the_old_node_does_not_let_it_go(arenas: FaultArenas, case: FailureCase) -> None:
    async with arenas.scenario(case) as play:
        gate = await play.reach_step(case.step)
        link = await gate.wait_reached()
        match case.fault:
            case "old node: has no certificate":
                link.send(play.old.states_result(link, play.rows, None))
            case "old node: states nobody can read":
                link.row_count = play.rows
                link.send(session_states_result(b"[1]", b"token"))
            case _:
                link.row_count = play.rows
                link.send(REFUSED)
        gate.proceed(GateAction.ALREADY_ANSWERED)
        await play.expect_outcome(case)
