"""The status probe over TLS and mutual TLS."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from controlplane import address as addresses
from controlplane.config.own_tls import ClientTls
from controlplane.errors import ConfigError
from controlplane.model.health import CheckStatus
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.probes import ProbeResult, StatusProbe
from tests.support.fake_servers import STATUS_BODY, answer_http, http_response, run_fake_server, send_parts


class TlsFiles:
    """The files of a certificate authority and of the certificates that it issued."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.directory = directory
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.server = self.authority.issue_cert("tidb-0.tidb", "127.0.0.1")
        self.issue("client")

    def issue(self, name: str) -> None:
        certificate = self.authority.issue_cert(f"{name}.tidevoy")
        certificate.private_key_pem.write_to_path(str(self.directory / "client.key"))
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "client.pem"))

    def server_context(self, *, mutual: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.configure_cert(context)
        if mutual:
            self.authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def client_tls(self) -> ClientTls:
        return ClientTls(ca=self.ca, cert=self.directory / "client.pem", key=self.directory / "client.key")

    def client_context(self, *, certificate: bool) -> ReloadingClientContext:
        return client_context(self.client_tls if certificate else ClientTls(ca=self.ca))


def client_context(
    tls: ClientTls, on_event: Callable[[str, str, str], None] = lambda *_: None
) -> ReloadingClientContext:
    return ReloadingClientContext(tls, ("health", "status", "client_tls"), time.time, on_event)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(tmp_path)


async def probe_status(
    endpoint: str, tls: ReloadingClientContext | None, *, host: str = "127.0.0.1", timeout: float = 5.0
) -> ProbeResult:
    probe = StatusProbe(endpoint, host, tls)
    try:
        return await probe.run(timeout)
    finally:
        probe.close()


async def test_certificate_is_verified_for_the_host_name(files: TlsFiles) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=False)
    ) as peer:
        passed = await probe_status(
            peer.endpoint, files.client_context(certificate=False), host="tidb-0.tidb"
        )
        failed = await probe_status(peer.endpoint, files.client_context(certificate=False), host="other.tidb")
    port = addresses.split(peer.endpoint)[1]
    assert passed.status is CheckStatus.PASS
    assert passed.reason == f"https://tidb-0.tidb:{port}/status answers"
    assert failed.status is CheckStatus.FAIL
    assert "presents a certificate that cannot be trusted: Hostname mismatch" in failed.reason


async def test_certificate_of_an_unknown_authority_fails(files: TlsFiles, tmp_path: Path) -> None:
    other_ca = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other_ca))
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=False)
    ) as peer:
        result = await probe_status(peer.endpoint, client_context(ClientTls(ca=other_ca)))
    assert "presents a certificate that cannot be trusted" in result.reason


async def test_mutual_tls_needs_our_certificate(files: TlsFiles) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=True)
    ) as peer:
        passed = await probe_status(peer.endpoint, files.client_context(certificate=True))
        failed = await probe_status(peer.endpoint, files.client_context(certificate=False))
    assert passed.status is CheckStatus.PASS
    assert failed.status is CheckStatus.FAIL
    assert "TLS" in failed.reason


async def test_tls_connection_is_reused(files: TlsFiles) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=True)
    ) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", files.client_context(certificate=True))
        for _ in range(3):
            assert (await probe.run(5.0)).status is CheckStatus.PASS
        assert peer.connections == 1
        probe.close()


async def test_tls_on_one_side_only_fails_with_a_hint(files: TlsFiles) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=False)
    ) as peer:
        assert (
            "is TLS, health.status.tls, on at one side only?"
            in (await probe_status(peer.endpoint, None)).reason
        )
    async with run_fake_server(answer_http(http_response(400, b""))) as peer:
        result = await probe_status(peer.endpoint, files.client_context(certificate=False), timeout=0.3)
    assert result.status is CheckStatus.FAIL


async def test_silent_tls_handshake_fails_at_the_timeout(files: TlsFiles) -> None:
    async with run_fake_server(send_parts()) as peer:
        result = await probe_status(peer.endpoint, files.client_context(certificate=False), timeout=0.1)
    assert result.status is CheckStatus.FAIL
    assert "within 0.1 s" in result.reason


async def test_renewed_certificate_is_used_by_the_next_connection(files: TlsFiles) -> None:
    events: list[tuple[str, str, str]] = []
    tls = client_context(files.client_tls, lambda *event: events.append(event))
    subjects = []

    async def record_subject(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subjects.append(writer.get_extra_info("peercert")["subjectAltName"][0][1])
        await answer_http(http_response(200, STATUS_BODY), 1)(reader, writer)

    async with run_fake_server(record_subject, files.server_context(mutual=True)) as peer:
        assert (await probe_status(peer.endpoint, tls)).status is CheckStatus.PASS
        (files.directory / "client.key").write_text("half written")
        await tls.refresh()
        assert (await probe_status(peer.endpoint, tls)).status is CheckStatus.PASS
        assert events == []
        files.issue("renewed")
        await tls.refresh()
        assert (await probe_status(peer.endpoint, tls)).status is CheckStatus.PASS
    assert subjects == ["client.tidevoy", "client.tidevoy", "renewed.tidevoy"]
    assert [kind for kind, _, _ in events] == ["health.certificates_reloaded"]


async def test_unreadable_client_certificate_is_reported_once_and_shown_by_the_check(files: TlsFiles) -> None:
    events: list[tuple[str, str, str]] = []
    tls = client_context(files.client_tls, lambda *event: events.append(event))
    (files.directory / "client.pem").unlink()
    for _ in range(5):
        await tls.refresh()
    ((kind, subject, message),) = events
    assert (kind, subject) == ("health.certificates_rejected", "health.status.client_tls")
    problem = f"{files.directory}/client.pem cannot be read: No such file or directory"
    assert message == f"the old certificates stay in use: {problem}"
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.server_context(mutual=True)
    ) as peer:
        result = await probe_status(peer.endpoint, tls)
        assert result.status is CheckStatus.PASS  # with the old certificate
        assert result.reason.endswith(f"; health.status.client_tls: {problem}")
        files.issue("renewed")
        await tls.refresh()
        assert "client_tls" not in (await probe_status(peer.endpoint, tls)).reason


def test_unusable_tls_files_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"client_tls\.ca: .* is not a certificate in PEM format"):
        client_context(ClientTls(ca=tmp_path / "ca.pem"))
