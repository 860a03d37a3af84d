"""The program that replays captures, on a MariaDB."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles
from tests.support.clients.server import PemFiles
from tests.support.tidb_sim_clients import connect_driver, session_rules
from tests.support.traffic.capture_writer import Capture
from tests.support.traffic.replay_program import Replay, replay_command, require_replay_program, run_replay

SERVER_LOST = 2013


@pytest.fixture
def sql(mariadb: MariaDb, database: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that runs a statement in the test's database, and returns its rows."""
    with closing(
        pymysql.connect(
            host="127.0.0.1",
            port=mariadb.port,
            user="root",
            autocommit=True,
            database=database,
            ssl_disabled=True,
        )
    ) as connection:

        def run(statement: str) -> Any:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall()

        run("create table t (id int primary key, n bigint)")
        run("insert into t values (1, 10), (2, 20), (3, 30)")
        yield run


@pytest.fixture
def replay(tmp_path: Path, mariadb: MariaDb) -> Callable[..., Replay]:
    """Return a function that writes a capture and replays it."""

    def run(capture: Capture, *options: str) -> Replay:
        directory = capture.write(tmp_path / "capture")
        return run_replay(
            directory,
            *(options or ("--unbounded",)),
            address=f"127.0.0.1:{mariadb.port}",
            output=tmp_path / "output",
        )

    return run


def test_session_goes_on_as_it_was_captured(replay: Callable[..., Replay], database: str, sql: Any) -> None:
    capture = Capture().add(5, database, "InitDB").add(5, "select * from t where id > 1")
    capture.prepare(5, 77, "select * from t where id = ?").execute(5, 77, 2).execute(5, 77, 9)
    capture.add(5, "begin").add(5, "update t set n = 0").add(5, "rollback").add(
        5, "insert into t values (4, 40)"
    )
    capture.add(5, "select * from t; select 1").add(5, "select nothing").add(5, b"", "ResetConnect")
    capture.execute(5, 77, 2).add(5, "load data local infile '/etc/passwd' into table t").add(5, b"", "Quit")
    done = replay(capture)
    assert done.exit_code == 0, done.stderr
    assert done.errors() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1054, 0, 0, 0]
    assert done.rows() == [0, 2, 0, 1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0]
    assert [(line["conn"], line["time"]) for line in done.results()] == [
        (command.conn, command.time_ns)
        for command in capture.commands
        if command is not capture.commands[12]  # Its statement has gone with the reset.
    ]
    assert done.totals["skipped"] == {"unknown_statement": 1}
    assert (done.totals["replayed"], done.totals["local_files"], done.totals["sessions"]) == (14, 1, 1)
    assert sql("select * from t") == ((1, 10), (2, 20), (3, 30), (4, 40))
    texts = json.loads((done.output / "statements.json").read_text())
    assert texts[done.results()[1]["digest"]] == "select * from `t` where `id` > ?"
    assert json.loads((done.output / "summary.json").read_text()) == done.summary


