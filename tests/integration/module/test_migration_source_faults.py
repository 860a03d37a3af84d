"""The node that a session leaves fails meanwhile: behind the export it is not needed any more."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import err, frame
from tests.support.migration.fault_arena import Arenas, Play
from tests.support.migration.fault_cases import Case, cases
from tests.support.migration.scripted_node import OK, STOPPING, Link, Next, exported
from tests.support.module.envoy import rest, within
from tests.support.waiting import nothing_comes, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATE, SOON = 0.2, 5.0
"""Seconds."""
LATER_THAN_AN_EXPORT_MAY_BE = 2.3
"""Seconds."""
BROKEN = b"\x03\0\0\x01abc"
OWN = ("wait", "export", "undo")
"""Steps in which the old node is asked something."""
REFUSED = frame(1, err(8146, "cannot migrate the current session: temporary tables", "HY000"))


async def breaks(play: Play, case: Case) -> None:
    """The old node does so. `play.old.links[-1]` is the session's."""
    link = play.old.links[-1]
    if case.way.startswith("old node: gone"):
        await play.old.stop_listening()
    match case.way.replace("gone, ", ""):
        case "old node: sends bytes":
            link.send(BROKEN if case.step in OWN else OK)
        case "old node: ERR 1053 and FIN":
            link.send(frame(1 if case.step in OWN else 0, STOPPING))
            await link.fin()
        case "old node: FIN":
            await link.fin()
        case "old node: RST":
            await link.reset()


async def switches(play: Play, case: Case, order: str) -> None:
    """That, and the target's last OK, in this order."""
    link: Link = await play.gate.here()
    if order == "before":
        await breaks(play, case)
    link.send(OK)
    play.gate.open(Next.SAID)
    if order == "after":
        await breaks(play, case)


HOW = ("ERR 1053 and FIN", "FIN", "RST")
BREAKS = cases("old node", "sends bytes", *HOW, *(f"gone, {how}" for how in HOW))


@pytest.mark.parametrize("case", [case for case in BREAKS if case.step not in ("switch", "undo")], ids=str)
async def test_the_old_node_breaks_off(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        await play.reach(case.step)
        await breaks(play, case)
        play.gate.open(Next.NOTHING if case.step in OWN else Next.ANSWER)
        if case.result == "served":
            assert await within(play.client.reader.readexactly(len(OK))) == OK
            await play.is_on(play.old)
            return
        says_why = case.way.endswith("ERR 1053 and FIN")
        if says_why and case.step == "wait":
            # The error is the statement's answer. Behind it the node may be asked for the states, before its
            # end is seen; then the client is told so once more.
            play.arena.unjudged.add(play.old.name)
            told = await rest(play.client)
            assert told.startswith(frame(1, STOPPING))
            assert told[4 + len(STOPPING) :][4:7] in (b"", STOPPING[:3])
            return
        if says_why and case.step == "export":
            play.arena.expect(play.old, "refused", "stayed")
        await play.comes_to(case)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("case", [case for case in BREAKS if case.step == "switch"], ids=str)
async def test_the_old_node_breaks_off_around_the_switch(arenas: Arenas, case: Case, order: str) -> None:
    async with arenas.play(case) as play:
        await play.reach("switch")
        if case.result == "ends":
            play.arena.unjudged.add(play.old.name)  # it may have moved before it ends
        await switches(play, case, order)
        await play.comes_to(case)


@pytest.mark.parametrize("case", [case for case in BREAKS if case.step == "undo"], ids=str)
async def test_the_old_node_breaks_off_when_the_session_was_to_stay(arenas: Arenas, case: Case) -> None:
    """Its states and a token are at hand, and there is another node."""
    async with arenas.play(case, third=True) as play:
        await play.reach("undo")
        play.arena.unjudged.add(play.old.name)
        await breaks(play, case)
        play.gate.open(Next.NOTHING)
        if case.result == "ends":
            await play.ends()
            return
        await until(play.third.arrived.is_set, SOON)
        await play.is_on(play.third)


@pytest.mark.parametrize("case", cases("old node", "byte by byte"), ids=str)
async def test_the_old_node_answers_byte_by_byte(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step, bytewise=True)
        gate.open()
        if case.step == "wait":
            await play.inserted(2)
        await play.comes_to(case)


@pytest.mark.parametrize("case", cases("old node", "late"), ids=str)
async def test_the_old_node_answers_late(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step)
        late = LATER_THAN_AN_EXPORT_MAY_BE if case.result == "slow" else LATE
        await nothing_comes(play.client.reader, late)
        gate.open()
        if case.step == "wait":
            await play.inserted(2)
        await play.comes_to(case)


LETS_NOT_GO = cases("old node", "ERR 8146", "has no certificate", "states nobody can read")


@pytest.mark.parametrize("case", LETS_NOT_GO, ids=str)
async def test_the_old_node_does_not_let_it_go(arenas: Arenas, case: Case) -> None:
    async with arenas.play(case) as play:
        gate = await play.reach(case.step)
        link = await gate.here()
        match case.way:
            case "old node: has no certificate":
                link.send(play.old.states(link, play.rows, None))
            case "old node: states nobody can read":
                link.rows = play.rows
                link.send(exported(b"[1]", b"token"))
            case _:
                link.rows = play.rows
                link.send(REFUSED)
        gate.open(Next.SAID)
        await play.comes_to(case)
