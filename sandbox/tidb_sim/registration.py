"""Registers a simulated server in PD's etcd as TiDB does (pingcap/tidb pkg/domain/serverinfo/syncer.go).

`/topology/tidb/<address>/info` has no lease and survives a crash. `/topology/tidb/<address>/ttl` expires with
its lease. Both keys are written every 30 s, and again under a new lease if the old lease was lost.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress

from controlplane.address import join
from controlplane.errors import LeaseLost, PdError
from controlplane.etcd.client import EtcdClient
from sandbox.tidb_sim.node import GIT_HASH, SimNode
from sandbox.tidb_sim.settings import SimSettings

_PREFIX = "/topology/tidb/"
_RETRY_SECONDS, _RENEW_RETRY_SECONDS = 1.0, 0.2
_MAX_WRITE_ATTEMPTS = 5
_DEREGISTER_TIMEOUT_SECONDS = 3.0


def topology_info(node: SimNode, settings: SimSettings) -> bytes:
    """Return the value of the `info` key. Its `version` is the release. The SQL port is only in the key."""
    return json.dumps(
        {
            "version": node.release,
            "git_hash": GIT_HASH,
            "ip": settings.advertise_address,
            "status_port": node.status_port,
            "deploy_path": "/tidb-server",
            "start_timestamp": node.started_at,
            "labels": dict(node.labels),
        },
        separators=(",", ":"),
    ).encode()


class Registration:
    """The topology keys of one simulated server."""

    def __init__(self, client: EtcdClient, node: SimNode, settings: SimSettings) -> None:
        self._client, self._node, self._settings = client, node, settings
        self._key_prefix = _PREFIX + join(settings.advertise_address, node.sql_port)
        self._lease_id = 0
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Stay registered until cancelled, even if etcd is unavailable for a while."""
        while True:
            try:
                self._lease_id = await self._client.lease_grant(self._settings.topology_ttl)
                await self._write()
                self.registered.set()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keep_alive(self._lease_id))
                    tasks.create_task(self._refresh_periodically())
            except* PdError:
                pass
            await asyncio.sleep(_RETRY_SECONDS)

    async def deregister(self) -> None:
        """Remove the registration after a graceful stop. Retry for a few seconds if etcd is unavailable.

        Like TiDB, delete by prefix without a slash after the address. So stopping host:400 also deletes the
        keys of host:4000, until that node writes them again.
        """
        with suppress(PdError, TimeoutError):
            async with asyncio.timeout(_DEREGISTER_TIMEOUT_SECONDS):
                await self._client.delete(self._key_prefix, prefix=True)
                if self._lease_id:
                    await self._client.lease_revoke(self._lease_id)

    async def _keep_alive(self, lease: int) -> None:
        """Renew the lease until it expires, then raise LeaseLost. Retry failed renewals."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                seconds = await self._client.lease_renew(lease)
            except PdError:
                pause = _RENEW_RETRY_SECONDS
                continue
            if not seconds:
                raise LeaseLost(lease, "it has expired")
            pause = seconds / 3

    async def _refresh_periodically(self) -> None:
        """Write the keys periodically. After five failed attempts, wait for the next period."""
        while True:
            await asyncio.sleep(self._settings.topology_refresh)
            for _ in range(_MAX_WRITE_ATTEMPTS):
                try:
                    await self._write()
                    break
                except LeaseLost:
                    raise
                except PdError:
                    await asyncio.sleep(_RETRY_SECONDS)

    async def _write(self) -> None:
        info = topology_info(self._node, self._settings)
        await self._client.put(f"{self._key_prefix}/info", info)
        await self._client.put(f"{self._key_prefix}/ttl", str(time.time_ns()).encode(), self._lease_id)