def test_checksum_does_not_depend_on_the_order_of_rows(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    del sql
    capture = Capture().add(5, database, "InitDB").add(5, "select * from t order by id")
    capture.add(5, "select * from t order by id desc").add(5, "select * from t where id < 3").add(5, "do 1")
    _, forward, backward, other, none = replay(capture).results()
    assert forward["checksum"] == backward["checksum"] != other["checksum"]
    assert none["checksum"] is None


def test_reads_only_changes_nothing(replay: Callable[..., Replay], database: str, sql: Any) -> None:
    capture = (
        Capture().add(5, database, "InitDB").add(5, "delete from t").add(5, "select * from t for update")
    )
    capture.add(5, "select 1; delete from t").add(5, "set global max_connections = 1").add(5, "kill 1")
    capture.prepare(5, 1, "delete from t where id = ?").execute(5, 1, 1)
    capture.prepare(5, 2, "select * from t where id = ?").execute(5, 2, 1)
    capture.add(5, "prepare s from 'delete from t'").add(5, "execute s").add(5, "set @a = 1")
    done = replay(capture, "--unbounded", "--reads-only")
    assert done.totals["skipped"] == {"may_write": 8, "never_replayed": 1}
    assert done.errors() == [0, 0, 0, 0]
    assert len(sql("select * from t")) == 3


def test_refused_injection_does_not_run(tmp_path: Path, mariadb: MariaDb, database: str, sql: Any) -> None:
    capture = Capture().add(5, f"select 1; delete from {database}.t", is_success=False).add(5, "select 2")
    directory = capture.write(tmp_path / "capture", has_results=False)
    address = f"127.0.0.1:{mariadb.port}"
    done = run_replay(directory, "--unbounded", address=address, output=tmp_path / "output")
    assert (done.totals["skipped"], done.errors()) == ({"never_replayed": 1}, [0])
    assert len(sql("select * from t")) == 3


def test_order_of_each_session_is_kept(replay: Callable[..., Replay], database: str, sql: Any) -> None:
    capture = Capture()
    expected = dict.fromkeys(range(1, 4), 1)
    for session in expected:
        capture.add(session, f"update {database}.t set n = 1 where id = {session}")
    for step in range(30):
        for session in expected:
            capture.add(session, f"update {database}.t set n = n * 3 + {step} where id = {session}")
            expected[session] = (expected[session] * 3 + step) % 1_000_003
            capture.add(session, f"update {database}.t set n = n % 1000003 where id = {session}")
    assert replay(capture).totals["errors"] == 0
    assert dict(sql("select * from t")) == expected


def test_statements_begin_at_their_times(replay: Callable[..., Replay], database: str, sql: Any) -> None:
    sql("create table times (id int, at datetime(6))")
    capture = Capture()
    for session, at_ms in [(1, 0), (2, 200), (1, 400), (3, 600)]:
        capture.add(session, f"insert into {database}.times values ({session}, now(6))", at_ms=at_ms)
    done = replay(capture, "--speed", "2")
    gaps = sql("select timestampdiff(microsecond, (select min(at) from times), at) from times order by at")
    assert done.totals["errors"] == 0
    for (gap_us,), expected_ms in zip(gaps, [0, 100, 200, 300], strict=True):
        # Also the first statement, which they are compared with, may be late: its session has to log in.
        assert abs(gap_us / 1000 - expected_ms) < done.totals["max_lag_us"] / 1000 + 90


def test_lost_connection_is_an_error_and_the_session_goes_on(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    capture = Capture().add(5, database, "InitDB").prepare(5, 9, "select * from t where id = ?")
    capture.add(5, "select sleep(50) /* to be killed */").execute(5, 9, 1).add(5, "select * from t")
    results: list[Replay] = []
    thread = threading.Thread(target=lambda: results.append(replay(capture)))
    thread.start()
    query = (
        "select id from information_schema.processlist where info like 'select sleep(50) /* to be killed%'"
    )
    while not (found := sql(query)):
        assert thread.is_alive()
    sql(f"kill {found[0][0]}")
    thread.join()
    assert results[0].errors() == [0, 0, SERVER_LOST, 0, 0]
    assert results[0].rows() == [0, 0, 0, 1, 3]
    assert results[0].totals["lost_connections"] == 1


def test_rest_of_a_lost_transaction_is_not_committed(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    table = f"{database}.t"
    capture = Capture().add(5, "begin").add(5, f"insert into {table} values (4, 4)")
    capture.add(5, "select sleep(60)").add(5, f"insert into {table} values (5, 5)").add(5, "commit")
    capture.add(5, f"insert into {table} values (6, 6)")
    done = replay(capture, "--unbounded", "--timeout", "0.5")
    assert done.errors() == [0, 0, SERVER_LOST, SERVER_LOST, SERVER_LOST, 0]
    assert sql(f"select id from {table} where id > 3") == ((6,),)


def test_transaction_is_lost_with_its_first_statement(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    table = f"{database}.t"
    capture = Capture().add(5, "begin /* sleeps */; select sleep(60)")
    capture.add(5, f"/* app */ insert into {table} values (4, 4)").add(5, "rollback")
    capture.add(5, f"insert into {table} values (5, 5)")
    done = replay(capture, "--unbounded", "--timeout", "0.5")
    assert done.errors() == [SERVER_LOST, SERVER_LOST, SERVER_LOST, 0]
    assert sql(f"select id from {table} where id > 3") == ((5,),)


def test_rest_of_a_transaction_does_not_run_on_another_connection(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    table = f"{database}.t"
    capture = Capture().add(1, "begin").add(1, f"insert into {table} values (4, 4)")
    capture.add(2, "select 1")  # takes the place of the first session, which is idle
    capture.add(1, f"/* app */ insert into {table} values (5, 5)").add(1, "commit")
    capture.add(1, f"insert into {table} values (6, 6)")
    done = replay(capture, "--unbounded", "--max-connections", "1")
    assert done.totals["displaced_sessions"] == 2
    assert sorted(done.errors()) == [0, 0, 0, 0, SERVER_LOST, SERVER_LOST]
    assert sql(f"select id from {table} where id > 3") == ((6,),)


def test_timeout_ends_a_statement_whose_rows_keep_coming(replay: Callable[..., Replay]) -> None:
    capture = Capture().add(5, "select seq from mysql.seq_1_to_100000000").add(5, "select 1")
    done = replay(capture, "--unbounded", "--timeout", "0.5")
    assert done.errors() == [SERVER_LOST, 0]


def test_statements_behind_a_lost_end_of_a_transaction_run(
    replay: Callable[..., Replay], database: str, sql: Any
) -> None:
    table = f"{database}.t"
    capture = Capture().add(5, "begin").add(5, f"insert into {table} values (4, 4)")
    # The connection is lost in a text that ends the transaction.
    capture.add(5, "rollback; select sleep(60)").add(5, f"insert into {table} values (5, 5)")
    done = replay(capture, "--unbounded", "--timeout", "0.5")
    assert done.errors() == [0, 0, SERVER_LOST, 0]
    assert sql(f"select id from {table} where id > 3") == ((5,),)


def test_statement_may_not_take_longer_than_the_timeout(replay: Callable[..., Replay]) -> None:
    capture = Capture().add(5, "select sleep(60)").add(5, "select 1")
    done = replay(capture, "--unbounded", "--timeout", "0.2")
    assert done.errors() == [SERVER_LOST, 0]


def interrupt(command: list[str], sql: Callable[[str], Any]) -> None:
    """Start a replay that inserts 3000 rows into the table `done`, and stop it with SIGTERM after 300."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while sql("select count(*) from done")[0][0] < 300:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (1, "tidevoy-replay: ended by a signal; --resume continues\n")
    assert 300 <= sql("select count(*) from done")[0][0] < 3000


def test_replay_that_was_interrupted_goes_on_and_repeats_nothing(
    tmp_path: Path, mariadb: MariaDb, database: str, sql: Any
) -> None:
    sql("create table done (id int, session int)")
    capture = Capture()
    for number in range(3000):
        capture.add(number % 4 + 1, f"insert into {database}.done values ({number}, {number % 4 + 1})")
    directory, output = capture.write(tmp_path / "capture"), tmp_path / "output"
    address = f"127.0.0.1:{mariadb.port}"
    interrupt([*replay_command(directory, address=address, output=output), "--unbounded"], sql)
    refused = run_replay(directory, "--unbounded", address=address, output=output)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "has a replay already" in refused.stderr
    resumed = run_replay(directory, "--unbounded", "--resume", address=address, output=output)
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.totals["replayed"] == resumed.totals["records"] == 3000
    assert sql("select count(*), count(distinct id) from done") == ((3000, 3000),)
    assert len(resumed.results()) == 3000
    other = Capture().add(1, "select 1").write(tmp_path / "other")
    refused = run_replay(other, "--unbounded", "--resume", address=address, output=output)
    assert "of a replay of other input" in refused.stderr


def test_resumed_replay_runs_what_was_read_before_records_that_are_left_out(
    tmp_path: Path, mariadb: MariaDb, database: str, sql: Any
) -> None:
    sql("create table done (id int)")
    capture = Capture()
    for number in range(3000):
        capture.add(1, f"insert into {database}.done values ({number})", at_ms=number)
    capture.add(1, "select 1", at_ms=4000)
    # It is read, and left out, long before the session has come so far.
    last = datetime.fromtimestamp(capture.commands[-1].time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    directory, output = capture.write(tmp_path / "capture"), tmp_path / "output"
    address = f"127.0.0.1:{mariadb.port}"
    options = ["--unbounded", "--to", last]
    interrupt([*replay_command(directory, address=address, output=output), *options], sql)
    resumed = run_replay(directory, *options, "--resume", address=address, output=output)
    assert resumed.exit_code == 0, resumed.stderr
    assert sql("select count(*), count(distinct id) from done") == ((3000, 3000),)


def test_damaged_input_ends_the_replay_and_what_was_done_is_kept(tmp_path: Path, mariadb: MariaDb) -> None:
    # The second one is behind the window in which records wait for others that began before them.
    capture = Capture().add(1, "select 1").add(1, "select 2", at_ms=60_000)
    directory = capture.write(tmp_path / "capture", has_results=False)
    later = Capture().add(1, "select 3", at_ms=120_000).commands[0].encode()
    file = directory / "traffic-2026-11-27T23-00-00.log.gz"
    file.write_bytes(gzip.compress(later)[:-10])
    done = run_replay(
        directory, "--unbounded", address=f"127.0.0.1:{mariadb.port}", output=tmp_path / "output"
    )
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tidevoy-replay: {file.resolve()}, byte ")
    assert (done.summary["is_complete"], done.summary["error"]) == (False, done.stderr[16:-1])
    assert done.errors() == [0]


def test_only_the_chosen_part_is_replayed(replay: Callable[..., Replay], database: str, sql: Any) -> None:
    del sql
    capture = Capture().add(1, database, "InitDB", at_ms=0)
    capture.prepare(1, 3, "select * from t where id = ?", at_ms=100, database=database)
    capture.add(1, "select 1", at_ms=1000, database=database).execute(1, 3, 1, at_ms=1100, database=database)
    capture.add(2, "select 2", at_ms=1200, user="other").add(1, "select 3", at_ms=1300, database="mysql")
    capture.add(1, "select 4", at_ms=5000, database=database)
    window = ("--from", "2026-11-27T22:26:41Z", "--to", "2026-11-27T22:26:45Z")
    done = replay(capture, "--unbounded", *window, "--users", "app", "--databases", f"x,{database}")
    assert [line["time"] for line in done.results()] == [command.time_ns for command in capture.commands[2:4]]
    assert done.totals["skipped"] == {"filtered": 5}
    assert done.errors() == [0, 0]


def test_warm_up_is_not_recorded(replay: Callable[..., Replay]) -> None:
    capture = Capture().add(1, "select 1").add(2, "select 2").add(1, "select 3")
    done = replay(capture, "--unbounded", "--warm-up", "2")
    assert (done.totals["replayed"], done.totals["warm_up"], len(done.results())) == (3, 2, 1)


def test_sessions_beyond_the_limit_take_the_places_of_idle_ones(replay: Callable[..., Replay]) -> None:
    capture = Capture()
    for session in range(1, 9):
        capture.add(session, "select connection_id()")
    capture.add(1, "select 1")
    done = replay(capture, "--unbounded", "--max-connections", "2")
    assert (done.totals["errors"], done.totals["displaced_sessions"]) == (0, 7)


def test_sessions_keep_their_variables_while_few_statements_run(replay: Callable[..., Replay]) -> None:
    capture, sessions = Capture(), range(1, 21)
    for session in sessions:
        capture.add(session, f"set @n = {session}")
    for session in sessions:
        capture.add(session, f"select 1 from dual where @n = {session}")
    done = replay(capture, "--unbounded", "--reads-only", "--max-running", "2")
    assert (done.totals["connections"], done.totals["displaced_sessions"]) == (20, 0)
    assert sum(done.rows()) == 20


def test_dry_run_connects_nowhere(tmp_path: Path) -> None:
    capture = (
        Capture().add(1, "select 1").add(2, "delete from t").add(2, "shutdown").prepare(2, 1, "select ?")
    )
    directory = capture.execute(2, 1, 1).write(tmp_path / "capture")
    command = [str(require_replay_program()), "run", str(directory), "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "records": 5,
        "statements": 4,
        "reads": 3,
        "sessions": 2,
        "skipped": {"never_replayed": 1},
        "dropped_in_capture": 0,
        "first_ns": capture.commands[0].time_ns,
        "last_ns": capture.commands[-1].time_ns,
    }
    text = subprocess.run(command[:-1], capture_output=True, text=True, check=True).stdout
    assert "from 2026-11-27T22:26:40Z to 2026-11-27T22:26:40.004Z" in text


def test_wrong_usage_and_unreachable_servers_are_told_apart(tmp_path: Path, mariadb: MariaDb) -> None:
    program = str(require_replay_program())
    usage = subprocess.run([program, "run", "--unbounded"], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stdout) == (2, "")
    directory, output = Capture().add(1, "select 1").write(tmp_path / "capture"), tmp_path / "output"
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    address = f"127.0.0.1:{mariadb.port}"
    cases: list[tuple[list[str | Path], str]] = [
        ([directory, "--password-file", password], "error 1045: Access denied"),
        ([directory, "--tls-insecure"], "the server offers no TLS"),
        ([tmp_path / "none"], "none: No such file or directory"),
    ]
    for options, expected in cases:
        done = run_replay(*options, address=address, output=output)
        assert (done.exit_code, done.stdout) == (1, "")
        assert expected in done.stderr
        assert "hunter2" not in done.stderr
    done = run_replay(directory, address="127.0.0.1:1", output=output)
    assert done.stderr.startswith("tidevoy-replay: cannot connect to 127.0.0.1:1: ")


async def test_tls_with_a_password_that_the_server_asks_for(tmp_path: Path, mariadb: MariaDb) -> None:
    certificates = PemFiles.create(tmp_path / "certificates")
    password = tmp_path / "password"
    password.write_text("hunter2\n")
    directory = Capture().add(1, "select 1").write(tmp_path / "capture")
    tls, numbers = SqlTlsFiles(certificates.cert, certificates.key), count()
    async with TidbSim(SimSettings(session_rules(mariadb, tls=tls))) as sim:
        admin = await connect_driver(sim)
        async with admin.cursor() as cursor:
            await cursor.execute(
                "create user replay@'%' identified with 'caching_sha2_password' by 'hunter2'"
            )
        try:

            async def run(*options: str) -> Replay:
                inputs: list[str | Path] = [directory, "--unbounded", "--password-file", password, *options]
                output = tmp_path / f"output-{next(numbers)}"
                replay = partial(run_replay, address=sim.sql_address, output=output, user="replay")
                return await asyncio.to_thread(replay, *inputs)

            for options in (("--tls-insecure",), ("--ca-file", str(certificates.ca))):
                done = await run(*options)
                assert done.exit_code == 0, done.stderr
                assert done.rows() == [1]
            other = PemFiles.create(tmp_path / "other")
            assert "certificate" in (await run("--ca-file", str(other.ca))).stderr
            assert "caching_sha2_password, which needs TLS" in (await run()).stderr
        finally:
            async with admin.cursor() as cursor:
                await cursor.execute("drop user replay@'%'")
            await admin.ensure_closed()


def test_slow_log_is_replayed(tmp_path: Path, mariadb: MariaDb, database: str, sql: Any) -> None:
    entry = (
        "# Time: 2026-11-27T22:27:0{second}.5Z\n# User@Host: app[app] @ localhost [127.0.0.1]\n"
        "# Conn_ID: {session}\n"
        f"# Query_time: 0.25\n# DB: {database}\n# Is_internal: false\n"
        "# Prepared: {prepared}\n# Result_rows: 1\n# Succ: true\n{text};\n"
    )
    log = tmp_path / "slow.log"
    log.write_text(
        entry.format(
            second=1, session=7, prepared="false", text=f"use {database};\nselect * from t where id = 1"
        )
        + entry.format(
            second=2,
            session=8,
            prepared="true",
            text="select * from t where id in (?, ?) [arguments: (1, 2)]",
        )
        + entry.format(second=3, session=7, prepared="false", text="insert into t values (5, 50)")
        + entry.format(second=4, session=8, prepared="false", text="select 1 + '...(len:5000)")
    )
    done = run_replay(
        "--slow-log", log, "--unbounded", address=f"127.0.0.1:{mariadb.port}", output=tmp_path / "output"
    )
    assert done.exit_code == 0, done.stderr
    assert (done.errors(), done.rows()) == ([0, 0, 0], [1, 0, 2])
    assert done.totals["skipped"] == {"incomplete": 1}
    assert sql("select n from t where id = 5") == ((50,),)


def test_results_are_compared(
    replay: Callable[..., Replay], tmp_path: Path, mariadb: MariaDb, database: str, sql: Any
) -> None:
    capture = Capture().add(1, database, "InitDB").add(1, "select * from t").add(1, "select * from later")
    old = replay(capture)
    sql("delete from t where id = 3")
    sql("create table later (id int)")
    new = run_replay(
        tmp_path / "capture", "--unbounded", address=f"127.0.0.1:{mariadb.port}", output=tmp_path / "new"
    )
    command = [str(require_replay_program()), "compare", str(old.output), str(new.output)]
    comparison = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (comparison["totals"]["pairs"], comparison["totals"]["differing_results"]) == (3, 1)
    assert [error["code"] for error in comparison["gone_errors"]] == [1146]
    subprocess.run([*command, "--json", str(tmp_path / "comparison.json")], check=True)
    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison
