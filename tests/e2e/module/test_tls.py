"""TLS between clients and Envoy's module and between the module and nodes; protection of passwords."""

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
    get_envoys,
    run_cluster,
    wait_for_values,
)
from tests.support.tidb_sim_clients import error_code

pytestmark = pytest.mark.timeout(180)

PASSWORD = "geheim"
SHA2, TOKEN = "fleet_sha2", "fleet_token"
ACCOUNTS = {
    SHA2: f"identified with 'caching_sha2_password' by '{PASSWORD}'",
    TOKEN: f"identified with 'tidb_auth_token' by '{PASSWORD}'",
}
CLEAR_PASSWORD_PLUGIN = "mysql_clear_password"
CLEAR_TEXT_ERROR = 1105


@dataclass(frozen=True)
class Pki:
    """The certificates that Envoy and nodes present, each issued by its own CA."""

    clients: PemFiles
    nodes: PemFiles

    def settings(self, client: str, node: str, **other_settings: Any) -> dict[str, Any]:
        """Return the settings' section `tls` with these modes for clients and nodes."""
        certificate = {"cert": str(self.clients.cert), "key": str(self.clients.key)}
        trust = {"ca": str(self.nodes.ca), "verify": "full"}
        return {
            "client": {"mode": client, **(certificate if client != "disabled" else {})},
            "backend": {"mode": node, **(trust if node != "disabled" else {})},
            **other_settings,
        }

    def client_context(self) -> ssl.SSLContext:
        """Return a TLS context with which a client verifies Envoy's name and CA."""
        return ssl.create_default_context(cafile=str(self.clients.ca))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    directory = tmp_path_factory.mktemp("pki")
    return Pki(PemFiles.create(directory / "clients"), PemFiles.create(directory / "nodes"))


@asynccontextmanager
async def run_with_accounts(
    directory: Path, mariadb: MariaDb, pki: Pki, tls: dict[str, Any]
) -> AsyncIterator[tuple[LocalCluster, CountingClient]]:
    """Run a cluster with one TLS node and ACCOUNTS. Yield it, and root's direct session on the node."""
    settings = {"tls": tls}
    async with (
        run_cluster(directory, mariadb, arguments=pki.nodes.arguments(), settings=settings) as stack,
        counting_client(stack.tidb[0].port) as root,
    ):
        assert (await get_envoys(stack))["envoy-1"]["filter"] == "module"
        assert error_code(await root.log_in()) == 0
        for name, clause in ACCOUNTS.items():
            assert error_code(await root.query(f"create user {name}@'%' {clause}")) == 0
        try:
            yield stack, root
        finally:
            for name in ACCOUNTS:
                assert error_code(await root.query(f"drop user {name}@'%'")) == 0


