"""State that is derived from statements (migration blockers, database, named statements), and proxy rules."""

from __future__ import annotations

import pytest

from sandbox.tidb_sim.packets import AUTOCOMMIT, NO_BACKSLASH_ESCAPES, MySqlCommand
from sandbox.tidb_sim.proxy_rules import ProxyRuleChecker
from sandbox.tidb_sim.session_tracker import SessionTracker, affects_session, parse_prepare_from_variable


@pytest.fixture
def tracker() -> SessionTracker:
    return SessionTracker("shop")


def track(tracker: SessionTracker, *texts: str, failed: bool = False, status: int = AUTOCOMMIT) -> None:
    for text in texts:
        assert tracker.must_track(text.encode())
        tracker.track(text.encode(), status, failed=failed)


def test_ignores_most_statements(tracker: SessionTracker) -> None:
    for text in (b"select c from t where id = 1", b"begin", b"insert into users values ('x')", b"set @a = 1"):
        assert not tracker.must_track(text)
        assert not affects_session(text)


def test_temporary_tables_pin_until_dropped(tracker: SessionTracker) -> None:
    track(
        tracker,
        "create temporary table a (id int)",
        "CREATE TEMPORARY TABLE IF NOT EXISTS `x`.`b``c` (id int)",
    )
    assert tracker.temporary_tables == {("shop", "a"), ("x", "b`c")}
    track(tracker, "create table lock_free (id int)", "drop table other")
    track(tracker, "drop temporary table if exists shop.a, x.`b``c`")
    assert not tracker.temporary_tables
    track(tracker, "/* why */ create /* not */ temporary table a select 1", "DROP TABLE a")
    assert not tracker.temporary_tables


def test_failed_statement_has_no_effect(tracker: SessionTracker) -> None:
    track(tracker, "create temporary table a (id int)")
    track(tracker, "create temporary table b (id int)", "drop table a", "use other", failed=True)
    assert tracker.temporary_tables == {("shop", "a")}
    assert tracker.database == "shop"


def test_failed_batch_counts_as_possibly_executed(tracker: SessionTracker) -> None:
    track(tracker, "create temporary table a (id int); select nonsense", failed=True)
    assert tracker.temporary_tables == {("shop", "a")}
    track(tracker, "drop table a; select nonsense", failed=True)
    assert tracker.temporary_tables == {("shop", "a")}


def test_locked_tables_pin_until_unlocked(tracker: SessionTracker) -> None:
    for unlocking in ("unlock tables", "BEGIN", "start transaction read only"):
        track(tracker, "lock tables t write")
        assert tracker.has_locked_tables
        track(tracker, unlocking)
        assert not tracker.has_locked_tables


def test_tracks_user_locks_by_name_or_count(tracker: SessionTracker) -> None:
    track(tracker, "select GET_LOCK('a\\'b', 1), get_lock( \"c\" , 0), 'get_lock(1, 1)'")
    assert (tracker.user_lock_names, tracker.unnamed_lock_count) == ({b"a'b", b"c"}, 0)
    # The tracker also keeps released locks, because a query to MariaDB shows which locks are held.
    track(tracker, "do release_lock('c')")
    assert tracker.user_lock_names == {b"a'b", b"c"}
    track(tracker, "do get_lock(?, 10)", "do get_lock(@name, 10)", "do get_lock('a' 'b', 1)")
    assert tracker.unnamed_lock_count == 3
    track(tracker, "do release_lock('a\\'b')")
    assert tracker.unnamed_lock_count == 3
    track(tracker, "do release_lock(?)", "select release_lock(concat(@name))")
    assert tracker.unnamed_lock_count == 1
    track(tracker, "do release_all_locks()", failed=True)
    assert tracker.unnamed_lock_count == 1
    track(tracker, "do release_all_locks()")
    assert (tracker.user_lock_names, tracker.unnamed_lock_count) == (set(), 0)
    track(tracker, "do release_lock(?)")
    assert tracker.unnamed_lock_count == 0


