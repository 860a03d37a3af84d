"""The source node of a migration fails. After the export the migration does not need the source any more."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import err, frame
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.fault_envoy import FaultEnvoys, MigrationScenario
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

LATE_SECONDS, RESTORE_TIMEOUT_SECONDS = 0.2, 5.0
LONGER_THAN_EXPORT_TIMEOUT_SECONDS = 2.3
INVALID_PACKET = b"\x03\0\0\x01abc"
OLD_NODE_STEPS = ("wait", "export", "undo")
"""Steps in which the old node receives a request."""
EXPORT_REFUSED = frame(1, err(8146, "cannot migrate the current session: temporary tables", "HY000"))


async def fail_old_node(scenario: MigrationScenario, case: FailureCase) -> None:
    """Make the old node fail as `case.fault` says. The session uses the node's last connection."""
    link = scenario.old.connections[-1]
    if case.fault.startswith("old node: unreachable"):
        await scenario.old.stop_listening()
    match case.fault.replace("unreachable, ", ""):
        case "old node: sends bytes":
            link.send(INVALID_PACKET if case.step in OLD_NODE_STEPS else OK_PACKET)
        case "old node: ERR 1053 and FIN":
            link.send(frame(1 if case.step in OLD_NODE_STEPS else 0, SHUTDOWN_ERROR))
            await link.send_fin()
        case "old node: FIN":
            await link.send_fin()
        case "old node: RST":
            await link.reset()


async def switch_and_fail(scenario: MigrationScenario, case: FailureCase, order: str) -> None:
    """Make the old node fail before or after the target's last OK, depending on `order`."""
    link: NodeConnection = await scenario.gate.wait_reached()
    if order == "before":
        await fail_old_node(scenario, case)
    link.send(OK_PACKET)
    scenario.gate.proceed(GateAction.TEST_ANSWERED)
    if order == "after":
        await fail_old_node(scenario, case)


CLOSE_KINDS = ("ERR 1053 and FIN", "FIN", "RST")
CLOSE_CASES = failure_cases(
    "old node", "sends bytes", *CLOSE_KINDS, *(f"unreachable, {kind}" for kind in CLOSE_KINDS)
)


@pytest.mark.parametrize(
    "case", [case for case in CLOSE_CASES if case.step not in ("switch", "undo")], ids=str
)
async def test_source_fails_during_a_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        await scenario.reach_step(case.step)
        await fail_old_node(scenario, case)
        scenario.gate.proceed(GateAction.SEND_NOTHING if case.step in OLD_NODE_STEPS else GateAction.ANSWER)
        if case.result == "served":
            assert await with_timeout(scenario.client.reader.readexactly(len(OK_PACKET))) == OK_PACKET
            await scenario.expect_on(scenario.old)
            return
        sends_error = case.fault.endswith("ERR 1053 and FIN")
        if sends_error and case.step == "wait":
            # The error is the statement's answer. If Envoy requests the export before it sees the FIN, the
            # client receives the error twice.
            scenario.envoy.ignored_nodes.add(scenario.old.name)
            received = await read_to_end(scenario.client)
            assert received.startswith(frame(1, SHUTDOWN_ERROR))
            assert received[4 + len(SHUTDOWN_ERROR) :][4:7] in (b"", SHUTDOWN_ERROR[:3])
            return
        if sends_error and case.step == "export":
            scenario.envoy.expect_migration(scenario.old, "refused", "stayed")
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("case", [case for case in CLOSE_CASES if case.step == "switch"], ids=str)
async def test_source_fails_around_the_switch(
    fault_envoys: FaultEnvoys, case: FailureCase, order: str
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        await scenario.reach_step("switch")
        if case.result == "ends":
            scenario.envoy.ignored_nodes.add(scenario.old.name)  # the session may migrate before it ends
        await switch_and_fail(scenario, case, order)
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", [case for case in CLOSE_CASES if case.step == "undo"], ids=str)
async def test_source_fails_after_a_failed_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    """Envoy can restore the session on a third node, as it has saved the session's states and a token."""
    async with fault_envoys.scenario(case, third=True) as scenario:
        await scenario.reach_step("undo")
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        await fail_old_node(scenario, case)
        scenario.gate.proceed(GateAction.SEND_NOTHING)
        if case.result == "ends":
            await scenario.expect_ended()
            return
        await wait_until(scenario.third.migration_completed.is_set, RESTORE_TIMEOUT_SECONDS)
        await scenario.expect_on(scenario.third)


@pytest.mark.parametrize("case", failure_cases("old node", "byte by byte"), ids=str)
async def test_session_migrates_if_the_source_answers_byte_by_byte(
    fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step, bytewise=True)
        gate.proceed()
        if case.step == "wait":
            await scenario.expect_insert_ok(2)
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("old node", "late"), ids=str)
async def test_session_migrates_or_stays_if_the_source_answers_late(
    fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        delay = LONGER_THAN_EXPORT_TIMEOUT_SECONDS if case.result == "slow" else LATE_SECONDS
        await assert_nothing_received(scenario.client.reader, delay)
        gate.proceed()
        if case.step == "wait":
            await scenario.expect_insert_ok(2)
        await scenario.expect_outcome(case)


EXPORT_FAULTS = failure_cases("old node", "ERR 8146", "has no certificate", "unreadable states")


@pytest.mark.parametrize("case", EXPORT_FAULTS, ids=str)
async def test_session_stays_if_the_source_cannot_export(
    fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        link = await gate.wait_reached()
        match case.fault:
            case "old node: has no certificate":
                link.send(scenario.old.states_result(link, scenario.rows, None))
            case "old node: unreadable states":
                link.row_count = scenario.rows
                link.send(session_states_result(b"[1]", b"token"))
            case _:
                link.row_count = scenario.rows
                link.send(EXPORT_REFUSED)
        gate.proceed(GateAction.TEST_ANSWERED)
        await scenario.expect_outcome(case)
