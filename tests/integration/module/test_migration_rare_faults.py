"""Migrations that fail in rare ways or twice, and nodes that stop after an export or during an idle phase."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES
from sandbox.tidb_sim.packets import Capability, err, frame
from tests.support.migration.fault_cases import SKIP_REASONS, FailureCase, failure_cases, format_results
from tests.support.migration.fault_envoy import LOGIN_DENIED, FaultEnvoys, MigrationScenario
from tests.support.migration.scripted_node import (
    LOGIN_OK,
    OK_PACKET,
    GateAction,
    NodeConnection,
    ScriptedNode,
    session_states_result,
)
from tests.support.module.envoy import greeting_packet
from tests.support.suspension import suspended
from tests.support.waiting import wait_until

in_module = pytest.mark.asyncio(loop_scope="module")

SYNTAX_ERROR = frame(1, err(1064, "You have an error in your SQL syntax", "42000"))
GREETING = greeting_packet()
TARGET_FAULTS: dict[str, tuple[str, bytes, bool, str]] = {
    "greets with fewer capabilities": (
        "connect",
        greeting_packet(offered=Capability.PROTOCOL_41),
        False,
        "invalid",
    ),
    "greets with half a greeting": ("connect", GREETING[:30], True, "unreachable"),
    "sends bytes after the greeting": ("connect", GREETING + b"\0", False, "invalid"),
    "requests another auth method": (
        "login",
        frame(2, b"\xfemysql_native_password\0salt\0"),
        False,
        "invalid",
    ),
    "sends bytes after the login": ("login", frame(2, LOGIN_OK) + b"\x03\0\0\x01abc", False, "invalid"),
    "rejects a prepare": ("prepare", SYNTAX_ERROR, False, "not_restored"),
    "sends a wrong sequence number": ("states", frame(3, LOGIN_OK), False, "invalid"),
    "sends half an answer": ("states", OK_PACKET[:6], True, "unreachable"),
}
"""For each fault: the migration step, the bytes that the target sends in this step, whether the target then
closes the connection, and the label `reason` of the metric `migrations`."""


@pytest.mark.parametrize("fault", TARGET_FAULTS)
@in_module
async def test_session_stays_when_the_target_fails(fault_envoys: FaultEnvoys, fault: str) -> None:
    step, data, closes, reason = TARGET_FAULTS[fault]
    async with (await fault_envoys.envoy_for(step)).scenario(fault) as scenario:
        if step == "prepare":
            gate = scenario.new.pause_at(step)
            await scenario.reach_step("login")
            scenario.gate.proceed()
        else:
            gate = await scenario.reach_step(step)
        link = await gate.wait_reached()
        link.send(data)
        if closes:
            await scenario.new.stop_listening()
            await link.send_fin()
        gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_stayed(reason)


@pytest.mark.parametrize("early_bytes", [b"\x07", frame(2, b"\xfemysql_clear_password\0")])
@in_module
async def test_target_that_sends_bytes_before_tls_receives_no_token(
    fault_envoys: FaultEnvoys, early_bytes: bytes
) -> None:
    """Bytes outside TLS may come from an attacker."""
    async with (await fault_envoys.envoy_for("tls")).scenario("speaks before TLS") as scenario:
        gate = await scenario.reach_step("connect")
        link = await gate.wait_reached()
        link.send(greeting_packet(offered=OFFERED_CAPABILITIES | Capability.SSL) + early_bytes)
        gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_stayed("invalid")
        assert scenario.old.export_count == 0


@in_module
async def test_states_in_another_character_set_are_not_migrated(fault_envoys: FaultEnvoys) -> None:
    async with (await fault_envoys.envoy_for("export")).scenario("another character set") as scenario:
        gate = await scenario.reach_step("export")
        (await gate.wait_reached()).send(session_states_result(b'{"affected-rows":2,"x":"\xb9"}', b"token"))
        gate.proceed(GateAction.TEST_ANSWERED)
        await scenario.expect_stayed("states")


@in_module
async def test_session_migrates_after_two_targets_failed(fault_envoys: FaultEnvoys) -> None:
    """After both targets have failed, Envoy successfully retries the first one."""
    async with (await fault_envoys.envoy_for("login")).scenario("two failures", third=True) as scenario:
        states_gate = scenario.third.pause_at("states")
        gate = await scenario.reach_step("login")
        (await gate.wait_reached()).send(LOGIN_DENIED)
        gate.proceed(GateAction.SEND_NOTHING)
        (await states_gate.wait_reached()).send(SYNTAX_ERROR)
        states_gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_migrated()
        scenario.envoy.expect_migration(scenario.old, "denied", "stayed")
        scenario.envoy.expect_migration(scenario.old, "not_restored", "stayed")


@asynccontextmanager
async def scenario_with_uncounted_migrations(
    fault_envoys: FaultEnvoys, description: str
) -> AsyncIterator[MigrationScenario]:
    """Run a scenario with a third node. Do not check the counters of migrations at its end."""
    async with (await fault_envoys.envoy_for("undo")).scenario(description, third=True) as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        yield scenario


async def send_fin_or_reset(link: NodeConnection, how: str) -> None:
    await (link.send_fin() if how == "FIN" else link.reset())


async def stop(node: ScriptedNode, link: NodeConnection, how: str) -> None:
    await node.stop_listening()
    await send_fin_or_reset(link, how)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@in_module
async def test_idle_session_is_restored_when_its_node_stops(fault_envoys: FaultEnvoys, how: str) -> None:
    """Envoy has just saved the session's states, and the session has run no statement since then."""
    async with scenario_with_uncounted_migrations(fault_envoys, f"{how} when idle") as scenario:
        await stop(scenario.old, await scenario.fail_migration(), how)
        await wait_until(scenario.third.migration_completed.is_set, 5.0)
        await scenario.expect_on(scenario.third)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@in_module
