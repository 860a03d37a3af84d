"""The scripts that the chart runs in containers."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme

from tests.support.kubernetes.values_schema import CHART

FILES = CHART / "files"
TIMEOUT_SECONDS = 20.0
# Prints the number of reloads.
FAKE_CONTROL_PLANE = """
import signal, sys
count = 0
def on_reload(*_):
    global count
    count += 1
    print(count, flush=True)
signal.signal(signal.SIGHUP, on_reload)
print("ready", flush=True)
while True:
    signal.pause()
"""


async def read_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


async def test_reloader_signals_control_plane_once_for_each_change(tmp_path: Path) -> None:
    """Only the process of this test has the path of the file, so it signals no other process."""
    config = tmp_path / "tidevoy.yaml"
    config.write_text("{}")
    script = str(FILES / "reload.sh")
    serve = (sys.executable, "-c", FAKE_CONTROL_PLANE, "serve", "--config", str(config))
    async with running(*serve) as control_plane, running("sh", script, str(config), "0.05") as reloader:
        assert await read_line(control_plane) == "ready"
        assert await read_line(reloader) == f"watching {config}"
        for number, text in enumerate(("a: 1", "a: 2"), start=1):
            new = tmp_path / "new"
            new.write_text(text)
            new.replace(config)
            assert "has changed" in await read_line(reloader)
            assert await read_line(control_plane) == str(number)


@contextmanager
def serving(answer: tuple[int, bytes], tls: ssl.SSLContext) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve one answer by HTTPS. Yield the port, and the paths and tokens of the requests."""
    requests: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers.get("Authorization", "")))
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield str(server.server_address[1]), requests
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def node_zone(account: Path, port: str, label: str) -> subprocess.CompletedProcess[str]:
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    command = [sys.executable, str(FILES / "node-zone.py"), str(account), "node-1", label]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )


def test_zone_is_read_from_label_of_the_node(
    tmp_path: Path, authority: trustme.CA, server_tls: ssl.SSLContext
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret\n")
    node = {"metadata": {"labels": {"topology.kubernetes.io/zone": "zone-b"}}}
    with serving((200, json.dumps(node).encode()), server_tls) as (port, requests):
        assert node_zone(tmp_path, port, "topology.kubernetes.io/zone").stdout == "zone-b\n"
        assert node_zone(tmp_path, port, "rack").stdout == "\n"
    assert requests == [("/api/v1/nodes/node-1", "Bearer secret")] * 2


def test_missing_right_to_read_nodes_fails_the_init_container(
    tmp_path: Path, authority: trustme.CA, server_tls: ssl.SSLContext
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret")
    with serving((403, b"{}"), server_tls) as (port, _):
        result = node_zone(tmp_path, port, "topology.kubernetes.io/zone")
    assert result.returncode != 0
    assert "403" in result.stderr


def connection_test(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FILES / "connection-test.py")]
    return subprocess.run(
        command,
        env={"ATTEMPTS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@contextmanager
def greeting(packet: bytes) -> Iterator[str]:
    """Serve one packet of the MySQL protocol to one client. Yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(packet)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


def packet(payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "little") + b"\0" + payload


def test_connection_test_reads_greeting() -> None:
    with greeting(packet(b"\x0a8.0.11-TiDB-v8.5.5\0" + bytes(60))) as address:
        result = connection_test(SQL=address)
    assert (result.returncode, result.stdout) == (0, f"{address}: 8.0.11-TiDB-v8.5.5\n")


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (packet(b"\xff\x51\x04Tidevoy: no TiDB server is in service"), "no TiDB server is in service"),
        (b"", "closed without a greeting"),
    ],
)
def test_connection_test_reports_error_of_envoy(sent: bytes, text: str) -> None:
    with greeting(sent) as address:
        result = connection_test(SQL=address)
    assert result.returncode == 1
    assert text in result.stderr


def test_connection_test_reports_reasons_of_readyz(
    tmp_path: Path, authority: trustme.CA, server_tls: ssl.SSLContext
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    variables = {"CA_FILE": str(tmp_path / "ca.crt")}
    for answer, code in (((200, b"ok"), 0), ((503, b"no node is active"), 1)):
        with serving(answer, server_tls) as (port, requests):
            result = connection_test(READYZ=f"https://127.0.0.1:{port}/readyz", **variables)
        assert requests == [("/readyz", "")]
        assert result.returncode == code
        assert code == 0 or "503 no node is active" in result.stderr


def test_connection_test_without_target_fails() -> None:
    assert connection_test().returncode == 1
