"""The steps that every client of the matrix runs, in this order. Each step opens its own sessions."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

from tests.support.clients.python.plan import MatrixPlan
from tests.support.clients.python.session import DriverSession, NotSupported, Rows

_DEADLINE_SECONDS = 20  # Within this time, the server must end a session or release its lock.
_SLEEP_SECONDS = 60  # Duration of a query unless it is killed.

Query = Callable[..., Rows]


class MatrixScript:
    """The steps for one driver. A step returns its details, and raises AssertionError for a wrong result."""

    def __init__(self, plan: MatrixPlan, driver: type[DriverSession]) -> None:
        self.plan, self.driver = plan, driver

    def run(self) -> None:
        """Run the steps of the plan and print a line of JSON for each."""
        for step in self.plan.steps:
            started_at = time.monotonic()
            ok: bool | None
            try:
                ok, detail = True, getattr(self, step)()
            except NotSupported as reason:
                ok, detail = None, str(reason)
            except Exception as error:
                ok, detail = False, f"{type(error).__name__}: {error}"[:300]
            seconds = round(time.monotonic() - started_at, 3)
            print(json.dumps({"step": step, "ok": ok, "detail": detail, "seconds": seconds}), flush=True)

    def login(self) -> str:
        """Log in; return the session's user and database."""
        with self._open_session() as session:
            ((database,),) = session.text("select database()")
            return f"{_user(session)} in {database}"

    def wrong_password(self) -> str:
        """Log in with a wrong password."""
        return self._expect_error(lambda: self.driver(self.plan, self.plan.user, "not the password"), 1045)

    def ping(self) -> str:
        """Send COM_PING before and after a query."""
        with self._open_session() as session:
            session.ping()
            expect(session.text("select 1"), [(1,)])
            session.ping()
        return ""

    def query_text(self) -> str:
        """Run queries in the text protocol."""
        with self._open_session() as session:
            return self._check_queries(session.text, "query_text")

    def query_prepared(self) -> str:
        """Run the queries of `query_text` as prepared statements."""
        with self._open_session() as session:
            return self._check_queries(session.prepared, "query_prepared")

    def transactions(self) -> str:
        """Check what a second session sees before and after a commit, and after a rollback."""
        with self._open_session() as session, self._open_session() as second:
            session.text("drop table if exists tx")
            session.text("create table tx (id int primary key) engine=innodb")
            for number, (end, expected_count) in enumerate([(session.commit, 1), (session.rollback, 1)]):
                before = number
                session.begin()
                session.text("insert into tx values (?)", (number,))
                expect(session.text("select count(*) from tx"), [(before + 1,)])
                expect(second.text("select count(*) from tx"), [(before,)])
                end()
                expect(second.text("select count(*) from tx"), [(expected_count,)])
            session.text("drop table tx")
        return "0 1 1"

    def rows_text(self) -> str:
        """Read a big result row by row in the text protocol."""
        with self._open_session() as session:
            return self._check_sum(session.stream, self.plan.rows)

    def rows_prepared(self) -> str:
        """Read a big result row by row in the binary protocol."""
        with self._open_session() as session:
            return self._check_sum(session.stream_prepared, self.plan.rows_prepared)

    def blob_text(self) -> str:
        """Write and read a value that is larger than a packet, in the text protocol."""
        with self._open_session() as session:
            return self._check_blob(session.text, session.misreads_large_text)

    def blob_prepared(self) -> str:
        """Write and read a value that is larger than a packet, with prepared statements."""
        with self._open_session() as session:
            return self._check_blob(session.prepared, session.misreads_large_binary)

    def multi(self) -> str:
        """Send several statements at once, also with an error in the middle."""
        with self._open_session() as session:
            results = session.multi_statement(
                "select 1; drop table if exists multi; create table multi (id int); "
                "insert into multi values (1), (2); select count(*) from multi; drop table multi"
            )
            expect(results, [[(1,)], [(2,)]])
            error = self._expect_error(
                lambda: session.multi_statement("select 1; select * from absent; select 2"), 1146
            )
            expect(session.text("select 3"), [(3,)])
        return f"2 results, {error}"

    def batch(self) -> str:
        """Insert many rows at once with the driver's batch method."""
        with self._open_session() as session:
            session.text("drop table if exists batch")
            session.text("create table batch (id int primary key, name varchar(50))")
            session.batch("insert into batch values (?, ?)", [(i, f"name {i}") for i in range(100)])
            expect(session.text("select count(*), sum(id) from batch"), [(100, 4950)])
            session.text("drop table batch")
        return "100 rows"

    def cursor(self) -> str:
        """Read a result from a cursor on the server."""
        with self._open_session() as session:
            count, total = session.cursor_fetch("select n from numbers where n <= 5000", 700)
            expect((count, total), (5000, 12502500))
            expect(session.text("select 1"), [(1,)])
        return "5000 rows"

    def load_data(self) -> str:
        """Run LOAD DATA LOCAL INFILE."""
        count = self.plan.load_rows
        with self._open_session() as session:
            session.text("drop table if exists loaded")
            session.text("create table loaded (id int primary key, name varchar(50))")
            session.text("load data local infile ? into table loaded", (self.plan.load_file,))
            expect(session.text("select count(*), sum(id) from loaded"), [(count, count * (count - 1) // 2)])
            session.text("drop table loaded")
        return f"{count} rows"

    def change_user(self) -> str:
        """Change to another account and back by COM_CHANGE_USER. Try it once with a wrong password."""
        with self._open_session() as session:
            session.text("set @mark = 1")
            session.change_user(self.plan.other_user, self.plan.other_password)
            expect((_user(session), session.text("select @mark")), (self.plan.other_user, [(None,)]))
            session.change_user(self.plan.user, self.plan.password)
            expect((_user(session), session.text("select @mark")), (self.plan.user, [(None,)]))
        session = self._open_session()
        try:
            error = self._expect_error(
                lambda: session.change_user(self.plan.other_user, "not the password"), 1045
            )
        finally:
            session.drop_connection()
        return f"there and back, {error}"

    def reset(self) -> str:
        """Check that COM_RESET_CONNECTION removes user variables."""
        with self._open_session() as session:
            session.text("set @mark = 1")
            session.reset()
            expect(session.text("select @mark"), [(None,)])
        return ""

    def kill(self) -> str:
        """KILL a session from another session while it runs a query."""
        victim = self._open_session()
        with self._open_session() as killer:
            ((connection_id,),) = victim.text("select connection_id()")
            started_lock, ended_lock = f"begun {connection_id}", f"gone {connection_id}"
            _expect_lock(victim, started_lock)
            _expect_lock(victim, ended_lock)
            failures: list[Exception] = []

            def sleep() -> None:
                try:
                    victim.text(f"select release_lock('{started_lock}'), sleep({_SLEEP_SECONDS})")
                except Exception as error:
                    failures.append(error)

            thread = threading.Thread(target=sleep, daemon=True)
            thread.start()
            _expect_lock(killer, started_lock)
            killer.text(f"kill {connection_id}")
            thread.join(_DEADLINE_SECONDS)
            assert not thread.is_alive(), "the query continues"
            assert failures, "the query ended without an error"
            code = self.driver.error_code(failures[0])
            assert code is not None, repr(failures[0])
            _expect_lock(killer, ended_lock)
        victim.drop_connection()
        # Codes from 2000 to 2999 are the driver's own codes for a lost connection. They differ with TLS.
        return "connection lost" if 2000 <= code < 3000 else f"error {code}"

    def cut(self) -> str:
        """Disconnect in the middle of a big result. Check that the server ends only this session."""
        with self._open_session() as other:
            session = self._open_session()
            ((connection_id,),) = session.text("select connection_id()")
            ended_lock = f"gone {connection_id}"
            _expect_lock(session, ended_lock)
            session.begin_stream("select n, repeat('x', 100) from numbers", 1000)
            _expect_lock(other, ended_lock, expected=0)
            session.drop_connection()
            _expect_lock(other, ended_lock)
            with self._open_session() as new:
                expect(new.text("select 1"), [(1,)])
        return ""

    def _open_session(self) -> DriverSession:
        return self.driver(self.plan, self.plan.user, self.plan.password)

    def _expect_error(self, action: Callable[[], object], code: int) -> str:
        try:
            action()
        except NotSupported:
            raise
        except Exception as error:
            expect(self.driver.error_code(error), code, repr(error))
            return f"error {code}"
        raise AssertionError(f"no error {code}")

    def _check_queries(self, run: Query, table: str) -> str:
        rows = [(i, f"Zeile {i} 🌊", 2**32 + i, i / 4, None if i % 2 else "x" * i * 20) for i in range(20)]
        run(f"drop table if exists {table}")
        run(
            f"create table {table} (id int primary key, name varchar(200) character set utf8mb4, "
            "big bigint, ratio double, note text)"
        )
        for row in rows:
            run(f"insert into {table} values (?, ?, ?, ?, ?)", row)
        expect(run(f"select id, name, big, ratio, note from {table} order by id"), rows)
        for row in rows[:3]:
            expect(run(f"select id, name, big, ratio, note from {table} where id = ?", row[:1]), [row])
        expect(run(f"select id from {table} where id = ?", (-1,)), [])
        run(f"update {table} set name = ? where id >= ?", ("neu", 10))
        run(f"delete from {table} where id = ?", (19,))
        expect(run(f"select count(*) from {table} where name = ?", ("neu",)), [(9,)])
        expect(run(f"select repeat('y', {self.plan.long})"), [("y" * self.plan.long,)])
        first = self._expect_error(lambda: run("select * from absent"), 1146)
        second = self._expect_error(
            lambda: run(f"insert into {table} values (?, 'x', 1, 1, null)", (1,)), 1062
        )
        run(f"drop table {table}")
        return f"20 rows, {first}, {second}"

    def _check_sum(self, stream: Callable[[str], tuple[int, int]], n: int) -> str:
        count, total = stream(f"select n from numbers where n <= {n}")
        expect((count, total), (n, n * (n + 1) // 2))
        return f"{count} rows"

    def _check_blob(self, run: Query, in_halves: bool) -> str:
        size = self.plan.blob
        blob = os.urandom(size)
        digest = hashlib.sha256(blob).hexdigest()
        run("drop table if exists blobs")
        run("create table blobs (id int primary key, data longblob)")
        run("insert into blobs values (?, ?)", (1, blob))
        expect(
            run("select sha2(data, 256) from blobs where id = ?", (1,)), [(digest,)], "the server's digest"
        )
        half = size // 2 if in_halves else size
        read = b""
        while len(read) < size:
            ((part,),) = run(f"select substring(data, {len(read) + 1}, {half}) from blobs where id = ?", (1,))
            assert part, f"only {len(read)} bytes received"
            read += part
        expect(hashlib.sha256(read).hexdigest(), digest, "the received digest")
        run("drop table blobs")
        return f"{size} bytes" + (", read in halves: the driver cannot read more" if in_halves else "")


def _expect_lock(session: DriverSession, name: str, expected: int = 1) -> None:
    """Wait until no other session has the lock, and take it. The server releases it when `session` ends.

    If `expected` is 0, check that another session has the lock.
    """
    expect(session.text(f"select get_lock('{name}', {_DEADLINE_SECONDS * expected})"), [(expected,)], name)


def expect(actual: object, expected: object, what: str = "got") -> None:
    """Raise AssertionError with both values if they differ. Lists and tuples count as equal."""
    if _to_lists(actual) != _to_lists(expected):
        raise AssertionError(f"{what}: {str(actual)[:120]}, not {str(expected)[:120]}")


def _user(session: DriverSession) -> str:
    """Return the session's user. The simulated server recognizes only this exact statement."""
    ((account,),) = session.text("select current_user()")
    return str(account).partition("@")[0]


def _to_lists(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_to_lists(item) for item in value]
    return value


def main(driver: str) -> None:
    """Run the steps with the driver of this name."""
    MatrixScript(MatrixPlan.from_environment(), _driver(driver)).run()


_DRIVERS = {
    "pymysql": ("pymysql_session", "PyMySqlSession"),
    "asyncmy": ("asyncmy_session", "AsyncmySession"),
    "mysqlclient": ("mysqlclient_session", "MysqlclientSession"),
    "connector-c": ("connector_session", "ConnectorSession"),
    "connector-pure": ("connector_session", "PureConnectorSession"),
}
"""Module and class of each driver; only the module of the used driver is imported."""


def _driver(name: str) -> type[DriverSession]:
    module, session = _DRIVERS[name]
    session_class: type[DriverSession] = getattr(
        importlib.import_module(f"tests.support.clients.python.{module}"), session
    )
    return session_class
