"""The status port: HTTP/1.1, TiDB's status pages, and pages for tests.

Paths and responses: pingcap/tidb pkg/server/http_status.go; `/sim/` is our own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from dataclasses import dataclass

from controlplane.config.settings import ClientTls
from sandbox.tidb_sim.node import GIT_HASH, SimNode
from sandbox.tidb_sim.settings import SimSettings

_MAX_REQUEST_BYTES = 64 * 1024


@dataclass(frozen=True)
class StatusResponse:
    """The response to one request."""

    code: int
    body: bytes = b""
    content_type: str = "application/json"

    def encode(self) -> bytes:
        """Return the response as HTTP/1.1."""
        reasons = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
        reason = reasons.get(self.code, "Internal Server Error")
        head = f"HTTP/1.1 {self.code} {reason}\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def handle_request(
    method: str, path: str, node: SimNode, settings: SimSettings, body: bytes = b""
) -> StatusResponse:
    """Return the response to `method path`; the caller performs a crash."""
    if path == "/sim/crash":
        return StatusResponse(200 if method == "POST" else 405)
    if path == "/sim/vitals" and method == "POST":
        try:
            node.simulated_metrics.set_values(body)
        except ValueError as error:
            return StatusResponse(400, f"{error}\n".encode(), "text/plain")
        return StatusResponse(200)
    if method != "GET":
        return StatusResponse(405)
    if path == "/status":
        if not node.is_healthy:
            return StatusResponse(500)
        return _json_response(
            {
                "connections": node.connections,
                "version": node.server_version,
                "git_hash": GIT_HASH,
                "status": {"init_stats_percentage": 100},
            }
        )
    if path == "/info":
        return _json_response(_info_page(node, settings))
    if path == "/config":
        return _json_response(_config_page(node, settings))
    if path == "/metrics":
        return StatusResponse(200, _metrics_page(node).encode(), "text/plain; version=0.0.4")
    if path == "/sim/violations":
        return _json_response({"violations": node.violations})
    return StatusResponse(404)


def cluster_tls_context(tls: ClientTls | None) -> ssl.SSLContext | None:
    """Return TLS that requires client certificates (TiDB's `cluster-ssl-*`); None without a certificate."""
    if tls is None or tls.cert is None or tls.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class StatusServer:
    """The listening status port; it answers without waiting."""

    def __init__(self, node: SimNode, settings: SimSettings) -> None:
        self._node, self._settings = node, settings
        self._connections: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        loop = asyncio.get_running_loop()
        tls = cluster_tls_context(self._settings.cluster_tls)
        self._server = await loop.create_server(self._create_connection, sock=listener, ssl=tls)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _create_connection(self) -> _StatusConnection:
        return _StatusConnection(self._node, self._settings, self._connections)


class _StatusConnection(asyncio.Protocol):
    """One HTTP connection that serves its requests one by one."""

    def __init__(self, node: SimNode, settings: SimSettings, connections: set[asyncio.Transport]) -> None:
        self._node, self._settings, self._connections = node, settings, connections
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._transport.is_closing() and self._process_request():
            pass
        if len(self._buffer) > _MAX_REQUEST_BYTES:
            self._transport.abort()

    def _process_request(self) -> bool:
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return False
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in fields)}
        length = headers.get("content-length", "0")
        words = line.split()
        if len(words) != 3 or not length.isdigit():
            self._transport.close()
            return False
        if len(rest) < int(length):
            return False
        body, self._buffer = rest[: int(length)], rest[int(length) :]
        method, path = words[0], words[1].partition("?")[0]
        reply = handle_request(method, path, self._node, self._settings, body)
        self._transport.write(reply.encode())
        if words[2] == "HTTP/1.0" or headers.get("connection", "").lower() == "close":
            self._transport.close()
        if path == "/sim/crash" and reply.code == 200:
            self._node.crash()
        return True


def _json_response(value: object) -> StatusResponse:
    return StatusResponse(200, json.dumps(value).encode())


def _info_page(node: SimNode, settings: SimSettings) -> dict[str, object]:
    return {
        "ddl_id": node.name,
        "ip": settings.advertise_address,
        "listening_port": node.sql_port,
        "status_port": node.status_port,
        "lease": "45s",
        "start_timestamp": node.started_at,
        "labels": dict(node.labels),
        "server_id": node.sql_port,
        "version": node.server_version,
        "git_hash": GIT_HASH,
        "is_owner": False,
        "max_procs": os.cpu_count(),
        "gogc": 500,
    }


def _config_page(node: SimNode, settings: SimSettings) -> dict[str, object]:
    return {
        "host": settings.host,
        "advertise-address": settings.advertise_address,
        "port": node.sql_port,
        "graceful-wait-before-shutdown": settings.graceful_wait,
        "labels": dict(node.labels),
        "security": {
            "session-token-signing-cert": settings.signing_cert,
            "session-token-signing-key": settings.signing_key,
        },
        "status": {"status-host": settings.status_host, "status-port": node.status_port},
    }


def _metrics_page(node: SimNode) -> str:
    values = (
        ("process_start_time_seconds", "", node.started_at),
        ("tidb_server_connections", '{resource_group="default"}', node.connections),
    )
    own = "".join(f"# TYPE {name} gauge\n{name}{labels} {value}\n" for name, labels, value in values)
    return own + node.simulated_metrics.render()
