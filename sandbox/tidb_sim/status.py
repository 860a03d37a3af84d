"""The status port: HTTP/1.1, TiDB's status pages, and a page for tests.

Paths and responses: pingcap/tidb pkg/server/http_status.go. `/sim/metrics` exists only here, for tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from dataclasses import dataclass
from http import HTTPStatus

from controlplane.config.own_tls import ClientTls
from sandbox.tidb_sim.node import GIT_HASH, SimNode
from sandbox.tidb_sim.settings import SimSettings

_MAX_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class StatusResponse:
    code: int
    body: bytes = b""
    content_type: str = "application/json"

    def encode(self) -> bytes:
        head = f"HTTP/1.1 {self.code} {HTTPStatus(self.code).phrase}\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def handle_request(
    method: str, path: str, node: SimNode, settings: SimSettings, body: bytes = b""
) -> StatusResponse:
    """Return the response to `method path`."""
    if path == "/sim/metrics" and method == "POST":
        try:
            node.simulated_metrics.set_values(body)
        except ValueError as error:
            return StatusResponse(400, f"{error}\n".encode(), "text/plain")
        return StatusResponse(200)
    if method != "GET":
        return StatusResponse(405)
    if path == "/status" and not node.is_healthy:
        return StatusResponse(500)
    if path == "/metrics":
        return StatusResponse(200, _metrics_page(node).encode(), "text/plain; version=0.0.4")
    page = _json_page(path, node, settings)
    return StatusResponse(404) if page is None else StatusResponse(200, json.dumps(page).encode())


def _json_page(path: str, node: SimNode, settings: SimSettings) -> dict[str, object] | None:
    match path:
        case "/status":
            return {
                "connections": node.connections,
                "version": node.server_version,
                "git_hash": GIT_HASH,
                "status": {"init_stats_percentage": 100},
            }
        case "/info":
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
        case "/config":
            return {
                "graceful-wait-before-shutdown": settings.graceful_wait,
                "security": {
                    "session-token-signing-cert": settings.signing_cert,
                    "session-token-signing-key": settings.signing_key,
                },
            }
    return None


def _metrics_page(node: SimNode) -> str:
    return (
        f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {node.started_at}\n"
        "# TYPE tidb_server_connections gauge\n"
        f'tidb_server_connections{{resource_group="default"}} {node.connections}\n'
    ) + node.simulated_metrics.render()


def cluster_tls_context(tls: ClientTls | None) -> ssl.SSLContext | None:
    """Return the status port's TLS (TiDB's `cluster-ssl-*`), or None without a certificate and key.

    With a CA, clients must present a certificate that it has signed.
    """
    if tls is None or tls.cert is None or tls.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class StatusServer:
    """The status port. Each connection serves its requests one by one."""

    def __init__(self, node: SimNode, settings: SimSettings) -> None:
        self._node, self._settings = node, settings
        self._clients: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        tls = cluster_tls_context(self._settings.cluster_tls)
        self._server = await asyncio.start_server(self._serve, sock=listener, ssl=tls, limit=_MAX_HEAD_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            while await self._serve_request(reader, writer):
                pass
        except (ValueError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # No HTTP, or the client has disconnected.
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. Return whether the connection stays open."""
        line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, version = line.split()
        headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        path = target.partition("?")[0]
        writer.write(handle_request(method, path, self._node, self._settings, body).encode())
        return version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
