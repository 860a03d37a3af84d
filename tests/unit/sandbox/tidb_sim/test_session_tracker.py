"""What a stand-in reads off statements: what pins a session, its database, its named ones, and manners."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, NO_BACKSLASH_ESCAPES, Command
from sandbox.tidb_sim.proxy_rules import Conduct
from sandbox.tidb_sim.session_tracker import Ledger, matters, prepared_from_variable


@pytest.fixture
def ledger() -> Ledger:
    return Ledger("shop")


def note(ledger: Ledger, *texts: str, failed: bool = False, status: int = AUTOCOMMIT) -> None:
    for text in texts:
        assert ledger.heeds(text.encode())
        ledger.note(text.encode(), status, failed=failed)


def test_most_statements_do_not_matter(ledger: Ledger) -> None:
    for text in (b"select c from t where id = 1", b"begin", b"insert into users values ('x')", b"set @a = 1"):
        assert not ledger.heeds(text)
        assert not matters(text)


def test_temporary_tables_pin_until_they_are_dropped(ledger: Ledger) -> None:
    note(
        ledger,
        "create temporary table a (id int)",
        "CREATE TEMPORARY TABLE IF NOT EXISTS `x`.`b``c` (id int)",
    )
    assert ledger.temporary == {("shop", "a"), ("x", "b`c")}
    note(ledger, "create table lock_free (id int)", "drop table other")
    note(ledger, "drop temporary table if exists shop.a, x.`b``c`")
    assert not ledger.temporary
    note(ledger, "/* why */ create /* not */ temporary table a select 1", "DROP TABLE a")
    assert not ledger.temporary


def test_a_failed_statement_did_nothing(ledger: Ledger) -> None:
    note(ledger, "create temporary table a (id int)")
    note(ledger, "create temporary table b (id int)", "drop table a", "use other", failed=True)
    assert ledger.temporary == {("shop", "a")}
    assert ledger.database == "shop"


def test_of_several_statements_what_may_have_been_executed_counts(ledger: Ledger) -> None:
    note(ledger, "create temporary table a (id int); select nonsense", failed=True)
    assert ledger.temporary == {("shop", "a")}
    note(ledger, "drop table a; select nonsense", failed=True)
    assert ledger.temporary == {("shop", "a")}


def test_locked_tables_pin_until_they_are_unlocked(ledger: Ledger) -> None:
    for freeing in ("unlock tables", "BEGIN", "start transaction read only"):
        note(ledger, "lock tables t write")
        assert ledger.tables_locked
        note(ledger, freeing)
        assert not ledger.tables_locked


def test_locks_are_known_by_their_names_or_counted(ledger: Ledger) -> None:
    note(ledger, "select GET_LOCK('a\\'b', 1), get_lock( \"c\" , 0), 'get_lock(1, 1)'")
    assert (ledger.lock_names, ledger.nameless_locks) == ({b"a'b", b"c"}, 0)
    # Whether those are still held is asked of MariaDB.
    note(ledger, "do release_lock('c')")
    assert ledger.lock_names == {b"a'b", b"c"}
    note(ledger, "do get_lock(?, 10)", "do get_lock(@name, 10)", "do get_lock('a' 'b', 1)")
    assert ledger.nameless_locks == 3
    note(ledger, "do release_lock('a\\'b')")
    assert ledger.nameless_locks == 3
    note(ledger, "do release_lock(?)", "select release_lock(concat(@name))")
    assert ledger.nameless_locks == 1
    note(ledger, "do release_all_locks()", failed=True)
    assert ledger.nameless_locks == 1
    note(ledger, "do release_all_locks()")
    assert (ledger.lock_names, ledger.nameless_locks) == (set(), 0)
    note(ledger, "do release_lock(?)")
    assert ledger.nameless_locks == 0


def test_a_backslash_may_be_an_ordinary_character(ledger: Ledger) -> None:
    text = r"select 'a\'; do get_lock('b\', 0); create temporary table a (id int)"
    note(ledger, text, status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    assert ledger.lock_names == {b"b\\"}
    assert ledger.temporary == {("shop", "a")}


@pytest.mark.parametrize(
    "text", ["use other", "USE `other`;", "select 1; use  other -- there", "use\n\tother", "use/* */other"]
)
def test_the_current_database(ledger: Ledger, text: str) -> None:
    note(ledger, text)
    assert ledger.database == "other"


def test_a_database_that_is_dropped_is_not_the_current_one(ledger: Ledger) -> None:
    note(ledger, "drop database other", "drop database shop", failed=True)
    assert ledger.database == "shop"
    note(ledger, "drop schema if exists `shop`")
    assert ledger.database == ""


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("set transaction isolation level serializable", "SERIALIZABLE"),
        ("SET TRANSACTION READ ONLY, ISOLATION LEVEL Repeatable\n Read", "REPEATABLE-READ"),
        ("set transaction isolation level read committed, read write", "READ-COMMITTED"),
        ("set session transaction isolation level serializable", None),
        ("set transaction read only", None),
    ],
)
def test_the_level_of_the_next_transaction(ledger: Ledger, text: str, level: str | None) -> None:
    ledger.note(text.encode(), AUTOCOMMIT, failed=False)
    assert ledger.isolation_once == level


@pytest.mark.parametrize("text", ["begin", "select 1 from t", "set names utf8mb4; commit"])
def test_a_transaction_takes_the_level_away(ledger: Ledger, text: str) -> None:
    note(ledger, "set transaction isolation level serializable", "set names utf8mb4")
    note(ledger, "set transaction isolation level read committed", failed=True)
    assert ledger.isolation_once == "SERIALIZABLE"
    note(ledger, text)
    assert ledger.isolation_once is None
    assert not ledger.heeds(b"select 1")


def test_statements_that_sql_prepares(ledger: Ledger) -> None:
    note(ledger, "PREPARE S FROM 'select ''a\\\\b'', ?'")
    kept = ledger.statements.named("s")
    assert kept is not None
    assert (kept.text, kept.database) == (b"select 'a\\b', ?", "shop")
    note(ledger, "prepare `t` from \"select 'ü'\"", "prepare s from 'select 2'")
    assert {number: one.name for number, one in ledger.statements.all.items()} == {2: "t", 3: "s"}
    note(ledger, "deallocate prepare S", "drop prepare `t`")
    assert not ledger.statements.all


def test_a_prepare_without_backslashes_and_one_that_fails(ledger: Ledger) -> None:
    note(ledger, r"prepare s from 'select ''a\b'''", status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    kept = ledger.statements.named("s")
    assert kept is not None
    assert kept.text == rb"select 'a\b'"
    note(ledger, "prepare s from 'nonsense'", failed=True)
    assert ledger.statements.named("s") is None


def test_executing_a_named_statement_does_what_it_says(ledger: Ledger) -> None:
    note(ledger, "prepare s from 'create temporary table a (id int)'", "EXECUTE S")
    assert ledger.temporary == {("shop", "a")}
    note(ledger, "prepare s from 'do get_lock(?, 1)'")
    assert not ledger.nameless_locks
    note(ledger, "execute s USING @a")
    assert ledger.nameless_locks


@pytest.mark.parametrize("failed", [False, True])
def test_a_text_that_nobody_saw_pins_the_session(ledger: Ledger, failed: bool) -> None:
    note(ledger, "set @a = 'select 1'; prepare s from @a", failed=failed)
    assert ledger.statements.obstacle() == "the text of the prepared statement s is not known"
    note(ledger, "prepare s from 'select 1'")
    assert ledger.statements.obstacle() is None
    note(ledger, "prepare s from concat('select ', '1')")
    assert ledger.statements.obstacle() is not None
    gbk = "prepare s from 'select ''誠n'''".encode("gbk")
    assert b"\\n" in gbk
    ledger.note(gbk, AUTOCOMMIT, failed=False)
    assert ledger.statements.obstacle() is not None
    note(ledger, "execute s", "deallocate prepare s")
    assert ledger.statements.obstacle() is None


def test_a_prepare_from_a_variable_is_told_apart() -> None:
    assert prepared_from_variable(b"prepare S from @a;") == ("s", b"@a")
    assert prepared_from_variable(b"prepare s from @`a b`") == ("s", b"@`a b`")
    assert prepared_from_variable(b"prepare s from 'select @a'") is None
    assert prepared_from_variable(b"prepare s from @a; select 1") is None
    assert prepared_from_variable(b"select 1") is None


# What a proxy may do.


@pytest.mark.parametrize(
    "text",
    [
        b"SET SESSION_STATES '{}'",
        b"set @@session.sql_mode = ''",
        b" set names utf8mb4",
        b"SET SESSION sql_mode = '', character_set_client = utf8mb4;",
        b"set sql_mode = '' ; \0",
    ],
)
def test_what_may_come_before_the_states(text: bytes) -> None:
    assert Conduct(by_token=True).request(bytes((Command.QUERY,)) + text) is None
    assert Conduct(by_token=True).request(bytes((Command.QUIT,))) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"\x03select 1",
        b"\x03set global sql_mode = ''",
        b"\x03set sql_mode = '', global time_zone = '+1:00'",
        b"\x03set @a = 1",
        b"\x03set @@global.sql_mode = ''",
        b"\x03set password = ''",
        b"\x03set sql_mode = ''; select 1",
        b"\x03show session_states",
        bytes((Command.PING,)),
        bytes((Command.INIT_DB,)) + b"shop",
    ],
)
def test_what_may_not(payload: bytes) -> None:
    conduct = Conduct(by_token=True)
    assert conduct.waiting
    assert conduct.request(payload) is not None
    assert conduct.set() is None
    assert not conduct.waiting


def test_states_are_set_only_after_a_login_by_token_or_a_show() -> None:
    conduct = Conduct(by_token=False)
    assert not conduct.waiting
    assert conduct.set() is not None
    conduct.shown()
    assert conduct.set() is None


def test_a_whole_session_is_set_once() -> None:
    conduct = Conduct(by_token=True)
    assert conduct.filled(full=False) is None
    assert conduct.filled(full=True) is None
    assert conduct.filled(full=False) is None
    assert conduct.filled(full=True) is not None
