"""A simulated server accepts logins by session token, and reports invalid tokens as violations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.packets import AUTOCOMMIT, MySqlCommand, frame, ok
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.settings import SimSettings
from tests.support.tidb_sim_clients import (
    connect_driver,
    error_code,
    raw_connection,
    raw_session,
    session_rules,
)


@pytest.fixture
async def accounts(source: TidbSim) -> AsyncIterator[dict[str, str]]:
    """Create accounts. Yield their `create user` options by name."""
    properties = {
        "m_plain": "identified by 'geheim'",
        "m_sha2": "identified with 'caching_sha2_password' by 'geheim'",
        "m_empty": "identified by ''",
    }
    admin = await connect_driver(source)
    async with admin.cursor() as cursor:
        for name, identified in properties.items():
            await cursor.execute(f"create user {name}@'%' {identified}")
        yield properties
        for name in properties:
            await cursor.execute(f"drop user {name}@'%'")
    await admin.ensure_closed()


async def export_token(sim: TidbSim, user: str = "m_plain") -> bytes:
    connection = await connect_driver(sim, user=user, password="geheim")
    async with connection.cursor() as cursor:
        await cursor.execute("show session_states")
        ((_, token),) = await cursor.fetchall()
    await connection.ensure_closed()
    return token.encode() if isinstance(token, str) else bytes(token)


async def login(sim: TidbSim, token: bytes, user: str = "m_plain", **options: Any) -> bytes:
    """Log in by token, and then quit. Return the response to the login."""
    async with raw_connection(sim) as client:
        answer = await client.login_by_token(token, user=user, **options)
        if answer[0] == 0x00:
            client.writer.write(frame(0, bytes((MySqlCommand.QUIT,))))
        assert await client.reader.read() == b""
        return answer


async def test_token_login_ignores_password(
    source: TidbSim, target: TidbSim, accounts: dict[str, str]
) -> None:
    token = await export_token(source)
    for _ in range(2):
        assert await login(target, token) == ok(AUTOCOMMIT)
    admin = await connect_driver(source)
    async with admin.cursor() as cursor:
        await cursor.execute("alter user m_plain identified with 'caching_sha2_password' by 'neu'")
        assert await login(target, token) == ok(AUTOCOMMIT)
    await admin.ensure_closed()


async def test_token_login_with_dropped_database_fails(
    source: TidbSim, target: TidbSim, accounts: dict[str, str]
) -> None:
    assert error_code(await login(target, await export_token(source), database="nowhere")) == 1049


async def test_checks_user_before_token(target: TidbSim) -> None:
    assert error_code(await login(target, b"no token", "m_nobody")) == 1045


async def test_node_without_certificate_denies_tokens(
    mariadb: MariaDb, source: TidbSim, accounts: dict[str, str]
) -> None:
    async with TidbSim(SimSettings(session_rules(mariadb))) as sim:
        assert error_code(await login(sim, await export_token(source))) == 1045
        assert sim.node.violations == []


@pytest.mark.parametrize(
    ("user", "message"),
    [("m_plain", "signature"), ("m_sha2", "belongs to 'm_plain', not to 'm_sha2'")],
)
async def test_forged_or_foreign_token_is_violation(
    source: TidbSim, target: TidbSim, accounts: dict[str, str], user: str, message: str
) -> None:
    token = await export_token(source)
    if user == "m_plain":
        token = token.replace(b"m_plain", b"m_other")
    denied = await login(target, token, user)
    assert denied.startswith(b"\xff\x15\x04#28000Access denied for user '" + user.encode())
    assert len(target.node.violations) == 1
    assert message in target.node.violations[0]
    target.node.violations.clear()


async def test_expired_token_is_violation(
    mariadb: MariaDb, source: TidbSim, signing: SessionCertificate, accounts: dict[str, str]
) -> None:
    token = await export_token(source)
    for skew, answer in ((-120.0, ok(AUTOCOMMIT)), (40.0, ok(AUTOCOMMIT)), (70.0, None)):
        rules = session_rules(mariadb, migration=MigrationRules(clock_skew_seconds=skew))
        async with TidbSim(SimSettings(rules, **signing.settings)) as sim:
            got = await login(sim, token)
            assert (error_code(got) == 1045) if answer is None else (got == answer)
            assert len(sim.node.violations) == (answer is None)


async def test_token_belongs_to_current_user_of_session(
    source: TidbSim, target: TidbSim, accounts: dict[str, str]
) -> None:
    async with raw_session(source, "set @a = 1") as client:
        body = b"m_empty\0\0\0\x2d\0mysql_native_password\0"
        assert await client.send_command(MySqlCommand.CHANGE_USER, body) == ok(AUTOCOMMIT)
        states, token = await client.export_states()
        assert "user-var-values" not in states
        assert await login(target, token, "m_empty") == ok(AUTOCOMMIT)
        # The token is valid, but the account's name has another case.
        assert error_code(await login(target, token, "M_Empty")) == 1045


async def test_change_user_denies_token(source: TidbSim) -> None:
    async with raw_session(source) as client:
        _, token = await client.export_states()
        body = b"root\0" + bytes((len(token),)) + token + b"\0\x2d\0tidb_session_token\0"
        assert error_code(await client.send_command(MySqlCommand.CHANGE_USER, body)) == 1045
