"""What a stand-in reads off statements: what pins a session, its database, its named ones, and manners."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, NO_BACKSLASH_ESCAPES, MySqlCommand
from sandbox.tidb_sim.proxy_rules import ProxyRuleChecker
from sandbox.tidb_sim.session_tracker import SessionTracker, affects_session, parse_prepare_from_variable


@pytest.fixture
def ledger() -> SessionTracker:
    return SessionTracker("shop")


def note(ledger: SessionTracker, *texts: str, failed: bool = False, status: int = AUTOCOMMIT) -> None:
    for text in texts:
        assert ledger.must_track(text.encode())
        ledger.track(text.encode(), status, failed=failed)


def test_most_statements_do_not_matter(ledger: SessionTracker) -> None:
    for text in (b"select c from t where id = 1", b"begin", b"insert into users values ('x')", b"set @a = 1"):
        assert not ledger.must_track(text)
        assert not affects_session(text)


def test_temporary_tables_pin_until_they_are_dropped(ledger: SessionTracker) -> None:
    note(
        ledger,
        "create temporary table a (id int)",
        "CREATE TEMPORARY TABLE IF NOT EXISTS `x`.`b``c` (id int)",
    )
    assert ledger.temporary_tables == {("shop", "a"), ("x", "b`c")}
    note(ledger, "create table lock_free (id int)", "drop table other")
    note(ledger, "drop temporary table if exists shop.a, x.`b``c`")
    assert not ledger.temporary_tables
    note(ledger, "/* why */ create /* not */ temporary table a select 1", "DROP TABLE a")
    assert not ledger.temporary_tables


def test_a_failed_statement_did_nothing(ledger: SessionTracker) -> None:
    note(ledger, "create temporary table a (id int)")
    note(ledger, "create temporary table b (id int)", "drop table a", "use other", failed=True)
    assert ledger.temporary_tables == {("shop", "a")}
    assert ledger.database == "shop"


def test_of_several_statements_what_may_have_been_executed_counts(ledger: SessionTracker) -> None:
    note(ledger, "create temporary table a (id int); select nonsense", failed=True)
    assert ledger.temporary_tables == {("shop", "a")}
    note(ledger, "drop table a; select nonsense", failed=True)
    assert ledger.temporary_tables == {("shop", "a")}


def test_locked_tables_pin_until_they_are_unlocked(ledger: SessionTracker) -> None:
    for freeing in ("unlock tables", "BEGIN", "start transaction read only"):
        note(ledger, "lock tables t write")
        assert ledger.has_locked_tables
        note(ledger, freeing)
        assert not ledger.has_locked_tables


def test_locks_are_known_by_their_names_or_counted(ledger: SessionTracker) -> None:
    note(ledger, "select GET_LOCK('a\\'b', 1), get_lock( \"c\" , 0), 'get_lock(1, 1)'")
    assert (ledger.user_lock_names, ledger.unnamed_lock_count) == ({b"a'b", b"c"}, 0)
    # Whether those are still held is asked of MariaDB.
    note(ledger, "do release_lock('c')")
    assert ledger.user_lock_names == {b"a'b", b"c"}
    note(ledger, "do get_lock(?, 10)", "do get_lock(@name, 10)", "do get_lock('a' 'b', 1)")
    assert ledger.unnamed_lock_count == 3
    note(ledger, "do release_lock('a\\'b')")
    assert ledger.unnamed_lock_count == 3
    note(ledger, "do release_lock(?)", "select release_lock(concat(@name))")
    assert ledger.unnamed_lock_count == 1
    note(ledger, "do release_all_locks()", failed=True)
    assert ledger.unnamed_lock_count == 1
    note(ledger, "do release_all_locks()")
    assert (ledger.user_lock_names, ledger.unnamed_lock_count) == (set(), 0)
    note(ledger, "do release_lock(?)")
    assert ledger.unnamed_lock_count == 0


def test_a_backslash_may_be_an_ordinary_character(ledger: SessionTracker) -> None:
    text = r"select 'a\'; do get_lock('b\', 0); create temporary table a (id int)"
    note(ledger, text, status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    assert ledger.user_lock_names == {b"b\\"}
    assert ledger.temporary_tables == {("shop", "a")}


@pytest.mark.parametrize(
    "text", ["use other", "USE `other`;", "select 1; use  other -- there", "use\n\tother", "use/* */other"]
)
def test_the_current_database(ledger: SessionTracker, text: str) -> None:
    note(ledger, text)
    assert ledger.database == "other"


def test_a_database_that_is_dropped_is_not_the_current_one(ledger: SessionTracker) -> None:
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
def test_the_level_of_the_next_transaction(ledger: SessionTracker, text: str, level: str | None) -> None:
    ledger.track(text.encode(), AUTOCOMMIT, failed=False)
    assert ledger.next_transaction_isolation == level


@pytest.mark.parametrize("text", ["begin", "select 1 from t", "set names utf8mb4; commit"])
def test_a_transaction_takes_the_level_away(ledger: SessionTracker, text: str) -> None:
    note(ledger, "set transaction isolation level serializable", "set names utf8mb4")
    note(ledger, "set transaction isolation level read committed", failed=True)
    assert ledger.next_transaction_isolation == "SERIALIZABLE"
    note(ledger, text)
    assert ledger.next_transaction_isolation is None
    assert not ledger.must_track(b"select 1")


def test_statements_that_sql_prepares(ledger: SessionTracker) -> None:
    note(ledger, "PREPARE S FROM 'select ''a\\\\b'', ?'")
    kept = ledger.prepared_statements.find_named("s")
    assert kept is not None
    assert (kept.text, kept.database) == (b"select 'a\\b', ?", "shop")
    note(ledger, "prepare `t` from \"select 'ü'\"", "prepare s from 'select 2'")
    assert {number: one.name for number, one in ledger.prepared_statements.by_id.items()} == {2: "t", 3: "s"}
    note(ledger, "deallocate prepare S", "drop prepare `t`")
    assert not ledger.prepared_statements.by_id


def test_a_prepare_without_backslashes_and_one_that_fails(ledger: SessionTracker) -> None:
    note(ledger, r"prepare s from 'select ''a\b'''", status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    kept = ledger.prepared_statements.find_named("s")
    assert kept is not None
    assert kept.text == rb"select 'a\b'"
    note(ledger, "prepare s from 'nonsense'", failed=True)
    assert ledger.prepared_statements.find_named("s") is None


def test_executing_a_named_statement_does_what_it_says(ledger: SessionTracker) -> None:
    note(ledger, "prepare s from 'create temporary table a (id int)'", "EXECUTE S")
    assert ledger.temporary_tables == {("shop", "a")}
    note(ledger, "prepare s from 'do get_lock(?, 1)'")
    assert not ledger.unnamed_lock_count
    note(ledger, "execute s USING @a")
    assert ledger.unnamed_lock_count


@pytest.mark.parametrize("failed", [False, True])
def test_a_text_that_nobody_saw_pins_the_session(ledger: SessionTracker, failed: bool) -> None:
    note(ledger, "set @a = 'select 1'; prepare s from @a", failed=failed)
    assert (
        ledger.prepared_statements.migration_blocker() == "the text of the prepared statement s is not known"
    )
    note(ledger, "prepare s from 'select 1'")
    assert ledger.prepared_statements.migration_blocker() is None
    note(ledger, "prepare s from concat('select ', '1')")
    assert ledger.prepared_statements.migration_blocker() is not None
    gbk = "prepare s from 'select ''誠n'''".encode("gbk")
    assert b"\\n" in gbk
    ledger.track(gbk, AUTOCOMMIT, failed=False)
    assert ledger.prepared_statements.migration_blocker() is not None
    note(ledger, "execute s", "deallocate prepare s")
    assert ledger.prepared_statements.migration_blocker() is None


def test_a_prepare_from_a_variable_is_told_apart() -> None:
    assert parse_prepare_from_variable(b"prepare S from @a;") == ("s", b"@a")
    assert parse_prepare_from_variable(b"prepare s from @`a b`") == ("s", b"@`a b`")
    assert parse_prepare_from_variable(b"prepare s from 'select @a'") is None
    assert parse_prepare_from_variable(b"prepare s from @a; select 1") is None
    assert parse_prepare_from_variable(b"select 1") is None


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
    assert ProxyRuleChecker(by_token=True).check_request(bytes((MySqlCommand.QUERY,)) + text) is None
    assert ProxyRuleChecker(by_token=True).check_request(bytes((MySqlCommand.QUIT,))) is None


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
        bytes((MySqlCommand.PING,)),
        bytes((MySqlCommand.INIT_DB,)) + b"shop",
    ],
)
def test_what_may_not(payload: bytes) -> None:
    conduct = ProxyRuleChecker(by_token=True)
    assert conduct.awaits_states
    assert conduct.check_request(payload) is not None
    assert conduct.check_set_states() is None
    assert not conduct.awaits_states


def test_states_are_set_only_after_a_login_by_token_or_a_show() -> None:
    conduct = ProxyRuleChecker(by_token=False)
    assert not conduct.awaits_states
    assert conduct.check_set_states() is not None
    conduct.states_exported()
    assert conduct.check_set_states() is None


def test_a_whole_session_is_set_once() -> None:
    conduct = ProxyRuleChecker(by_token=True)
    assert conduct.check_restored(is_complete=False) is None
    assert conduct.check_restored(is_complete=True) is None
    assert conduct.check_restored(is_complete=False) is None
    assert conduct.check_restored(is_complete=True) is not None
