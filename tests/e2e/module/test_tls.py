"""TLS from clients through Envoy's module to nodes, as the settings say; and what becomes of passwords."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import pytest
import trustme

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.packets import MySqlCommand, frame
from tests.support.clients.server import PemFiles
from tests.support.e2e.cluster import (
    CountingClient,
    counting_client,
    error_code,
    get_envoys,
    run_cluster,
    wait_shown,
)

pytestmark = pytest.mark.timeout(180)

PASSWORD = "geheim"
SHA2, TOKEN = "fleet_sha2", "fleet_token"
ACCOUNTS = {
    SHA2: f"identified with 'caching_sha2_password' by '{PASSWORD}'",
    TOKEN: f"identified with 'tidb_auth_token' by '{PASSWORD}'",
}
CLEAR = "mysql_clear_password"
EXPOSED = 1105


@dataclass(frozen=True)
class Pki:
    """What clients are shown and what nodes show, each of an authority of its own."""

    clients: PemFiles
    nodes: PemFiles

    def settings(self, client: str, node: str, **more: Any) -> dict[str, Any]:
        """The section `tls` for these modes."""
        shown = {"cert": str(self.clients.cert), "key": str(self.clients.key)}
        trusted = {"ca": str(self.nodes.ca), "verify": "full"}
        return {
            "client": {"mode": client, **(shown if client != "disabled" else {})},
            "backend": {"mode": node, **(trusted if node != "disabled" else {})},
            **more,
        }

    def trusting(self) -> ssl.SSLContext:
        """A client's, which checks name and authority."""
        return ssl.create_default_context(cafile=str(self.clients.ca))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    directory = tmp_path_factory.mktemp("pki")
    return Pki(PemFiles.create(directory / "clients"), PemFiles.create(directory / "nodes"))


@asynccontextmanager
async def secured(
    directory: Path, mariadb: MariaDb, pki: Pki, tls: dict[str, Any]
) -> AsyncIterator[tuple[LocalCluster, CountingClient]]:
    """A cluster of one node that offers TLS, with the accounts; and root's session at that node itself."""
    settings = {"tls": tls}
    async with (
        run_cluster(directory, mariadb, arguments=pki.nodes.arguments(), settings=settings) as stack,
        counting_client(stack.tidb[0].port) as root,
    ):
        assert (await get_envoys(stack))["envoy-1"]["filter"] == "module"
        assert error_code(await root.log_in()) == 0
        for name, identified in ACCOUNTS.items():
            assert error_code(await root.query(f"create user {name}@'%' {identified}")) == 0
        try:
            yield stack, root
        finally:
            for name in ACCOUNTS:
                assert error_code(await root.query(f"drop user {name}@'%'")) == 0


