"""Sessions of accounts with special requirements, and of accounts that change after the login."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.node_operations import migration_counts, start_drain
from tests.support.tidb.sessions import Connection, connect, connect_directly, query_rows, session_port
from tests.support.waiting import wait_until
from tests.tidb.conftest import STACK_SETTINGS

PASSWORD = "correct horse"
MOVED, DENIED = ("moved", "ok"), ("stayed", "denied")
_MAX_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Account:
    """`options`: of CREATE USER. `changes`: statements of root after the login; {user} is the account.

    `result`: of the session's migration, if the connection to the node has TLS. `plain_result`: if it has
    none; None: no login is possible then.
    """

    user: str
    options: str = f"identified by '{PASSWORD}'"
    changes: str = ""
    result: tuple[str, str] = MOVED
    plain_result: tuple[str, str] | None = MOVED

    @property
    def name(self) -> str:
        return f"{self.user}@'%'"


ACCOUNTS = (
    Account("native"),
    Account("sha2", f"identified with caching_sha2_password by '{PASSWORD}'", plain_result=None),
    Account("needs_tls", f"identified by '{PASSWORD}' require ssl", plain_result=None),
    Account("new_password", changes="alter user {user} identified by 'another one'"),
    Account("new_plugin", changes="alter user {user} identified with caching_sha2_password by 'new'"),
    Account("expired", changes="alter user {user} password expire"),
    Account("other_limits", changes="revoke all privileges on *.* from {user}"),
    Account("later_tls", changes="alter user {user} require ssl", plain_result=DENIED),
    Account("locked", changes="alter user {user} account lock", result=DENIED, plain_result=DENIED),
    Account("dropped", changes="drop user {user}", result=DENIED, plain_result=DENIED),
    Account("renamed", changes="rename user {user} to renamed_to@'%'", result=DENIED, plain_result=DENIED),
)


@pytest.fixture
async def root(cluster: TidbCluster) -> AsyncIterator[Connection]:
    """Yield a connection that has created all accounts. Drop them at the end."""
    users = [account.name for account in ACCOUNTS]
    with connect_directly(cluster.tidb[0]) as connection:
        for account in ACCOUNTS:
            query_rows(connection, f"create user {account.name} {account.options}")
        # Each server reloads its privileges independently.
        for node in cluster.tidb:
            await wait_until(partial(_knows_all_accounts, node))
        yield connection
        query_rows(connection, f"drop user if exists {', '.join(users)}, renamed_to@'%'")


def _knows_all_accounts(node: Tidb) -> bool:
    try:
        for account in ACCOUNTS:
            connect_directly(node, user=account.user, password=PASSWORD, ssl=_unverified()).close()
    except pymysql.err.OperationalError:
        return False
    return True


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("has_tls", [True, False], ids=["tls", "plain"])
async def test_account_decides_whether_its_session_migrates(
    tmp_path: Path, cluster: TidbCluster, root: Connection, has_tls: bool
) -> None:
    mode: dict[str, Any] = {"mode": "required", "verify": "none"} if has_tls else {"mode": "disabled"}
    results = {
        account: account.result if has_tls else account.plain_result
        for account in ACCOUNTS
        if has_tls or account.plain_result is not None
    }
    settings = {**STACK_SETTINGS, "tls": {"backend": mode}}
    node = cluster.tidb[0]
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        with ExitStack() as open_sessions:
            sessions = {
                account: open_sessions.enter_context(_log_in(stack, account, node)) for account in results
            }
            for account in results:
                if account.changes:
                    query_rows(root, account.changes.format(user=account.name))
            await start_drain(stack, node)
            expected = Counter(results.values())

            async def are_counted() -> bool:
                counts = await migration_counts(stack)
                return all(
                    counts.get((node.address, *result), 0) >= count
                    for result, count in expected.items()
                    if result is not None
                )

            await stack.wait_until(are_counted, f"{expected}", 30.0)
            moved = {account for account, session in sessions.items() if session_port(session) != node.port}
            assert moved == {account for account, result in results.items() if result == MOVED}


def _log_in(stack: LocalCluster, account: Account, node: Tidb) -> Connection:
    """Log in through Envoy. Return a session on this node."""
    for _ in range(_MAX_ATTEMPTS):
        session = connect(stack.sql_port, user=account.user, password=PASSWORD)
        if session_port(session) == node.port:
            return session
        session.close()
    raise AssertionError(f"none of {_MAX_ATTEMPTS} sessions is on {node.address}")
