"""The statement check, against simulated TiDB servers and against servers that answer nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from controlplane.aio import ThreadPool
from controlplane.config.settings import HealthCheckSettings, Settings, StatementCheckSettings
from controlplane.model.health import CheckStatus, Health
from controlplane.observe.health.health_checker import CheckTarget, HealthChecker
from controlplane.observe.health.probes import LocalResourceError, ProbeResult
from controlplane.observe.health.statement_probe import MAX_CONCURRENT_PROBES, StatementProbe
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.controlplane.engine import (
    FAST_CHECKS,
    EventRecorder,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    full_backlog,
    mysql_packet,
    refusing_port,
    run_fake_server,
    send_parts,
)
from tests.support.tidb_sim_clients import connect_driver, query_rows, session_rules
from tests.support.waiting import wait_until

LOCK = "select get_lock('statement_check', 60)"


@contextlib.asynccontextmanager
async def run_sim(mariadb: MariaDb, **rules: Any) -> AsyncIterator[TidbSim]:
    async with TidbSim(SimSettings(session_rules(mariadb, **rules))) as server:
        yield server
        assert server.node.violations == []


@pytest.fixture
async def sim(mariadb: MariaDb) -> AsyncIterator[TidbSim]:
    async with run_sim(mariadb) as server:
        yield server


async def probe(endpoint: str, timeout: float = 5.0, **options: Any) -> ProbeResult:
    check = StatementCheckSettings.model_validate({"user": "root", **options})
    return await StatementProbe(endpoint, "tidb-0", check, proxy_protocol=False).run(timeout)


async def test_statement_passes_and_the_session_ends(sim: TidbSim) -> None:
    result = await probe(sim.sql_address, statement="select 1, sleep(0)")
    assert result == ProbeResult(CheckStatus.PASS, f"the SQL port {sim.sql_address} runs statements")
    await wait_until(lambda: sim.node.connections == 0)


async def test_hanging_statement_fails_in_time(sim: TidbSim) -> None:
    started_at = time.monotonic()
    result = await probe(sim.sql_address, 0.3, statement="select sleep(10)")
    assert time.monotonic() - started_at < 5
    assert result.status is CheckStatus.FAIL
    assert result.reason == f"the SQL port {sim.sql_address} does not run a statement within 0.3 s"
    await wait_until(lambda: sim.node.connections == 0)


async def test_response_that_trickles_fails_in_time() -> None:
    """Each byte arrives long before the timeout, but the response never ends."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xff\x00\x00")
        while True:
            writer.write(b"\x0a")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with run_fake_server(trickle) as server:
        result = await asyncio.wait_for(probe(server.endpoint, 0.3), 5)
    assert result.status is CheckStatus.FAIL
    assert result.reason.endswith("does not run a statement within 0.3 s")


async def test_unreachable_silent_and_foreign_ports_fail() -> None:
    with refusing_port() as refusing:
        refused = await probe(refusing)
    assert refused == ProbeResult(CheckStatus.FAIL, f"the SQL port {refusing} refuses connections")
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as silent:
        assert (await probe(silent.endpoint, 0.3)).status is CheckStatus.FAIL
        assert await asyncio.wait_for(silent.connection_ends.get(), 5)
    for response in (mysql_packet(b"\x0a"), bytes(50), b"HTTP/1.1 200 OK\r\n\r\n"):
        async with run_fake_server(send_parts(response, then_close=True)) as foreign:
            assert (await probe(foreign.endpoint, 1)).status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"user": "nobody"}, "1045, Access denied for user 'nobody'"),
        ({"statement": "select * from mysql.no_such_table"}, "1146, "),
        ({"statement": "no statement"}, "1064, "),
        ({"password_file": "/no/such/file"}, "No such file or directory: '/no/such/file'"),
        ({"ca": "/no/such/file"}, "No such file"),
    ],
)
async def test_problems_of_the_settings_do_not_fail_the_node(
    sim: TidbSim, options: dict[str, Any], problem: str
) -> None:
    result = await probe(sim.sql_address, **options)
    assert result.status is CheckStatus.MISCONFIGURED
    assert "health.statement" in result.reason
    assert problem in result.reason


