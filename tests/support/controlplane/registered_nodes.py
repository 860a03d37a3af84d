"""Fake nodes for rollouts. They send TiDB's greeting and register in a real etcd like TiDB servers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from controlplane.etcd.client import EtcdClient
from sandbox.etcd import Etcd
from tests.support.fake_servers import GREETING_PAYLOAD, mysql_packet, run_fake_server, send_parts

FAST_ROLLOUT: Mapping[str, Any] = {
    "nodes": "all",
    "drain_deadline_seconds": 1,
    "return_deadline_seconds": 15,
    "healthy_for_seconds": 0,
}
"""Body of `POST /v1/rollouts` for fast tests."""

SQL_CHECKS_ONLY = {"sql": {"interval": 0.1}, "status": {"enabled": False}}
"""The section `health` of a control plane with these nodes."""


@dataclass
class RegisteredNode:
    """A node and its registration in PD."""

    address: str
    zone: str
    etcd: EtcdClient
    started_at: int = field(default_factory=lambda: int(time.time()) - 60)

    async def register(self, version: str) -> None:
        """Write what a TiDB server writes when it starts."""
        info = {
            "version": version,
            "git_hash": "abc",
            "ip": "127.0.0.1",
            "status_port": 1,
            "start_timestamp": self.started_at,
            "labels": {"zone": self.zone},
        }
        await self.etcd.put(f"/topology/tidb/{self.address}/info", json.dumps(info).encode())
        await self.etcd.put(f"/topology/tidb/{self.address}/ttl", str(time.time_ns()).encode())

    async def restart(self, version: str = "v8.5.3") -> None:
        """Register with a newer start time."""
        self.started_at = max(int(time.time()), self.started_at + 1)
        await self.register(version)


@asynccontextmanager
async def registered_node(etcd: Etcd, zone: str) -> AsyncIterator[RegisteredNode]:
    """Run a node with a SQL port that sends a greeting. Nothing listens on its status port."""
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        EtcdClient([etcd.url]) as client,
    ):
        node = RegisteredNode(sql.endpoint, zone, client)
        await node.register("v8.5.3")
        yield node
