"""Client activity while its session migrates: nothing is lost, duplicated or reordered."""

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
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.fault_envoy import (
    CLIENT_PAUSED_STEPS,
    VARIABLE_VALUE,
    FaultEnvoys,
    MigrationScenario,
)
from tests.support.migration.scripted_node import (
    CHECK_STATEMENT,
    OK_PACKET,
    GateAction,
    ScriptedNode,
    reset_and_wait,
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
LONG_BYTES = 20 * MIB
QUIT = frame(0, bytes((MySqlCommand.QUIT,)))
QUIET_SECONDS, LONG_UNREAD_SECONDS = 0.2, 3.5
"""Seconds in which nothing may happen. The second value exceeds the retry delay after a failed migration."""


def receiving_node(scenario: MigrationScenario, step: str) -> ScriptedNode:
    """Return the node that receives the data that the client sends during this migration step."""
    return scenario.new if step in CLIENT_PAUSED_STEPS and step != "undo" else scenario.old


async def close_client(scenario: MigrationScenario, fault: str) -> None:
    match fault:
        case "client: FIN":
            scenario.client.writer.write_eof()
        case "client: RST":
            await reset_and_wait(
                scenario.client.writer.get_extra_info("socket"), scenario.client.writer.transport.abort
            )
        case "client: COM_QUIT":
            scenario.client.writer.write(QUIT)


CLOSE_CASES = failure_cases("client", "FIN", "RST", "COM_QUIT")
CLOSE_CASES_AND_ORDERS = [
    (case, order)
    for case in CLOSE_CASES
    for order in ("before", "after")[: 2 if case.step == "switch" else 1]
]


@pytest.mark.parametrize(
    ("case", "order"),
    CLOSE_CASES_AND_ORDERS,
    ids=[f"{case} - {order}" for case, order in CLOSE_CASES_AND_ORDERS],
)
async def test_client_disconnects_during_a_migration(
    fault_envoys: FaultEnvoys, case: FailureCase, order: str
) -> None:
    """`order`: whether the client disconnects before or after the target's last answer."""
    async with fault_envoys.scenario(case) as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step(case.step)
        if order == "after":
            link = await gate.wait_reached()
            link.send(OK_PACKET)
            gate.proceed(GateAction.TEST_ANSWERED)
        await close_client(scenario, case.fault)
        gate.proceed()
        if case.fault != "client: RST":
            received = await with_timeout(scenario.client.reader.read())
            assert case.step == "wait" or not received
        await wait_until(lambda: not (scenario.old.open_connections or scenario.new.open_connections))
        if case.fault == "client: COM_QUIT":
            assert receiving_node(scenario, case.step).quit_count == 1


@pytest.mark.parametrize("case", failure_cases("client", "pipelined commands"), ids=str)
async def test_pipelined_commands_are_answered_in_order(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        scenario.send("insert 5", CHECK_STATEMENT)
        if case.step in ("connect", "tls"):
            await expect_two_answers(scenario, scenario.old, 5)
            gate.proceed()
        else:
            gate.proceed()
            if case.step == "wait":
                await scenario.expect_insert_ok(2)
            await expect_two_answers(scenario, receiving_node(scenario, case.step), 5)
        assert b"insert 5" in receiving_node(scenario, case.step).statements
        await scenario.expect_outcome(case)
        assert sum(node.statements.count(b"insert 5") for node in (scenario.old, scenario.new)) == 1


async def expect_two_answers(scenario: MigrationScenario, node: ScriptedNode, rows: int) -> None:
    """Check the answers to an insert and to CHECK_STATEMENT. The second one must come from `node`."""
    await scenario.expect_insert_ok(rows)
    assert await scenario.read_row() == (VARIABLE_VALUE, str(rows), node.name)
    scenario.rows = -1


@pytest.mark.parametrize("case", failure_cases("client", "20 MiB statement"), ids=str)
async def test_long_statement_runs_exactly_once(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    """The statement arrives in pieces, and the migration continues between two of them."""
    rng = random.Random(case.step)
    statement = rng.randbytes(LONG_BYTES)
    packets = frames(0, [bytes((MySqlCommand.QUERY,)) + statement]) + frame(0, b"\x03insert 6")
    boundaries = (0, 4, 5, MAX_PACKET_PAYLOAD + 4, MAX_PACKET_PAYLOAD + 5, len(packets))
    proceed_at = rng.choice((*boundaries, rng.randrange(len(packets))))
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step)
        offset = 0
        while offset < len(packets):
            piece = rng.choice((1, 3, 4, 5, 1000, 1 << 16, 1 << 22))
            end = min(offset + piece, proceed_at if offset < proceed_at else len(packets))
            scenario.client.writer.write(packets[offset:end])
            offset = end
            if offset >= proceed_at:
                gate.proceed()
            # Before `gate.proceed()`, Envoy reads from the client only in the steps `connect` and `tls`.
            if (offset >= proceed_at or case.step in ("connect", "tls")) and rng.random() < 0.3:
                await wait_until_read(scenario.client.writer)
        gate.proceed()
        if case.step == "wait":
            await scenario.expect_insert_ok(2)
        size, node = await scenario.read_row()
        assert int(size) == LONG_BYTES
        await scenario.expect_insert_ok(6)
        scenario.rows = 6
        if case.step in CLIENT_PAUSED_STEPS:
            assert node == receiving_node(scenario, case.step).name
        await scenario.expect_outcome(case)
        assert sum(node.statements.count(statement[:199]) for node in (scenario.old, scenario.new)) == 1


def result(size: int) -> bytes:
    """Return a text result set of about `size` bytes."""
    rng = random.Random(2)
    payloads = single_row_result([("c", "")], AUTOCOMMIT, deprecate_eof=False)[:3]
    payloads += [b"\xfa" + rng.randbytes(250) for _ in range(size // 255)]
    return frames(1, [*payloads, eof(AUTOCOMMIT)])


@pytest.mark.parametrize("case", failure_cases("client", "10 MiB result, unread"), ids=str)
async def test_unread_result_delays_the_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    """The module starts the export only after the client has read the whole result."""
    answer = result(10 * MIB)
    async with fault_envoys.scenario(case) as scenario:
        scenario.old.canned_answers[b"much"] = answer
        transport = scenario.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        if case.step == "wait":
            gate = scenario.old.pause_at("statement")
            scenario.send("much")
            await gate.wait_reached()
            scenario.drain()
            await wait_until(lambda: bool(scenario.new.connections))
        else:
            gate = await scenario.reach_step(case.step)
            scenario.send("much")
            await wait_until(lambda: b"much" in scenario.old.statements)
        gate.proceed()
        await wait_until_peer_blocked(scenario.client.writer)
        await assert_never(lambda: scenario.old.export_count > 0, QUIET_SECONDS)
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await with_timeout(scenario.client.reader.readexactly(len(answer))) == answer
        scenario.rows = -1
        await scenario.expect_outcome(case)
        await assert_nothing_received(scenario.client.reader, QUIET_SECONDS)
        assert scenario.old.statements.count(b"much") == 1


async def test_session_migrates_as_soon_as_the_client_has_read(fault_envoys: FaultEnvoys) -> None:
    """The module does not count the wait for the client as a failed migration, so no retry delay applies."""
    answer = result(10 * MIB)
    async with (await fault_envoys.envoy_for("wait")).scenario("unread for long") as scenario:
        scenario.old.canned_answers[b"much"] = answer
        transport = scenario.client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        scenario.send("much")
        await wait_until_peer_blocked(scenario.client.writer)
        scenario.drain()
        await assert_never(
            lambda: bool(scenario.new.connections or scenario.old.export_count), LONG_UNREAD_SECONDS
        )
        transport.resume_reading()  # type: ignore[attr-defined]
        assert await with_timeout(scenario.client.reader.readexactly(len(answer))) == answer
        scenario.rows = -1
        await wait_until(scenario.new.migration_completed.is_set, 2.0)
        await scenario.expect_migrated()