async def test_missing_tls_of_the_node_does_not_fail_it(sim: TidbSim, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    result = await probe(sim.sql_address, ca=str(tmp_path / "ca.pem"))
    assert (result.status, "2026" in result.reason) == (CheckStatus.MISCONFIGURED, True)


async def test_password_can_have_any_characters(sim: TidbSim, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("pä€ж\n")
    client = await connect_driver(sim)
    await query_rows(client, "create or replace user checker identified by 'pä€ж'")
    try:
        accepted = await probe(sim.sql_address, user="checker", password_file=password)
    finally:
        await query_rows(client, "drop user checker")
        client.close()
    assert accepted.status is CheckStatus.PASS


async def test_password_file_is_read_for_each_probe(sim: TidbSim, tmp_path: Path) -> None:
    password = tmp_path / "password"
    client = await connect_driver(sim)
    await query_rows(client, "create or replace user checker identified by 'first-secret'")
    try:
        for right, wrong in (("first-secret", "second-secret"), ("second-secret", "first-secret")):
            await query_rows(client, f"set password for checker = password('{right}')")
            password.write_text(f"{wrong}\n")
            denied = await probe(sim.sql_address, user="checker", password_file=password)
            assert denied.status is CheckStatus.MISCONFIGURED
            assert "secret" not in denied.reason
            password.write_text(f"{right}\n")
            accepted = await probe(sim.sql_address, user="checker", password_file=password)
            assert accepted.status is CheckStatus.PASS
    finally:
        await query_rows(client, "drop user checker")
        client.close()


async def test_full_node_is_recognized(mariadb: MariaDb) -> None:
    async with run_sim(mariadb, max_connections=1) as full:
        client = await connect_driver(full)
        result = await probe(full.sql_address)
        client.close()
    assert result.status is CheckStatus.FULL
    assert "error 1040, Too many connections" in result.reason


def open_sockets() -> set[str]:
    """Return the sockets of this process, each with its unique number."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory, for example
            sockets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in sockets if name.startswith("socket:")}


@pytest.mark.parametrize("free", range(4))
async def test_missing_file_descriptors_are_a_problem_of_this_machine(
    free: int, sim: TidbSim, tmp_path: Path
) -> None:
    """At most the socket, its duplicate and the password file are open at the same time."""
    password = tmp_path / "password"
    password.write_text("")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what earlier tests have left must not become free within this test
    sockets = open_sockets()
    await probe(sim.sql_address, password_file=password)  # starts the thread
    # The simulated server, in this process, closes its side of the session a little later.
    await wait_until(lambda: open_sockets() <= sockets)
    used = os.open("/", os.O_RDONLY)
    os.close(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        if free < 3:
            with pytest.raises(LocalResourceError, match="open files"):
                await probe(sim.sql_address, password_file=password)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_missing_threads_are_a_problem_of_this_machine(
    sim: TidbSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("controlplane.observe.health.statement_probe._THREADS", ThreadPool("few", 2))
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(LocalResourceError, match="can't start new thread"):
        await probe(sim.sql_address)


async def test_cancelled_probe_ends_its_session(sim: TidbSim) -> None:
    running = asyncio.create_task(probe(sim.sql_address, 30.0, statement="select sleep(30)"))
    await wait_until(lambda: sim.node.connections == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_until(lambda: sim.node.connections == 0)


async def test_node_that_accepts_no_connection_is_not_left_alone() -> None:
    """Unlike a node that hangs, it keeps no session of a probe."""
    with full_backlog() as endpoint:
        check = StatementCheckSettings(user="root", fall=1)
        statement_probe = StatementProbe(endpoint, "tidb-0", check, proxy_protocol=False)
        result = await statement_probe.run(0.2)
    assert result.reason == f"the SQL port {endpoint} does not accept connections within 0.2 s"
    assert statement_probe.min_interval == 0


async def test_many_silent_nodes_neither_stop_other_checks_nor_leak(sim: TidbSim) -> None:
    """There are more silent nodes than threads. After `fall` probes they are left alone for a while."""
    statement = StatementCheckSettings(enabled=True, user="root", interval=0.1, timeout=1)
    checks = HealthCheckSettings.model_validate(
        {"status": {"enabled": False}, "sql": {"enabled": False}}
    ).model_copy(update={"statement": statement})
    latest: dict[str, Health] = {}
    checker = HealthChecker(checks, latest.__setitem__, time.monotonic)
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as silent:
        endpoints = {f"silent{i}:4000": silent.endpoint for i in range(2 * MAX_CONCURRENT_PROBES)}
        endpoints["good:4000"] = sim.sql_address
        checker.set_targets({a: CheckTarget(a, endpoint, None, "") for a, endpoint in endpoints.items()})
        running = asyncio.create_task(checker.run())

        def are_checked() -> bool:
            results = [health.statement for health in latest.values()]
            return len(results) == len(endpoints) and all(r and r.consecutive >= 3 for r in results)

        def good_passes() -> int:
            result = latest["good:4000"].statement
            return result.consecutive if result is not None else 0

        await wait_until(are_checked, 60)
        before = good_passes()
        await wait_until(lambda: good_passes() >= before + 10)
        assert silent.connections == statement.fall * (len(endpoints) - 1)
        failed = {address for address, health in latest.items() if status(health) is CheckStatus.FAIL}
        assert failed == endpoints.keys() - {"good:4000"}
        threads = [thread for thread in threading.enumerate() if thread.name == "statement check"]
        assert len(threads) <= MAX_CONCURRENT_PROBES
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await wait_until(lambda: silent.connection_ends.qsize() == silent.connections)


def status(health: Health) -> CheckStatus | None:
    return health.statement.status if health.statement is not None else None


async def test_node_that_runs_no_statement_leaves_service_and_returns(sim: TidbSim, tmp_path: Path) -> None:
    """A lock makes the statement wait. The other checks pass all the time."""
    check: dict[str, Any] = {"user": "root", "statement": LOCK, "interval": 0.1, "timeout": 0.3}
    nodes = [{"address": sim.sql_address, "status_address": sim.status_address}]

    def configuration() -> Settings:
        health = {"status": FAST_CHECKS, "sql": FAST_CHECKS, "statement": check}
        return settings(tmp_path, nodes=nodes, health=health)

    async with run_engine(configuration(), load_settings=configuration) as engine:
        recorder = EventRecorder(engine)

        async def reload(**changes: Any) -> None:
            check.update(changes)
            await engine.reload()

        await wait_for_state(engine, sim.sql_address, "active")
        blocker = await connect_driver(sim)
        await query_rows(blocker, LOCK)
        assert engine.cluster.node(sim.sql_address).health.statement is None  # the check is off

        await reload(enabled=True)
        await wait_for_state(engine, sim.sql_address, "unhealthy")
        node = engine.cluster.node(sim.sql_address)
        assert node.plan.reason.endswith("does not run a statement within 0.3 s")
        assert [check and check.status for check in (node.health.sql, node.health.status)] == ["pass"] * 2

        # With a wrong user, the other checks decide. With the right user, the node fails again.
        await reload(user="nobody")
        await wait_for_state(engine, sim.sql_address, "active")
        event = await recorder.wait_for("node.check_misconfigured")
        assert "Access denied for user 'nobody'" in event.message
        await reload(user="root")
        await wait_for_state(engine, sim.sql_address, "unhealthy")
        await reload(enabled=False)
        await wait_for_state(engine, sim.sql_address, "active")
        await reload(enabled=True)
        await wait_for_state(engine, sim.sql_address, "unhealthy")

        await query_rows(blocker, "select release_all_locks()")
        await reload(interval=0.2)  # probes at once
        await wait_for_state(engine, sim.sql_address, "active")
        blocker.close()