async def test_idle_session_is_not_restored_when_its_node_still_listens(
    fault_envoys: FaultEnvoys, how: str
) -> None:
    """If the node still listens, Envoy assumes that a KILL closed the connection, so the session must end."""
    async with scenario_with_uncounted_migrations(fault_envoys, f"{how} by a KILL") as scenario:
        await send_fin_or_reset(await scenario.fail_migration(), how)
        await scenario.expect_ended()
        assert not scenario.third.migration_completed.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@in_module
async def test_states_from_before_a_statement_are_not_restored(fault_envoys: FaultEnvoys, how: str) -> None:
    async with scenario_with_uncounted_migrations(fault_envoys, f"{how} behind a statement") as scenario:
        (await scenario.reach_step("undo")).proceed()
        scenario.send("set @a = 8")
        await scenario.expect_insert_ok(0)
        await stop(scenario.old, scenario.old.connections[-1], how)
        await scenario.expect_ended()
        assert not scenario.third.migration_completed.is_set()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@in_module
async def test_statement_is_never_executed_twice(fault_envoys: FaultEnvoys, how: str) -> None:
    """If the node stops while a statement runs, it is unknown whether the statement was executed."""
    async with scenario_with_uncounted_migrations(fault_envoys, f"{how} under a statement") as scenario:
        gate = await scenario.reach_step("undo")
        statement_gate = scenario.old.pause_at("statement")
        gate.proceed()
        scenario.send("insert 3")
        await stop(scenario.old, await statement_gate.wait_reached(), how)
        statement_gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_ended()
        assert b"insert 3" not in scenario.new.statements + scenario.third.statements


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("third", [False, True], ids=["same node", "third node"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
@in_module
async def test_session_is_restored_when_both_nodes_stop_after_the_export(
    fault_envoys: FaultEnvoys, how: str, third: bool, together: bool
) -> None:
    """`together`: Envoy receives both events at once: it loses the new node while it probes the old one."""
    async with (await fault_envoys.envoy_for("login")).scenario(f"{how} of both", third=third) as scenario:
        scenario.envoy.ignored_nodes.add(scenario.old.name)
        gate = await scenario.reach_step("login")
        old, new = scenario.old.connections[-1], await gate.wait_reached()
        async with suspended(scenario.envoy.proxy.pid) if together else nullcontext():
            await stop(scenario.old, old, how)
            if third:
                await scenario.new.stop_listening()
            await send_fin_or_reset(new, how)
        gate.proceed(GateAction.SEND_NOTHING)
        target = scenario.third if third else scenario.new
        await wait_until(target.migration_completed.is_set, 5.0)
        await scenario.expect_on(target)


def test_results_table_lists_all_fault_cases() -> None:
    cases: list[FailureCase] = [
        case for side in ("target", "old node", "client", "Envoy") for case in failure_cases(side)
    ]
    table = "\n".join(format_results({(case.fault, case.step): True for case in cases}))
    assert "not run" not in table
    assert "FAILED" not in table
    assert len({(case.fault, case.step) for case in cases}) == len(cases)
    assert all(f"- {letter}" in table for letter in SKIP_REASONS)
