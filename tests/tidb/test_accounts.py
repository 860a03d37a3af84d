"""Sessions of accounts with special requirements, and of accounts that change after the login."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb import Tidb
from sandbox.tidb_cluster import TidbCluster
from tests.support.tidb.node_operations import (
    migration_counts,
    start_drain,
    wait_until_can_log_in,
)
from tests.support.tidb.sessions import (
    Connection,
    TrackedSessions,
    connect_directly,
    query_rows,
    session_port,
)
from tests.support.waiting import wait_until
from tests.tidb.conftest import STACK_SETTINGS

PASSWORD = "correct horse"
MOVED, DENIED = ("moved", "ok"), ("stayed", "denied")


@dataclass(frozen=True, slots=True)
class Account:
    """An account, and a change of it after the login.

    `options`: of CREATE USER. `change`: a statement of root; {user} is the account. Afterwards, no client
    without TLS can log in with the old password and run a statement. `result`: of the session's migration if
    the connection to the node has TLS. `plain_result`: the same without TLS; None if a login is impossible
    then.
    """

    user: str
    options: str = f"identified by '{PASSWORD}'"
    change: str = ""
    result: tuple[str, str] = MOVED
    plain_result: tuple[str, str] | None = MOVED

    @property
    def name(self) -> str:
        return f"{self.user}@'%'"


ACCOUNTS = (
    Account("native"),
    Account("sha2", f"identified with caching_sha2_password by '{PASSWORD}'", plain_result=None),
    Account("needs_tls", f"identified by '{PASSWORD}' require ssl", plain_result=None),
    Account("new_password", change="alter user {user} identified by 'another one'"),
    Account("new_plugin", change="alter user {user} identified with caching_sha2_password by 'new'"),
    Account("expired", change="alter user {user} password expire"),
    Account("later_tls", change="alter user {user} require ssl", plain_result=DENIED),
    Account("locked", change="alter user {user} account lock", result=DENIED, plain_result=DENIED),
    Account("dropped", change="drop user {user}", result=DENIED, plain_result=DENIED),
    Account("renamed", change="rename user {user} to renamed_to@'%'", result=DENIED, plain_result=DENIED),
)


@pytest.fixture
async def root(cluster: TidbCluster) -> AsyncIterator[Connection]:
    """Yield a connection that has created all accounts. Drop them at the end."""
    names = ", ".join([*(account.name for account in ACCOUNTS), "renamed_to@'%'"])
    any_certificate = ssl.create_default_context()
    any_certificate.check_hostname, any_certificate.verify_mode = False, ssl.CERT_NONE
    with connect_directly(cluster.tidb[0]) as connection:
        try:
            for account in ACCOUNTS:
                query_rows(connection, f"create user {account.name} {account.options}")
            for account in ACCOUNTS:
                await wait_until_can_log_in(cluster.tidb, account.user, PASSWORD, ssl=any_certificate)
            yield connection
        finally:
            query_rows(connection, f"drop user if exists {names}")


@pytest.mark.parametrize("has_tls", [True, False], ids=["tls", "plain"])
async def test_account_decides_whether_its_session_migrates(
    tmp_path: Path, cluster: TidbCluster, root: Connection, has_tls: bool
) -> None:
    mode: dict[str, Any] = {"mode": "required", "verify": "none"} if has_tls else {"mode": "disabled"}
    results = {account: account.result if has_tls else account.plain_result for account in ACCOUNTS}
    results = {account: result for account, result in results.items() if result is not None}
    settings = {**STACK_SETTINGS, "tls": {"backend": mode}}
    node = cluster.tidb[0]
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster, settings=settings) as stack:
        with closing(TrackedSessions(stack, None)) as tracked:
            sessions = {
                account: tracked.on_node(node, user=account.user, password=PASSWORD) for account in results
            }
            for account in results:
                if account.change:
                    query_rows(root, account.change.format(user=account.name))
            # Each server reloads its privileges independently.
            for account in results:
                if account.change:
                    await wait_until(partial(is_change_known, account, cluster))
            await start_drain(stack, node)
            expected = Counter((node.address, *result) for result in results.values() if result is not None)

            async def are_counted() -> bool:
                counts = await migration_counts(stack)
                return all(counts.get(key, 0) >= count for key, count in expected.items())

            await stack.wait_until(are_counted, f"{expected}", 30.0)
            assert set(await migration_counts(stack)) == set(expected)
            moved = {account for account, session in sessions.items() if session_port(session) != node.port}
            assert moved == {account for account, result in results.items() if result == MOVED}
        assert stack.violations() == []


def is_change_known(account: Account, cluster: TidbCluster) -> bool:
    """Return whether no server lets a client with the old login run a statement."""
    return not any(can_query(server, account.user) for server in cluster.tidb)


def can_query(server: Tidb, user: str) -> bool:
    try:
        with connect_directly(server, user=user, password=PASSWORD, ssl_disabled=True) as connection:
            query_rows(connection, "select 1")
    except pymysql.MySQLError:
        return False
    return True