def test_respects_no_backslash_escapes(tracker: SessionTracker) -> None:
    text = r"select 'a\'; do get_lock('b\', 0); create temporary table a (id int)"
    track(tracker, text, status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    assert tracker.user_lock_names == {b"b\\"}
    assert tracker.temporary_tables == {("shop", "a")}


@pytest.mark.parametrize(
    "text", ["use other", "USE `other`;", "select 1; use  other -- there", "use\n\tother", "use/* */other"]
)
def test_tracks_current_database(tracker: SessionTracker, text: str) -> None:
    track(tracker, text)
    assert tracker.database == "other"


def test_dropping_current_database_clears_it(tracker: SessionTracker) -> None:
    track(tracker, "drop database other", "drop database shop", failed=True)
    assert tracker.database == "shop"
    track(tracker, "drop schema if exists `shop`")
    assert tracker.database == ""


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
def test_tracks_isolation_of_next_transaction(tracker: SessionTracker, text: str, level: str | None) -> None:
    tracker.track(text.encode(), AUTOCOMMIT, failed=False)
    assert tracker.next_transaction_isolation == level


@pytest.mark.parametrize("text", ["begin", "select 1 from t", "set names utf8mb4; commit"])
def test_transaction_consumes_isolation_level(tracker: SessionTracker, text: str) -> None:
    track(tracker, "set transaction isolation level serializable", "set names utf8mb4")
    track(tracker, "set transaction isolation level read committed", failed=True)
    assert tracker.next_transaction_isolation == "SERIALIZABLE"
    track(tracker, text)
    assert tracker.next_transaction_isolation is None
    assert not tracker.must_track(b"select 1")


def test_tracks_statements_prepared_by_sql(tracker: SessionTracker) -> None:
    track(tracker, "PREPARE S FROM 'select ''a\\\\b'', ?'")
    statement = tracker.prepared_statements.find_named("s")
    assert statement is not None
    assert (statement.text, statement.database) == (b"select 'a\\b', ?", "shop")
    track(tracker, "prepare `t` from \"select 'ü'\"", "prepare s from 'select 2'")
    assert {
        statement_id: statement.name for statement_id, statement in tracker.prepared_statements.by_id.items()
    } == {2: "t", 3: "s"}
    track(tracker, "deallocate prepare S", "drop prepare `t`")
    assert not tracker.prepared_statements.by_id


def test_tracks_prepare_without_backslash_escapes_and_failed_prepare(tracker: SessionTracker) -> None:
    track(tracker, r"prepare s from 'select ''a\b'''", status=AUTOCOMMIT | NO_BACKSLASH_ESCAPES)
    statement = tracker.prepared_statements.find_named("s")
    assert statement is not None
    assert statement.text == rb"select 'a\b'"
    track(tracker, "prepare s from 'nonsense'", failed=True)
    assert tracker.prepared_statements.find_named("s") is None


def test_execute_applies_effects_of_named_statement(tracker: SessionTracker) -> None:
    track(tracker, "prepare s from 'create temporary table a (id int)'", "EXECUTE S")
    assert tracker.temporary_tables == {("shop", "a")}
    track(tracker, "prepare s from 'do get_lock(?, 1)'")
    assert not tracker.unnamed_lock_count
    track(tracker, "execute s USING @a")
    assert tracker.unnamed_lock_count


@pytest.mark.parametrize("failed", [False, True])
def test_unknown_statement_text_pins_session(tracker: SessionTracker, failed: bool) -> None:
    track(tracker, "set @a = 'select 1'; prepare s from @a", failed=failed)
    assert (
        tracker.prepared_statements.migration_blocker() == "the text of the prepared statement s is not known"
    )
    track(tracker, "prepare s from 'select 1'")
    assert tracker.prepared_statements.migration_blocker() is None
    track(tracker, "prepare s from concat('select ', '1')")
    assert tracker.prepared_statements.migration_blocker() is not None
    gbk = "prepare s from 'select ''誠n'''".encode("gbk")
    assert b"\\n" in gbk
    tracker.track(gbk, AUTOCOMMIT, failed=False)
    assert tracker.prepared_statements.migration_blocker() is not None
    track(tracker, "execute s", "deallocate prepare s")
    assert tracker.prepared_statements.migration_blocker() is None


def test_parses_prepare_from_variable() -> None:
    assert parse_prepare_from_variable(b"prepare S from @a;") == ("s", b"@a")
    assert parse_prepare_from_variable(b"prepare s from @`a b`") == ("s", b"@`a b`")
    assert parse_prepare_from_variable(b"prepare s from 'select @a'") is None
    assert parse_prepare_from_variable(b"prepare s from @a; select 1") is None
    assert parse_prepare_from_variable(b"select 1") is None


# Rules for proxies.


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
def test_allows_setup_requests_before_states(text: bytes) -> None:
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
def test_rejects_other_requests_before_states(payload: bytes) -> None:
    rules = ProxyRuleChecker(by_token=True)
    assert rules.awaits_states
    assert rules.check_request(payload) is not None
    assert rules.check_set_states() is None
    assert not rules.awaits_states


def test_set_states_requires_token_login_or_export() -> None:
    rules = ProxyRuleChecker(by_token=False)
    assert not rules.awaits_states
    assert rules.check_set_states() is not None
    rules.record_export()
    assert rules.check_set_states() is None


def test_complete_states_are_set_only_once() -> None:
    rules = ProxyRuleChecker(by_token=True)
    assert rules.check_repeated_restore(is_complete=False) is None
    assert rules.check_repeated_restore(is_complete=True) is None
    assert rules.check_repeated_restore(is_complete=False) is None
    assert rules.check_repeated_restore(is_complete=True) is not None
