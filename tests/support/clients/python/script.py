"""The script itself: the steps that every client runs, in this order, each on sessions of its own."""

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

_DEADLINE_SECONDS = 20  # seconds until the server has noticed something
_SLEEP_SECONDS = 60  # seconds a query would last that is to be killed

Query = Callable[..., Rows]


class MatrixScript:
    """The steps for one driver. Each returns what there is to tell; AssertionError: not what was expected."""

    def __init__(self, plan: MatrixPlan, driver: type[DriverSession]) -> None:
        self.plan, self.driver = plan, driver

    def run(self) -> None:
        """Run the steps of the plan and print a line of JSON for each."""
        for step in self.plan.steps:
            began = time.monotonic()
            ok: bool | None
            try:
                ok, detail = True, getattr(self, step)()
            except NotSupported as reason:
                ok, detail = None, str(reason)
            except Exception as error:
                ok, detail = False, f"{type(error).__name__}: {error}"[:300]
            seconds = round(time.monotonic() - began, 3)
            print(json.dumps({"step": step, "ok": ok, "detail": detail, "seconds": seconds}), flush=True)

    def login(self) -> str:
        """Log in; who one is then."""
        with self._open_session() as session:
            ((database,),) = session.text("select database()")
            return f"{_user(session)} in {database}"

    def wrong_password(self) -> str:
        """Log in with a wrong password."""
        return self._expect_error(lambda: self.driver(self.plan, self.plan.user, "not the password"), 1045)

    def ping(self) -> str:
        """COM_PING, between two queries."""
        with self._open_session() as session:
            session.ping()
            expect(session.text("select 1"), [(1,)])
            session.ping()
        return ""

    def query_text(self) -> str:
        """Queries in the text protocol."""
        with self._open_session() as session:
            return self._check_queries(session.text, "query_text")

    def query_prepared(self) -> str:
        """The same as prepared statements."""
        with self._open_session() as session:
            return self._check_queries(session.prepared, "query_prepared")

    def transactions(self) -> str:
        """What a second session sees before and after a commit, and after a rollback."""
        with self._open_session() as session, self._open_session() as second:
            session.text("drop table if exists tx")
            session.text("create table tx (id int primary key) engine=innodb")
            for number, (end, seen) in enumerate([(session.commit, 1), (session.rollback, 1)]):
                before = number
                session.begin()
                session.text("insert into tx values (?)", (number,))
                expect(session.text("select count(*) from tx"), [(before + 1,)])
                expect(second.text("select count(*) from tx"), [(before,)])
                end()
                expect(second.text("select count(*) from tx"), [(seen,)])
            session.text("drop table tx")
        return "0 1 1"

    def rows_text(self) -> str:
        """A big result in the text protocol, row by row."""
        with self._open_session() as session:
            return self._check_sum(session.stream, self.plan.rows)

    def rows_prepared(self) -> str:
        """The same in the binary protocol."""
        with self._open_session() as session:
            return self._check_sum(session.stream_prepared, self.plan.rows_prepared)

    def blob_text(self) -> str:
        """A value that is larger than a packet can be, there and back, in the text protocol."""
        with self._open_session() as session:
            return self._check_blob(session.text, session.misreads_large_text)

    def blob_prepared(self) -> str:
        """The same as prepared statements."""
        with self._open_session() as session:
            return self._check_blob(session.prepared, session.misreads_large_binary)

    def multi(self) -> str:
        """Several statements at once, and an error in the middle of some."""
        with self._open_session() as session:
            results = session.multi_statement(
                "select 1; drop table if exists multi; create table multi (id int); "
                "insert into multi values (1), (2); select count(*) from multi; drop table multi"
            )
            expect(results, [[(1,)], [(2,)]])
            told = self._expect_error(
                lambda: session.multi_statement("select 1; select * from absent; select 2"), 1146
            )
            expect(session.text("select 3"), [(3,)])
        return f"2 results, {told}"

    def batch(self) -> str:
        """Many rows at once, by the driver's own means."""
        with self._open_session() as session:
            session.text("drop table if exists batch")
            session.text("create table batch (id int primary key, name varchar(50))")
            session.batch("insert into batch values (?, ?)", [(i, f"name {i}") for i in range(100)])
            expect(session.text("select count(*), sum(id) from batch"), [(100, 4950)])
            session.text("drop table batch")
        return "100 rows"

    def cursor(self) -> str:
        """A result from a cursor on the server."""
        with self._open_session() as session:
            count, total = session.cursor_fetch("select n from numbers where n <= 5000", 700)
            expect((count, total), (5000, 12502500))
            expect(session.text("select 1"), [(1,)])
        return "5000 rows"

    def load_data(self) -> str:
        """LOAD DATA LOCAL INFILE."""
        count = self.plan.load_rows
        with self._open_session() as session:
            session.text("drop table if exists loaded")
            session.text("create table loaded (id int primary key, name varchar(50))")
            session.text("load data local infile ? into table loaded", (self.plan.load_file,))
            expect(session.text("select count(*), sum(id) from loaded"), [(count, count * (count - 1) // 2)])
            session.text("drop table loaded")
        return f"{count} rows"

    def change_user(self) -> str:
        """COM_CHANGE_USER to another account, and once with a wrong password."""
        with self._open_session() as session:
            session.text("set @mark = 1")
            session.change_user(self.plan.other_user, self.plan.other_password)
            expect((_user(session), session.text("select @mark")), (self.plan.other_user, [(None,)]))
            session.change_user(self.plan.user, self.plan.password)
            expect((_user(session), session.text("select @mark")), (self.plan.user, [(None,)]))
        session = self._open_session()
        try:
            told = self._expect_error(
                lambda: session.change_user(self.plan.other_user, "not the password"), 1045
            )
        finally:
            session.drop_connection()
        return f"there and back, {told}"

    def reset(self) -> str:
        """COM_RESET_CONNECTION."""
        with self._open_session() as session:
            session.text("set @mark = 1")
            session.reset()
            expect(session.text("select @mark"), [(None,)])
        return ""

    def kill(self) -> str:
        """KILL of a session in the middle of a query, from another one."""
        victim = self._open_session()
        with self._open_session() as killer:
            ((number,),) = victim.text("select connection_id()")
            begun, gone = f"begun {number}", f"gone {number}"
            _expect_lock(victim, begun)
            _expect_lock(victim, gone)
            failures: list[Exception] = []

            def sleep() -> None:
                try:
                    victim.text(f"select release_lock('{begun}'), sleep({_SLEEP_SECONDS})")
                except Exception as error:
                    failures.append(error)

            sleeping = threading.Thread(target=sleep, daemon=True)
            sleeping.start()
            _expect_lock(killer, begun)
            killer.text(f"kill {number}")
            sleeping.join(_DEADLINE_SECONDS)
            assert not sleeping.is_alive(), "the query goes on"
            assert failures, "the query ended without an error"
            code = self.driver.error_code(failures[0])
            assert code is not None, repr(failures[0])
            _expect_lock(killer, gone)
        victim.drop_connection()
        # From 2000 on they are the client's own: the connection has gone. Which one depends on TLS.
        return "connection lost" if 2000 <= code < 3000 else f"error {code}"

    def cut(self) -> str:
        """Vanish in the middle of a big result. The server lets go of the session, and others work."""
        with self._open_session() as other:
            session = self._open_session()
            ((number,),) = session.text("select connection_id()")
            gone = f"gone {number}"
            _expect_lock(session, gone)
            session.begin_stream("select n, repeat('x', 100) from numbers", 1000)
            _expect_lock(other, gone, expected=0)
            session.drop_connection()
            _expect_lock(other, gone)
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
            run("select sha2(data, 256) from blobs where id = ?", (1,)), [(digest,)], "what the server has"
        )
        half = size // 2 if in_halves else size
        read = b""
        while len(read) < size:
            ((part,),) = run(f"select substring(data, {len(read) + 1}, {half}) from blobs where id = ?", (1,))
            assert part, f"{len(read)} bytes came back"
            read += part
        expect(hashlib.sha256(read).hexdigest(), digest, "what came back")
        run("drop table blobs")
        return f"{size} bytes" + (", read in halves: the driver cannot more" if in_halves else "")


def _expect_lock(session: DriverSession, name: str, expected: int = 1) -> None:
    """Wait until no other session has the lock, and take it. The server frees a session's when it has gone.

    `got=0`: another session does have it, now.
    """
    expect(session.text(f"select get_lock('{name}', {_DEADLINE_SECONDS * expected})"), [(expected,)], name)


def expect(actual: object, expected: object, what: str = "got") -> None:
    """AssertionError that shows both, when they differ. Rows are compared whatever sequence they are."""
    if _to_lists(actual) != _to_lists(expected):
        raise AssertionError(f"{what}: {str(actual)[:120]}, not {str(expected)[:120]}")


def _user(session: DriverSession) -> str:
    """Who one is, asked so that a stand-in can answer: it recognises whole statements."""
    ((account,),) = session.text("select current_user()")
    return str(account).partition("@")[0]


def _to_lists(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_to_lists(item) for item in value]
    return value


def main(driver: str) -> None:
    """Run the script with the driver of that name."""
    MatrixScript(MatrixPlan.from_environment(), _driver(driver)).run()


_DRIVERS = {
    "pymysql": ("pymysql_session", "PyMySqlSession"),
    "asyncmy": ("asyncmy_session", "AsyncmySession"),
    "mysqlclient": ("mysqlclient_session", "MysqlclientSession"),
    "connector-c": ("connector_session", "ConnectorSession"),
    "connector-pure": ("connector_session", "PureConnectorSession"),
}
"""Module and class of each driver; a module is imported only for its own."""


def _driver(name: str) -> type[DriverSession]:
    module, session = _DRIVERS[name]
    found: type[DriverSession] = getattr(
        importlib.import_module(f"tests.support.clients.python.{module}"), session
    )
    return found
