"""The target of a migration fails in some way at some step. Then the session usually stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import err, frame
from tests.support.clients.server import PemFiles
from tests.support.fake_servers import full_backlog, refusing_port
from tests.support.migration.fault_cases import FailureCase, failure_cases
from tests.support.migration.fault_envoy import LOGIN_DENIED, FaultEnvoys, MigrationScenario, node_tls_context
from tests.support.migration.fleet import NodeSpec, run_fleet
from tests.support.migration.scripted_node import OK_PACKET, SHUTDOWN_ERROR, GateAction, NodeConnection
from tests.support.module.bootstrap import Host
from tests.support.waiting import assert_nothing_received, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_HANDSHAKE_SECONDS = 0.2
"""Seconds that a TLS handshake may take over a slow network."""
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


async def proceed(scenario: MigrationScenario, step: str) -> None:
    """Let the migration continue after the target has failed."""
    if step == "wait":
        await scenario.wait_target_released()
    scenario.gate.proceed(
        GateAction.SEND_NOTHING if step in ("connect", "tls", "login", "states") else GateAction.ANSWER
    )
    if step == "wait":
        await scenario.expect_insert_ok(2)


async def fail_target(scenario: MigrationScenario, case: FailureCase) -> None:
    link = scenario.new.connections[-1]
    if case.step == "switch":
        await fail_after_last_ok(scenario, link, case.fault)
        return
    match case.fault:
        case "target: FIN":
            await link.send_fin()
        case "target: unreachable" | "target: unreachable, another available":
            await scenario.new.stop_listening()
            await link.send_fin()
        case "target: RST":
            await link.reset()
        case "target: ERR":
            link.send(ERRORS[case.step])
        case "target: garbage":
            link.send(GARBAGE.get(case.step, BROKEN))
    await proceed(scenario, case.step)


async def fail_after_last_ok(scenario: MigrationScenario, link: NodeConnection, fault: str) -> None:
    """Make the target fail right after its last OK."""
    if fault == "target: garbage":
        link.send(GARBAGE["switch"])
    else:
        if fault.startswith("target: unreachable"):
            await scenario.new.stop_listening()
        link.send(OK_PACKET)
        scenario.envoy.expect_migration(scenario.old, "ok", "moved")
        match fault:
            case "target: RST":
                await link.wait_until_read()
                await link.reset()
            case "target: ERR":
                await link.wait_until_read()
                link.send(frame(0, SHUTDOWN_ERROR))
                await link.send_fin()
            case _:
                await link.send_fin()
    scenario.gate.proceed(GateAction.TEST_ANSWERED)


TARGET_FAULTS = [*failure_cases("target", "FIN", "RST", "unreachable", "ERR", "garbage")]


@pytest.mark.parametrize("case", TARGET_FAULTS, ids=str)
async def test_target_fails_during_a_migration(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        await scenario.reach_step(case.step)
        await fail_target(scenario, case)
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("target", "unreachable, another available"), ids=str)
async def test_session_migrates_to_another_target(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case, third=True) as scenario:
        await scenario.reach_step(case.step)
        await fail_target(scenario, case)
        await expect_migrated_to_third(scenario, case.step)


async def expect_migrated_to_third(scenario: MigrationScenario, step: str) -> None:
    await wait_until(scenario.third.migration_completed.is_set, 5.0)
    await scenario.expect_on(scenario.third)
    assert len(scenario.new.connections) == 1
    if step != "switch":
        scenario.envoy.expect_migration(scenario.old, "unreachable", "stayed")
        scenario.envoy.expect_migration(scenario.old, "ok", "moved")


@pytest.mark.parametrize("case", failure_cases("target", "refused", "silent"), ids=str)
async def test_session_stays_if_the_target_does_not_answer(
    fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        if case.step == "connect":
            with refusing_port() if case.fault == "target: refused" else full_backlog() as endpoint:
                scenario.new.endpoint = endpoint
                scenario.drain()
                await scenario.wait_failure_counted(case.reason)
                scenario.undrain()
                await scenario.expect_on(scenario.old)
                scenario.envoy.expect_failures(scenario.old, case.reason)
            return
        gate = await scenario.reach_step(case.step)
        gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_outcome(case)


async def test_session_stays_if_the_target_does_not_greet(fault_envoys: FaultEnvoys) -> None:
    async with (await fault_envoys.envoy_for("connect")).scenario("no greeting") as scenario:
        gate = await scenario.reach_step("connect")
        gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_stayed("slow")


@pytest.mark.parametrize("case", failure_cases("target", "byte by byte, late"), ids=str)
async def test_session_migrates_to_a_slow_target(fault_envoys: FaultEnvoys, case: FailureCase) -> None:
    async with fault_envoys.scenario(case) as scenario:
        gate = await scenario.reach_step(case.step, bytewise=case.step != "tls")
        if case.step == "tls":
            await assert_nothing_received(scenario.client.reader, SLOW_HANDSHAKE_SECONDS)
        gate.proceed()
        await scenario.expect_outcome(case)


async def test_migration_continues_if_the_target_changes_its_priority(fault_envoys: FaultEnvoys) -> None:
    """Envoy must not treat the target as draining while its priority changes."""
    async with (await fault_envoys.envoy_for("login")).scenario("another priority") as scenario:
        gate = await scenario.reach_step("login")
        new = Host(scenario.new.endpoint, scenario.new.name, priority=1)
        scenario.envoy.publish(Host(scenario.old.endpoint, scenario.old.name, state="draining"), new)

        async def is_applied() -> bool:
            return (await scenario.envoy.proxy.hosts("tidb"))[new.endpoint].get("priority") == 1

        await wait_until(is_applied)
        gate.proceed()
        await scenario.expect_migrated()


@pytest.mark.parametrize("case", failure_cases("target", "wrong certificate"), ids=str)
async def test_session_stays_if_the_target_has_a_wrong_certificate(
    tmp_path: Path, fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        scenario.new.tls = node_tls_context(PemFiles.create(tmp_path))
        await scenario.reach_step("connect")
        scenario.gate.proceed()
        await scenario.expect_outcome(case)


@pytest.mark.parametrize("case", failure_cases("target", "dies during a statement"), ids=str)
async def test_session_ends_if_the_target_dies_during_a_statement(
    fault_envoys: FaultEnvoys, case: FailureCase
) -> None:
    async with fault_envoys.scenario(case) as scenario:
        scenario.send("insert 3")
        await scenario.expect_insert_ok(3)
        gate = await scenario.reach_step(case.step)
        scenario.send("insert 4")
        statement_gate = scenario.new.pause_at("statement")
        gate.proceed()
        await (await statement_gate.wait_reached()).reset()
        statement_gate.proceed(GateAction.SEND_NOTHING)
        await scenario.expect_outcome(case)
        scenario.envoy.expect_migration(scenario.old, "ok", "moved")
        assert scenario.old.statements[-1] == b"insert 3"


LOGIN_FAULTS = failure_cases("target", "expired token", "older, rejects states")


@pytest.mark.parametrize("case", LOGIN_FAULTS, ids=str)
async def test_session_stays_if_the_target_denies_it(
    tmp_path: Path, mariadb: MariaDb, database: str, case: FailureCase
) -> None:
    """The nodes are simulated TiDB servers, because a ScriptedNode does not check tokens and states."""
    faulty_rules = (
        MigrationRules(clock_skew_seconds=120)
        if case.fault == "target: expired token"
        else MigrationRules(rejects_set_states=True)
    )
    specs = [NodeSpec(MigrationRules(show_changes_row_count=True)), NodeSpec(faulty_rules)]
    async with run_fleet(tmp_path, mariadb, specs=specs, drained=[1]) as nodes:
        client = await nodes.connect_answer_client(database=database)
        await client.query("create table t (id int)")
        await client.query("set @a = 7")
        await client.query("insert into t values (1), (2)")
        nodes.drain(nodes.nodes[0])
        await nodes.wait_stayed(case.reason)
        assert await client.query_row("select @a, row_count(), database()") == (b"7", b"2", database.encode())
        await nodes.wait_session_counts(1, 0)
        if case.fault == "target: expired token":
            assert all("it expired at" in violation for violation in nodes.pop_violations())
