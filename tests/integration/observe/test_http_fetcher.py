"""The HTTP fetcher: complete responses, connection reuse, and errors."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from controlplane import address as addresses
from controlplane.config.own_tls import ClientTls
from controlplane.observe.node_metrics import http_fetcher as module
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher
from tests.integration.observe.test_status_probe_tls import TlsFiles, client_context
from tests.support.fake_servers import (
    Handler,
    answer_http,
    http_response,
    refusing_port,
    reset_by_peer,
    run_fake_server,
    send_parts,
)

BODY = b"a 1\n" * 50_000


async def fetch(fetcher: HttpFetcher, url: str, timeout: float = 5.0) -> bytes:
    try:
        return await fetcher.get(url, timeout)
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(http_response(200, BODY), id="plain"),
        pytest.param(http_response(200, gzip.compress(BODY), "Content-Encoding: gzip"), id="gzip"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
            id="chunked",
        ),
    ],
)
async def test_body_is_fetched_completely(answer: bytes) -> None:
    async with run_fake_server(answer_http(answer)) as peer:
        assert await fetch(HttpFetcher(None), f"http://{peer.endpoint}/metrics") == BODY


async def test_connection_is_reused_and_replaced_when_closed() -> None:
    async with run_fake_server(answer_http(http_response(200, b"x"), 3, then_close=True)) as peer:
        fetcher = HttpFetcher(None)
        for count in range(1, 7):
            assert await fetcher.get(f"http://{peer.endpoint}/", 5.0) == b"x"
            assert peer.connections == (count + 2) // 3
            if count == 3:
                assert await peer.connection_ends.get() == "eof"
        await fetcher.close()


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        pytest.param(answer_http(http_response(500, b"")), "answers HTTP 500", id="other code"),
        pytest.param(answer_http(http_response(302, b"", "Location: /x")), "answers HTTP 302", id="redirect"),
        pytest.param(answer_http(http_response(200, b"x" * 2001)), "answers with more than", id="too long"),
        pytest.param(
            answer_http(http_response(200, gzip.compress(b"x" * 2001), "Content-Encoding: gzip")),
            "answers with more than",
            id="too long unpacked",
        ),
        pytest.param(
            answer_http(http_response(200, b"no gzip", "Content-Encoding: gzip")),
            "cannot be read",
            id="bad gzip",
        ),
        pytest.param(
            answer_http(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", then_close=True, times=1),
            "cannot be read",
            id="cut off",
        ),
        pytest.param(send_parts(b"SSH-2.0-OpenSSH\r\n\r\n"), "cannot be read", id="no HTTP"),
        pytest.param(reset_by_peer, "cannot be read", id="reset"),
        pytest.param(send_parts(), "does not answer completely within 0.2 s", id="silence"),
    ],
)
async def test_fetch_errors_name_url_and_reason(
    monkeypatch: pytest.MonkeyPatch, handler: Handler, reason: str
) -> None:
    monkeypatch.setattr(module, "_MAX_BODY_BYTES", 2000)
    async with run_fake_server(handler) as peer:
        url = f"http://{peer.endpoint}/metrics"
        with pytest.raises(FetchError, match=reason) as error:
            await fetch(HttpFetcher(None), url, timeout=0.2 if "0.2" in reason else 5.0)
        assert str(error.value).startswith(url)


async def test_invalid_url_is_a_fetch_error() -> None:
    with pytest.raises(FetchError, match="cannot be read"):
        await fetch(HttpFetcher(None), "http://ä..b/metrics")


async def test_refused_connection_is_a_fetch_error() -> None:
    with refusing_port() as endpoint, pytest.raises(FetchError, match="cannot be reached"):
        await fetch(HttpFetcher(None), f"http://{endpoint}/metrics")


async def test_certificate_is_verified_for_the_host_name(
    tmp_path: Path,
) -> None:
    files = TlsFiles(tmp_path)
    async with run_fake_server(
        answer_http(http_response(200, b"x")), files.server_context(mutual=True)
    ) as peer:
        port, url = addresses.split(peer.endpoint)[1], f"https://{peer.endpoint}/metrics"
        tls = files.client_context(certificate=True)
        assert await fetch(HttpFetcher(tls, f"tidb-0.tidb:{port}"), url) == b"x"
        assert await fetch(HttpFetcher(tls, f"127.0.0.1:{port}"), url) == b"x"
        with pytest.raises(FetchError, match="Hostname mismatch"):
            await fetch(HttpFetcher(tls, f"tidb-1.tidb:{port}"), url)
        with pytest.raises(FetchError, match="cannot be"):
            await fetch(HttpFetcher(files.client_context(certificate=False), f"tidb-0.tidb:{port}"), url)
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(HttpFetcher(client_context(ClientTls()), f"tidb-0.tidb:{port}"), url)


async def test_renewed_client_certificate_is_presented(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    async with run_fake_server(
        answer_http(http_response(200, b"x")), files.server_context(mutual=True)
    ) as peer:
        tls = files.client_context(certificate=True)
        fetcher = HttpFetcher(tls)
        url = f"https://{peer.endpoint}/metrics"
        await fetcher.get(url, 5.0)
        files.issue("renewed")
        await tls.refresh()
        await fetcher.get(url, 5.0)
        await fetcher.get(url, 5.0)
        await fetcher.close()
        subjects = [writer.get_extra_info("peercert")["subjectAltName"] for writer in peer.writers]
    assert subjects == [(("DNS", "client.tidevoy"),), (("DNS", "renewed.tidevoy"),)]