def log_in(stack: LocalCluster, client_context: ssl.SSLContext | None, user: str = SHA2) -> str:
    """Log in with pymysql. Return the TLS version between Envoy and the node, empty without TLS."""
    with (
        pymysql.connect(
            host="127.0.0.1",
            port=stack.sql_port,
            user=user,
            password=PASSWORD,
            ssl=client_context,
            ssl_disabled=client_context is None,
            read_timeout=30,
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("show status like 'Ssl_version'")
        ((_, version),) = cursor.fetchall()
        return str(version)


async def try_login(stack: LocalCluster, client_context: ssl.SSLContext | None) -> str | int:
    """Return the result of `log_in`, or the code of its error."""
    try:
        return await asyncio.to_thread(log_in, stack, client_context)
    except pymysql.MySQLError as error:
        return int(error.args[0])


@pytest.mark.parametrize(
    ("node", "allowed", "with_tls", "without_tls"),
    [
        pytest.param("required", False, "TLSv1.3", "TLSv1.3", id="TLS to the node"),
        pytest.param("disabled", False, CLEAR_TEXT_ERROR, 1045, id="none to the node"),
        pytest.param("disabled", True, "", 1045, id="none to the node, allowed"),
    ],
)
async def test_password_is_never_sent_in_clear_text_unless_allowed(
    tmp_path: Path,
    mariadb: MariaDb,
    pki: Pki,
    node: str,
    allowed: bool,
    with_tls: str | int,
    without_tls: str | int,
) -> None:
    """Log in to a caching_sha2_password account with and without TLS on the client's side.

    If neither the client nor the node uses TLS, the client requests TiDB's RSA key. TiDB has no such key and
    denies the login.
    """
    tls = pki.settings("optional", node, allow_cleartext_backend=allowed)
    async with run_with_accounts(tmp_path, mariadb, pki, tls) as (stack, _):
        assert await try_login(stack, pki.client_context()) == with_tls
        assert await try_login(stack, None) == without_tls

        async def failures() -> dict[str, Any]:
            node_view = (await stack.nodes())[stack.tidb[0].address]
            return node_view["login_failures"] or {}

        expected = {
            "clear_text_password": int(with_tls == CLEAR_TEXT_ERROR),
            "denied": int(without_tls == 1045),
        }
        await wait_for_values(stack, expected, failures)


@pytest.mark.parametrize("node", ["required", "disabled"])
async def test_plain_clients_are_rejected_if_tls_is_required(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, node: str
) -> None:
    tls = pki.settings("required", node, allow_cleartext_backend=True)
    async with run_with_accounts(tmp_path, mariadb, pki, tls) as (stack, _):
        assert await try_login(stack, pki.client_context()) == ("TLSv1.3" if node == "required" else "")
        assert await try_login(stack, None) == 3159
        with pytest.raises(pymysql.OperationalError, match="certificate verify failed"):
            await asyncio.to_thread(log_in, stack, ssl.create_default_context())


@pytest.fixture
def misnamed_certificate(tmp_path: Path) -> PemFiles:
    """Create a certificate for another host, issued by a trusted CA."""
    files = PemFiles.create(tmp_path / "misnamed")
    ca = trustme.CA()
    certificate = ca.issue_cert("elsewhere.test")
    ca.cert_pem.write_to_path(str(files.ca))
    certificate.cert_chain_pems[0].write_to_path(str(files.cert))
    certificate.private_key_pem.write_to_path(str(files.key))
    return files


@pytest.mark.parametrize("verify", ["full", "ca"])
async def test_node_certificate_must_match_the_nodes_name(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, misnamed_certificate: PemFiles, verify: str
) -> None:
    tls = pki.settings("optional", "required")
    tls["backend"] |= {"ca": str(misnamed_certificate.ca), "verify": verify}
    async with (
        run_cluster(
            tmp_path / "stack", mariadb, arguments=misnamed_certificate.arguments(), settings={"tls": tls}
        ) as stack,
        counting_client(stack.sql_port) as client,
    ):
        answer = await client.log_in()
        if verify == "ca":
            assert error_code(answer) == 0
            return
        assert error_code(answer) == 1105
        assert b"TLS handshake with the TiDB server failed" in answer

        async def failure_counts() -> dict[str, Any]:
            node_view = (await stack.nodes())[stack.tidb[0].address]
            login_failures = (node_view["login_failures"] or {}).get("node_tls_failed")
            return {"connects": (node_view["connect_failures"] or {}).get("tls"), "logins": login_failures}

        await wait_for_values(stack, {"connects": 1, "logins": 1}, failure_counts)


def change_user(user: str, password: bytes, plugin: str) -> bytes:
    """Return the body of COM_CHANGE_USER (MySQL: "Protocol::COM_CHANGE_USER")."""
    return b"".join(
        [user.encode(), b"\0", bytes((len(password),)), password, b"\0", b"\x2d\0", plugin.encode(), b"\0"]
    )


@pytest.mark.parametrize("allowed", [False, True], ids=["forbidden", "allowed"])
async def test_change_user_exposes_no_password(
    tmp_path: Path, mariadb: MariaDb, pki: Pki, allowed: bool
) -> None:
    tls = pki.settings("optional", "disabled", allow_cleartext_backend=allowed)
    async with (
        run_with_accounts(tmp_path, mariadb, pki, tls) as (stack, _),
        counting_client(stack.sql_port) as client,
    ):
        assert error_code(await client.log_in(tls=pki.client_context())) == 0
        client.write_command(MySqlCommand.CHANGE_USER, change_user(TOKEN, b"", "mysql_native_password"))
        sequence, response = await client.read_packet()
        if allowed:
            assert (sequence, response[:21]) == (1, b"\xfe" + CLEAR_PASSWORD_PLUGIN.encode())
            client.writer.write(frame(2, PASSWORD.encode() + b"\0"))
            assert error_code((await client.read_packet())[1]) == 0
            assert error_code(await client.query("do 1")) == 0
            return
        assert (sequence, error_code(response)) == (1, CLEAR_TEXT_ERROR)
        assert b"tls.allow_cleartext_backend" in response
        assert await client.read_to_end() == b""

        async def failures() -> dict[str, Any]:
            node_view = (await stack.nodes())[stack.tidb[0].address]
            return node_view["login_failures"] or {}

        await wait_for_values(stack, {"clear_text_password": 1}, failures)
