"""A session migrates, then its new node fails: everything is counted for the node that had the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.model.traffic import SESSION_STATES
from sandbox.tidb_sim.packets import err, frame
from tests.support.migration.fault_envoy import VARIABLE_VALUE, run_fresh_envoy
from tests.support.migration.scripted_node import OK_PACKET, SHUTDOWN_ERROR, GateAction
from tests.support.module.envoy import with_timeout

SYNTAX_ERROR = frame(1, err(1064, "You have an error in your SQL syntax", "42000"))
STATEMENTS_BEFORE = (f"set @a = {VARIABLE_VALUE}", "insert 2")
"""The statements of each scenario before the migration."""
CONNECT_FAILURES = ("connect", "closed", "error", "invalid", "tls", "full")


@pytest.mark.parametrize("fault", ["ERR 1053 and FIN", "RST", "unreachable, RST"])
async def test_failures_after_a_migration_are_counted_for_the_new_node(tmp_path: Path, fault: str) -> None:
    async with run_fresh_envoy(tmp_path) as envoy, envoy.scenario() as scenario:
        envoy.descriptors = 1 << 30
        old, new = scenario.old.name, scenario.new.name
        scenario.drain()
        migrated = {("migrations", old, "ok", "moved"): 1, ("sessions", new, "idle"): 1}
        await envoy.proxy.wait_for_metrics(migrated | {("sessions", old, "idle"): 0})

        scenario.new.canned_answers[b"bad"] = SYNTAX_ERROR
        scenario.send("bad")
        assert (await with_timeout(scenario.client.reader.readexactly(len(SYNTAX_ERROR)))) == SYNTAX_ERROR
        gate = scenario.new.pause_at("statement")
        scenario.send("last")
        connection = await gate.wait_reached()
        error = b""
        if fault == "ERR 1053 and FIN":
            error = frame(1, SHUTDOWN_ERROR)
            connection.send(error)
            await connection.send_fin()
            assert await with_timeout(scenario.client.reader.read()) == error
        else:
            if fault.startswith("unreachable"):
                await scenario.new.stop_listening()
            await connection.reset()
            assert await with_timeout(scenario.client.reader.read()) == b""
        gate.proceed(GateAction.SEND_NOTHING)

        await envoy.proxy.wait_for_metrics(
            {
                ("errors", "syntax", new): 1,
                ("errors", "shutdown", new): int(bool(error)),
                ("errors", "syntax", old): 0,
                ("errors", "shutdown", old): 0,
                ("commands", "query", old): len(STATEMENTS_BEFORE),
                ("commands", "query", new): 2,
                ("bytes", "to_node", old): sum(5 + len(statement) for statement in STATEMENTS_BEFORE),
                ("bytes", "to_node", new): 5 + len("bad") + 5 + len("last"),
                ("bytes", "to_client", old): len(STATEMENTS_BEFORE) * len(OK_PACKET),
                ("bytes", "to_client", new): len(SYNTAX_ERROR + error),
                ("logins", old): 1,
                ("logins", new): 0,
                ("migrations", old, "ok", "moved"): 1,
                ("migrations", old, "lost", "lost"): 0,
                ("migrations", new, "ok", "moved"): 0,
                ("migrations", new, "lost", "lost"): 0,
            }
            | {("sessions", node, state): 0 for node in (old, new) for state in SESSION_STATES}
            | {("connect_failures", node, reason): 0 for node in (old, new) for reason in CONNECT_FAILURES}
        )
