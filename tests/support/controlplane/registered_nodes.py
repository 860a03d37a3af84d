"""Nodes for rollouts without a TiDB: something that greets, registered in a real etcd as a TiDB server is."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from controlplane.etcd.client import EtcdClient
from sandbox.etcd import Etcd
from tests.support.fake_servers import GREETING, listening, packet, sends

QUICK_ORDER: Mapping[str, Any] = {
    "nodes": "all",
    "drain_deadline_seconds": 1,
    "return_deadline_seconds": 15,
    "healthy_for_seconds": 0,
}
"""What `POST /v1/rollouts` is sent by tests that hurry."""

UNWATCHED = {"sql": {"interval": 0.1}, "status": {"enabled": False}}
"""The section `health` of a control plane of such nodes."""


@dataclass
class Registered:
    """A node and what it says of itself in PD."""

    address: str
    zone: str
    etcd: EtcdClient
    started: int = field(default_factory=lambda: int(time.time()) - 60)

    async def register(self, version: str) -> None:
        """Write what a TiDB server writes when it starts."""
        info = {
            "version": version,
            "git_hash": "abc",
            "ip": "127.0.0.1",
            "status_port": 1,
            "start_timestamp": self.started,
            "labels": {"zone": self.zone},
        }
        await self.etcd.put(f"/topology/tidb/{self.address}/info", json.dumps(info).encode())
        await self.etcd.put(f"/topology/tidb/{self.address}/ttl", str(time.time_ns()).encode())

    async def restart(self, version: str = "v8.5.3") -> None:
        """Register with a newer start time."""
        self.started = max(int(time.time()), self.started + 1)
        await self.register(version)


@asynccontextmanager
async def registered(etcd: Etcd, zone: str) -> AsyncIterator[Registered]:
    """A node whose SQL port greets; whoever checks its status port finds nobody."""
    async with listening(sends(packet(GREETING))) as sql, EtcdClient([etcd.url]) as client:
        node = Registered(sql.endpoint, zone, client)
        await node.register("v8.5.3")
        yield node
