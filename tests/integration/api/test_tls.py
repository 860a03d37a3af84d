"""The REST API over TLS: client certificates, tokens, and the reload of a changed server certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
import trustme
import uvicorn

from api.auth.tls import HttpProtocol, load_server_context
from api.server import _accept_with_tls
from controlplane import address as addresses
from controlplane.config.loader import read_settings
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from sandbox.ports import Ports
from tests.support.controlplane.api_server import run_api_server, stored_events
from tests.support.controlplane.authenticated_api import (
    OPERATOR_TOKEN,
    TOKENS,
    VIEWER_TOKEN,
    bearer_header,
    settings_with_tokens,
)
from tests.support.waiting import wait_until

NODE = "/v1/nodes/127.0.0.1:4000"


class Authority:
    """A CA that issues the server's certificate and client certificates."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.directory = trustme.CA(), directory
        self.ca_file = directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.issue()

    def issue(self) -> bytes:
        """Issue a new server certificate, write it to the files, and return its DER encoding."""
        leaf = self.ca.issue_cert("127.0.0.1")
        leaf.private_key_pem.write_to_path(str(self.directory / "server.key"))
        leaf.cert_chain_pems[0].write_to_path(str(self.directory / "server.pem"))
        return ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())

    def settings(self, *, client_ca: bool = True) -> dict[str, Any]:
        """Return the setting `api.tls`."""
        ca = {"client_ca": str(self.ca_file)} if client_ca else {}
        files = {"cert": self.directory / "server.pem", "key": self.directory / "server.key"}
        return {name: str(path) for name, path in files.items()} | ca

    def client(
        self, *names: str, of: trustme.CA | None = None, common_name: str | None = None
    ) -> ssl.SSLContext:
        """Return a client context with a certificate for these names; without names, no certificate."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if names:
            (of or self.ca).issue_cert(*names, common_name=common_name).configure_cert(context)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


CLIENTS = [{"name": "ops.example", "role": "operator"}, {"name": "dash.example", "role": "viewer"}]


async def request_status(
    server_settings: Settings, context: ssl.SSLContext, method: str = "GET", **options: Any
) -> int:
    """Return the HTTP status of a request; 0 if there is no response."""
    url = f"https://{server_settings.api.listen}"
    async with httpx2.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=10) as http:
        try:
            path = "/v1/nodes" if method == "GET" else f"{NODE}/drain"
            return (await http.request(method, path, **options)).status_code
        except httpx2.TransportError:
            return 0


async def test_client_certificates_without_tokens(tmp_path: Path, ports: Ports, authority: Authority) -> None:
    server_settings = settings_with_tokens(
        tmp_path, ports, tokens=[], clients=CLIENTS, tls=authority.settings()
    )
    async with run_api_server(server_settings):
        operator, viewer = authority.client("ops.example"), authority.client("dash.example")
        assert [
            await request_status(server_settings, operator),
            await request_status(server_settings, operator, "POST"),
        ] == [200, 202]
        assert [
            await request_status(server_settings, viewer),
            await request_status(server_settings, viewer, "POST"),
        ] == [200, 403]
        assert await request_status(server_settings, authority.client("other.example")) == 401
        # The server uses the common name only if the certificate has no subject alternative name.
        assert (
            await request_status(
                server_settings, authority.client("other.example", common_name="ops.example")
            )
            == 401
        )
        assert await request_status(server_settings, authority.client()) == 0
        assert await request_status(server_settings, authority.client("ops.example", of=trustme.CA())) == 0


async def test_client_certificates_or_tokens(tmp_path: Path, ports: Ports, authority: Authority) -> None:
    server_settings = settings_with_tokens(tmp_path, ports, clients=CLIENTS, tls=authority.settings())
    async with run_api_server(server_settings):
        no_certificate, viewer = authority.client(), authority.client("dash.example")
        assert await request_status(server_settings, no_certificate) == 401
        assert (
            await request_status(
                server_settings, no_certificate, "POST", headers=bearer_header(OPERATOR_TOKEN)
            )
            == 202
        )
        assert await request_status(server_settings, viewer) == 200
        # A token, even a wrong one, takes precedence over the certificate.
        assert (
            await request_status(server_settings, viewer, "POST", headers=bearer_header(OPERATOR_TOKEN))
            == 202
        )
        assert await request_status(server_settings, viewer, headers=bearer_header("wrong")) == 401
        assert await request_status(server_settings, authority.client("ops.example", of=trustme.CA())) == 0


async def test_tls_with_tokens(tmp_path: Path, ports: Ports, authority: Authority) -> None:
    server_settings = settings_with_tokens(tmp_path, ports, tls=authority.settings(client_ca=False))
    async with run_api_server(server_settings) as server:
        url, context = f"https://{server_settings.api.listen}", authority.client()
        async with httpx2.AsyncClient(base_url=url, verify=context, trust_env=False) as http:
            response = await http.get("/v1/nodes", headers=bearer_header(VIEWER_TOKEN))
            assert response.status_code == 200
            assert response.headers["strict-transport-security"] == "max-age=31536000"
            login = await http.post("/login", data={"token": VIEWER_TOKEN})
            assert "Secure" in login.headers["set-cookie"].split("; ")
            assert (await http.get("/v1/nodes", headers=bearer_header("wrong"))).status_code == 401
        with pytest.raises(httpx2.TransportError):  # plain HTTP to a port that speaks TLS
            await server.http.get("/healthz")


async def test_new_certificate_is_loaded_without_a_restart(
    tmp_path: Path, ports: Ports, authority: Authority
) -> None:
    server_settings = settings_with_tokens(tmp_path, ports, tls=authority.settings(client_ca=False))
    url = f"https://{server_settings.api.listen}"
    host, port = addresses.split(server_settings.api.listen)
    viewer = bearer_header(VIEWER_TOKEN)
    async with (
        run_api_server(server_settings),
        httpx2.AsyncClient(base_url=url, verify=authority.client(), trust_env=False, timeout=10) as http,
    ):

        async def has_event(kind: str) -> bool:
            return kind in {event["kind"] for event in await stored_events(http, **viewer)}

        def serves_new_certificate() -> bool:
            pem = ssl.get_server_certificate((host, int(port)))
            return ssl.PEM_cert_to_DER_cert(pem) == expected

        (tmp_path / "server.key").write_text("nonsense")
        await wait_until(lambda: has_event("api.certificates_rejected"))
        # The old certificate stays in use.
        assert await request_status(server_settings, authority.client(), headers=viewer) == 200
        expected = authority.issue()
        await wait_until(lambda: asyncio.to_thread(serves_new_certificate))
        assert await request_status(server_settings, authority.client(), headers=viewer) == 200
        assert await has_event("api.certificates_reloaded")  # `http` still uses its old connection


async def test_connections_that_are_being_accepted_survive_a_new_certificate(
    tmp_path: Path, ports: Ports, authority: Authority
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request is sent")

    server_settings = settings_with_tokens(tmp_path, ports, tls=authority.settings(client_ca=False))
    assert server_settings.api.tls is not None
    engine = cast(Engine, SimpleNamespace(settings=server_settings))
    server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    server.servers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        await _accept_with_tls(server, listener, load_server_context(server_settings.api.tls), engine)
        for turns in range(6):
            client = socket.create_connection(listener.getsockname())
            for _ in range(turns):  # the connection is in the backlog, then accepted, then served
                await asyncio.sleep(0)
            await _accept_with_tls(server, listener, load_server_context(server_settings.api.tls), engine)
            async with asyncio.timeout(10):
                _, writer = await asyncio.open_connection(
                    sock=client, ssl=authority.client(), server_hostname="127.0.0.1"
                )
            writer.close()
            await writer.wait_closed()
        await server.shutdown()


async def test_replaced_client_ca_no_longer_authenticates(
    tmp_path: Path, ports: Ports, authority: Authority
) -> None:
    server_settings = settings_with_tokens(
        tmp_path, ports, tokens=[], clients=CLIENTS, tls=authority.settings()
    )
    async with run_api_server(server_settings):
        old_client = authority.client("ops.example")
        assert await request_status(server_settings, old_client) == 200
        successor = trustme.CA()
        successor.cert_pem.write_to_path(str(authority.ca_file))
        new_client = ssl.create_default_context()
        authority.ca.configure_trust(new_client)  # the server keeps its certificate, which this CA issued
        successor.issue_cert("ops.example").configure_cert(new_client)

        async def is_replaced() -> bool:
            return await request_status(server_settings, new_client) == 200

        await wait_until(is_replaced)
        assert await request_status(server_settings, old_client) == 0


def test_invalid_key_file_is_a_config_error(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "server.key").write_text("nonsense")
    file = tmp_path / "tidevoy.yaml"
    file.write_text(
        f"api:\n  tls:\n    cert: {tmp_path}/server.pem\n    key: {tmp_path}/server.key\n"
        f"  tokens: [{{name: a, role: viewer, sha256: {TOKENS[0]['sha256']}}}]\n"
    )
    with pytest.raises(Exception, match=r"api\.tls\.key: .* is not a key in PEM"):
        read_settings(file, {})
