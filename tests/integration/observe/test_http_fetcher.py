"""Pages of status ports and of a Prometheus: how they come, and how they do not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from controlplane import address as addresses
from controlplane.config.settings import ClientTls
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.node_metrics import http_fetcher as module
from controlplane.observe.node_metrics.http_fetcher import FetchError, HttpFetcher
from tests.integration.observe.test_status_probe_tls import Files
from tests.support.fake_servers import (
    Handler,
    answer_http,
    http_response,
    refusing_port,
    reset_by_peer,
    run_fake_server,
    send_parts,
)

PAGE = b"a 1\n" * 50_000


async def page(pages: HttpFetcher, url: str, timeout: float = 5.0) -> bytes:
    got = bytearray()
    try:
        await pages.get(url, got.extend, timeout)
    finally:
        await pages.close()
    return bytes(got)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(http_response(200, PAGE), id="plain"),
        pytest.param(http_response(200, gzip.compress(PAGE), "Content-Encoding: gzip"), id="gzip"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PAGE), PAGE),
            id="chunked",
        ),
    ],
)
async def test_a_page_comes_whole(answer: bytes) -> None:
    async with run_fake_server(answer_http(answer)) as peer:
        assert await page(HttpFetcher(None), f"http://{peer.endpoint}/metrics") == PAGE


async def test_one_connection_serves_for_many_pages_and_one_that_ended_is_replaced() -> None:
    async with run_fake_server(answer_http(http_response(200, b"x"), 3, then_close=True)) as peer:
        pages, got = HttpFetcher(None), bytearray()
        for count in range(1, 7):
            await pages.get(f"http://{peer.endpoint}/", got.extend, 5.0)
            assert peer.connections == (count + 2) // 3
            if count == 3:
                assert await peer.connection_ends.get() == "eof"
        await pages.close()
        assert got == b"x" * 6


@pytest.mark.parametrize(
    ("handler", "told"),
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
        pytest.param(send_parts(), "gives no whole answer within 0.2 s", id="silence"),
    ],
)
async def test_what_cannot_be_had_is_told(
    monkeypatch: pytest.MonkeyPatch, handler: Handler, told: str
) -> None:
    monkeypatch.setattr(module, "_MAX_BODY_BYTES", 2000)
    async with run_fake_server(handler) as peer:
        url = f"http://{peer.endpoint}/metrics"
        with pytest.raises(FetchError, match=told) as problem:
            await page(HttpFetcher(None), url, timeout=0.2 if "0.2" in told else 5.0)
        assert str(problem.value).startswith(url)


async def test_an_address_that_cannot_be_is_told() -> None:
    with pytest.raises(FetchError, match="cannot be read"):
        await page(HttpFetcher(None), "http://ä..b/metrics")


async def test_a_port_that_refuses_is_told() -> None:
    with refusing_port() as nobody, pytest.raises(FetchError, match="cannot be connected to"):
        await page(HttpFetcher(None), f"http://{nobody}/metrics")


async def test_a_certificate_is_checked_for_the_name_though_the_address_is_connected_to(
    tmp_path: Path,
) -> None:
    files = Files(tmp_path)
    async with run_fake_server(answer_http(http_response(200, b"x")), files.serving(mutual=True)) as peer:
        port, url = addresses.split(peer.endpoint)[1], f"https://{peer.endpoint}/metrics"
        tls = files.ours(certificate=True)
        assert await page(HttpFetcher(tls, f"tidb-0.tidb:{port}"), url) == b"x"
        assert await page(HttpFetcher(tls, f"127.0.0.1:{port}"), url) == b"x"
        with pytest.raises(FetchError, match="Hostname mismatch"):
            await page(HttpFetcher(tls, f"tidb-1.tidb:{port}"), url)
        with pytest.raises(FetchError, match="cannot be"):
            await page(HttpFetcher(files.ours(certificate=False), f"tidb-0.tidb:{port}"), url)
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await page(HttpFetcher(ReloadingClientContext(ClientTls(), "k"), f"tidb-0.tidb:{port}"), url)


async def test_a_renewed_certificate_is_presented_from_then_on(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with run_fake_server(answer_http(http_response(200, b"x")), files.serving(mutual=True)) as peer:
        pages, got = HttpFetcher(files.ours(certificate=True)), bytearray()
        url = f"https://{peer.endpoint}/metrics"
        await pages.get(url, got.extend, 5.0)
        files.issue("renewed")
        await pages.get(url, got.extend, 5.0)
        await pages.get(url, got.extend, 5.0)
        await pages.close()
        shown = [writer.get_extra_info("peercert")["subjectAltName"] for writer in peer.writers]
    assert shown == [(("DNS", "client.tidevoy"),), (("DNS", "renewed.tidevoy"),)]
