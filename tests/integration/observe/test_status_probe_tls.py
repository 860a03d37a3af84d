"""The probe of the status port over TLS and mutual TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from controlplane import address as addresses
from controlplane.config.settings import ClientTls
from controlplane.errors import ConfigError
from controlplane.model.health import CheckStatus
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.probes import ProbeResult, StatusProbe
from tests.support.fake_servers import STATUS_BODY, answer_http, http_response, run_fake_server, send_parts


class Files:
    """A certificate authority, and what it signed for us, as files."""

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

    def serving(self, *, mutual: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.configure_cert(context)
        if mutual:
            self.authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def ours(self, *, certificate: bool) -> ReloadingClientContext:
        tls = ClientTls(ca=self.ca)
        if certificate:
            tls = ClientTls(ca=self.ca, cert=self.directory / "client.pem", key=self.directory / "client.key")
        return ReloadingClientContext(tls, "health.status.client_tls")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def status(
    endpoint: str, tls: ReloadingClientContext | None, *, host: str = "127.0.0.1", timeout: float = 5.0
) -> ProbeResult:
    probe = StatusProbe(endpoint, host, tls)
    try:
        return await probe.run(timeout)
    finally:
        probe.close()


async def test_https_by_name_while_connecting_to_an_ip(files: Files) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.serving(mutual=False)
    ) as peer:
        right = await status(peer.endpoint, files.ours(certificate=False), host="tidb-0.tidb")
        wrong = await status(peer.endpoint, files.ours(certificate=False), host="other.tidb")
    port = addresses.split(peer.endpoint)[1]
    assert right.status is CheckStatus.PASS
    assert right.reason == f"https://tidb-0.tidb:{port}/status answers"
    assert wrong.status is CheckStatus.FAIL
    assert "presents a certificate that cannot be trusted: Hostname mismatch" in wrong.reason


async def test_a_certificate_of_an_unknown_authority_is_not_trusted(files: Files, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    ours = ReloadingClientContext(ClientTls(ca=other), "health.status.client_tls")
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.serving(mutual=False)
    ) as peer:
        finding = await status(peer.endpoint, ours)
    assert "presents a certificate that cannot be trusted" in finding.reason


async def test_mutual_tls_passes_with_our_certificate_and_fails_without(files: Files) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.serving(mutual=True)
    ) as peer:
        passed = await status(peer.endpoint, files.ours(certificate=True))
        failed = await status(peer.endpoint, files.ours(certificate=False))
    assert passed.status is CheckStatus.PASS
    assert failed.status is CheckStatus.FAIL
    assert "TLS" in failed.reason


async def test_a_tls_connection_is_kept_between_probes(files: Files) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.serving(mutual=True)
    ) as peer:
        probe = StatusProbe(peer.endpoint, "127.0.0.1", files.ours(certificate=True))
        for _ in range(3):
            assert (await probe.run(5.0)).status is CheckStatus.PASS
        assert peer.connections == 1
        probe.close()


async def test_tls_at_one_side_only_fails_with_a_hint(files: Files) -> None:
    async with run_fake_server(
        answer_http(http_response(200, STATUS_BODY)), files.serving(mutual=False)
    ) as peer:
        assert "is TLS, health.status.tls, on at one side only?" in (await status(peer.endpoint, None)).reason
    async with run_fake_server(answer_http(http_response(400, b""))) as peer:
        finding = await status(peer.endpoint, files.ours(certificate=False), timeout=0.3)
    assert finding.status is CheckStatus.FAIL


async def test_a_black_hole_in_the_tls_handshake_ends_in_time(files: Files) -> None:
    async with run_fake_server(send_parts()) as peer:
        finding = await status(peer.endpoint, files.ours(certificate=False), timeout=0.1)
    assert finding.status is CheckStatus.FAIL
    assert "within 0.1 s" in finding.reason


async def test_renewed_certificate_files_are_used_by_the_next_connection(files: Files) -> None:
    ours = files.ours(certificate=True)
    subjects = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subjects.append(writer.get_extra_info("peercert")["subjectAltName"][0][1])
        await answer_http(http_response(200, STATUS_BODY), 1)(reader, writer)

    async with run_fake_server(note, files.serving(mutual=True)) as peer:
        assert (await status(peer.endpoint, ours)).status is CheckStatus.PASS
        (files.directory / "client.key").write_text("half written")
        assert (await status(peer.endpoint, ours)).status is CheckStatus.PASS
        files.issue("renewed")
        assert (await status(peer.endpoint, ours)).status is CheckStatus.PASS
    assert subjects == ["client.tidevoy", "client.tidevoy", "renewed.tidevoy"]


def test_unusable_tls_files_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"health\.status\.client_tls: the TLS files cannot be used"):
        ReloadingClientContext(ClientTls(ca=tmp_path / "ca.pem"), "health.status.client_tls")
