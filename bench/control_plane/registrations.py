"""Register nodes in PD's etcd as TiDB does, and run a control plane for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2

from controlplane.etcd.client import EtcdClient
from sandbox.ports import Ports

TOPOLOGY_PREFIX = "/topology/tidb/"
STEP_TIMEOUT_SECONDS = 60.0
"""Timeout of one step of a benchmark."""
_MAX_CONCURRENT_REGISTRATIONS = 50
_POLL_SECONDS = 0.1


async def register(client: EtcdClient, address: str, status_port: int) -> None:
    """Write both keys of a node, `info` first as TiDB does (pingcap/tidb pkg/domain/serverinfo/syncer.go).

    Here `ttl` has no lease, so it stays until it is deleted.
    """
    info = {
        "version": "v8.5.3",
        "git_hash": "fake",
        "ip": address.rpartition(":")[0],
        "status_port": status_port,
        "deploy_path": "/tidb-server",
        "start_timestamp": int(time.time()),
        "labels": {},
    }
    await client.put(f"{TOPOLOGY_PREFIX}{address}/info", json.dumps(info).encode())
    await client.put(f"{TOPOLOGY_PREFIX}{address}/ttl", str(time.time_ns()).encode())


async def register_all(etcd_url: str, addresses: Iterable[str]) -> None:
    limit = asyncio.Semaphore(_MAX_CONCURRENT_REGISTRATIONS)

    async def register_one(address: str) -> None:
        async with limit:
            await register(client, address, 10080)

    async with EtcdClient([etcd_url]) as client, asyncio.TaskGroup() as tasks:
        for address in addresses:
            tasks.create_task(register_one(address))


def unchecked_settings(ports: Ports, state: Path) -> dict[str, Any]:
    """Return settings of a control plane on loopback that does not check its nodes."""
    return {
        "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
        **{name: {"listen": f"127.0.0.1:{ports.allocate()}"} for name in ("sql", "xds", "api")},
        "state_dir": str(state),
    }


async def wait_nodes_active(api: httpx2.AsyncClient, count: int) -> None:
    """Wait until this number of nodes is active. Raises TimeoutError."""
    async with asyncio.timeout(STEP_TIMEOUT_SECONDS):
        while True:
            nodes = (await api.get("/v1/nodes")).raise_for_status().json()["nodes"]
            if sum(node["state"] == "active" for node in nodes) == count:
                return
            await asyncio.sleep(_POLL_SECONDS)  # the control plane cannot notify this process


async def count_up_to_date_envoys(api: httpx2.AsyncClient, filter_name: str | None = None) -> int:
    """Count the Envoys that have acknowledged the latest published version.

    `filter_name`: only Envoys with this `filter` in `GET /v1/envoys`.
    """
    envoys = (await api.get("/v1/envoys")).raise_for_status().json()["envoys"]
    return sum(
        envoy["acked_version"] == envoy["published_version"] != "" and filter_name in (None, envoy["filter"])
        for envoy in envoys
    )
