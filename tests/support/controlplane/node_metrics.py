"""Nodes with metrics: the status port of a simulated server, and a fake SQL port that sends a greeting."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

from controlplane import address as addresses
from controlplane.config.own_tls import ClientTls
from sandbox.server import http_client
from sandbox.tidb_sim.node import SimNode
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.status import StatusServer
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts


class FakeMetricsNode:
    """A node with metrics that a test sets. Its status port answers between `open` and `close`."""

    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self.address = address
        self._settings = SimSettings(SessionRules("unused"), cluster_tls=tls)
        self._node = SimNode("fake", "v8.5.3", "8.0.11-TiDB-v8.5.3", {}, is_serving=True)
        self._server: StatusServer | None = None

    @property
    def status(self) -> str:
        """The address of the status port."""
        return addresses.join("127.0.0.1", self._node.status_port)

    async def open(self) -> None:
        """Open the status port. After `close`, open the same port again."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._node.status_port))
        self._node.status_port = listener.getsockname()[1]
        self._server = StatusServer(self._node, self._settings)
        await self._server.start(listener)

    def close(self) -> None:
        """Close the port and all its connections."""
        if self._server is not None:
            self._server.close()

    async def set_metrics(self, **values: float) -> None:
        """Set the metrics that the node reports."""
        async with http_client() as client:
            (await client.post(f"http://{self.status}/sim/metrics", json=values)).raise_for_status()


@contextlib.asynccontextmanager
async def run_fake_metrics_node(tls: ClientTls | None = None) -> AsyncIterator[FakeMetricsNode]:
    """Run a node with an open status port."""
    async with run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql:
        node = FakeMetricsNode(sql.endpoint, tls)
        await node.open()
        try:
            yield node
        finally:
            node.close()