def visit(stack: LocalCluster, trusting: ssl.SSLContext | None, user: str = SHA2) -> str:
    """Log in with a driver and its password; the TLS version of the node's side, empty for none."""
    with (
        pymysql.connect(
            host="127.0.0.1",
            port=stack.sql_port,
            user=user,
            password=PASSWORD,
            ssl=trusting,
            ssl_disabled=trusting is None,
            read_timeout=30,
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("show status like 'Ssl_version'")
        ((_, version),) = cursor.fetchall()
        return str(version)


async def outcome(stack: LocalCluster, trusting: ssl.SSLContext | None) -> str | int:
    """What `visit` says, or the code of its refusal."""
    try:
        return await asyncio.to_thread(visit, stack, trusting)
    except pymysql.MySQLError as refused:
        return int(refused.args[0])


@pytest.mark.parametrize(
    ("node", "allowed", "inside", "plainly"),
    [
        pytest.param("required", False, "TLSv1.3", "TLSv1.3", id="TLS to the node"),
        pytest.param("disabled", False, EXPOSED, 1045, id="none to the node"),
        pytest.param("disabled", True, "", 1045, id="none to the node, allowed"),
    ],
)
async def test_a_password_that_travels_in_clear(
    tmp_path: Path,
    mariadb: MariaDb,
    pki: Pki,
    node: str,
    allowed: bool,
    inside: str | int,
    plainly: str | int,
) -> None:
    """An account of caching_sha2_password, with and without TLS on the client's side.

    TiDB has no RSA key: without TLS on either side it refuses who asks for one.
    """
    tls = pki.settings("optional", node, allow_cleartext_backend=allowed)
    async with secured(tmp_path, mariadb, pki, tls) as (stack, _):
        assert await outcome(stack, pki.trusting()) == inside
        assert await outcome(stack, None) == plainly

        async def failures() -> dict[str, Any]:
            said = (await stack.nodes())[stack.tidb[0].address]
            return said["login_failures"] or {}

        counted = {"clear_text_password": int(inside == EXPOSED), "denied": int(plainly == 1045)}
        await wait_shown(stack, counted, failures)


@pytest.mark.parametrize("node", ["required", "disabled"])
async def test_where_tls_is_required_of_clients_the_others_are_told(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, node: str
) -> None:
    tls = pki.settings("required", node, allow_cleartext_backend=True)
    async with secured(tmp_path, mariadb, pki, tls) as (stack, _):
        assert await outcome(stack, pki.trusting()) == ("TLSv1.3" if node == "required" else "")
        assert await outcome(stack, None) == 3159
        with pytest.raises(pymysql.OperationalError, match="certificate verify failed"):
            await asyncio.to_thread(visit, stack, ssl.create_default_context())


@pytest.fixture
def misnamed(tmp_path: Path) -> PemFiles:
    """A certificate for another host, of an authority that is trusted."""
    made = PemFiles.create(tmp_path / "misnamed")
    authority = trustme.CA()
    issued = authority.issue_cert("elsewhere.test")
    authority.cert_pem.write_to_path(str(made.ca))
    issued.cert_chain_pems[0].write_to_path(str(made.cert))
    issued.private_key_pem.write_to_path(str(made.key))
    return made


@pytest.mark.parametrize("verify", ["full", "ca"])
async def test_a_node_must_have_the_name_that_it_is_known_by(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, misnamed: PemFiles, verify: str
) -> None:
    tls = pki.settings("optional", "required")
    tls["backend"] |= {"ca": str(misnamed.ca), "verify": verify}
    async with (
        run_cluster(
            tmp_path / "stack", mariadb, arguments=misnamed.arguments(), settings={"tls": tls}
        ) as stack,
        counting_client(stack.sql_port) as visitor,
    ):
        answer = await visitor.log_in()
        if verify == "ca":
            assert error_code(answer) == 0
            return
        assert error_code(answer) == 1105
        assert b"TLS handshake with the TiDB server failed" in answer

        async def told() -> dict[str, Any]:
            said = (await stack.nodes())[stack.tidb[0].address]
            failed = (said["login_failures"] or {}).get("node_tls_failed")
            return {"connects": (said["connect_failures"] or {}).get("tls"), "logins": failed}

        await wait_shown(stack, {"connects": 1, "logins": 1}, told)


def change_user(user: str, password: bytes, plugin: str) -> bytes:
    """The body of COM_CHANGE_USER (MySQL: "Protocol::COM_CHANGE_USER")."""
    return b"".join(
        [user.encode(), b"\0", bytes((len(password),)), password, b"\0", b"\x2d\0", plugin.encode(), b"\0"]
    )


@pytest.mark.parametrize("allowed", [False, True], ids=["forbidden", "allowed"])
async def test_a_change_of_user_exposes_no_password(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, allowed: bool
) -> None:
    tls = pki.settings("optional", "disabled", allow_cleartext_backend=allowed)
    async with (
        secured(tmp_path, mariadb, pki, tls) as (stack, _),
        counting_client(stack.sql_port) as changing,
    ):
        assert error_code(await changing.log_in(tls=pki.trusting())) == 0
        changing.write_command(MySqlCommand.CHANGE_USER, change_user(TOKEN, b"", "mysql_native_password"))
        sequence, question = await changing.read_packet()
        if allowed:
            assert (sequence, question[:21]) == (1, b"\xfe" + CLEAR.encode())
            changing.writer.write(frame(2, PASSWORD.encode() + b"\0"))
            assert error_code((await changing.read_packet())[1]) == 0
            assert error_code(await changing.query("do 1")) == 0
            return
        assert (sequence, error_code(question)) == (1, EXPOSED)
        assert b"tls.allow_cleartext_backend" in question
        assert await changing.read_to_end() == b""

        async def failures() -> dict[str, Any]:
            said = (await stack.nodes())[stack.tidb[0].address]
            return said["login_failures"] or {}

        await wait_shown(stack, {"clear_text_password": 1}, failures)
