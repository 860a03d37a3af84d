"""Nodes that register in etcd, for rollouts in an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.model.rollout import Rollout, RolloutPhase, RolloutSpec, Stage
from tests.support.controlplane.engine import healthy_node, settings, wait_for_state
from tests.support.waiting import wait_until

OLD, NEW = "v8.5.3", "v8.5.4"


@dataclass
class RolloutCluster:
    """Nodes that register in etcd; each run of the action appends a line to the file `action_runs`."""

    client: EtcdClient
    directory: Path
    url: str
    addresses: dict[str, str] = field(default_factory=dict)  # SQL address -> status address
    started: int = 1_700_000_000

    @property
    def action_runs(self) -> list[str]:
        """Return one line per run of the action, with node and attempt."""
        log = self.directory / "action_runs"
        return log.read_text().splitlines() if log.exists() else []

    def settings(self, script: str = "exit 0", **overrides: Any) -> Settings:
        """Return settings whose action `restart` appends a line to `action_runs` and runs the script."""
        line = f"echo {{address}} {{attempt}} >> {shlex.quote(str(self.directory / 'action_runs'))}; {script}"
        actions = {"restart": {"command": ["sh", "-c", line], "timeout": 30}}
        sections: dict[str, Any] = {"pd": {"urls": [self.url]}, "rollouts": {"actions": actions}, **overrides}
        return settings(self.directory, **sections)

    async def register(self, address: str, version: str = OLD) -> None:
        """Register a node like a TiDB server that has just started."""
        self.started += 1
        port = addresses.split(self.addresses[address])[1]
        info = {
            "version": version,
            "git_hash": "abc",
            "ip": "127.0.0.1",
            "status_port": port,
            "labels": None,
            "start_timestamp": self.started,
        }
        await self.client.put(f"/topology/tidb/{address}/info", json.dumps(info).encode())
        await self.client.put(f"/topology/tidb/{address}/ttl", b"1767225630123456789")

    async def restart_on_action(self, version: str = NEW) -> None:
        """Register each node again after the action has run for it, until cancelled."""
        for number in itertools.count():
            await wait_until(partial(self._has_run, number), 60)
            await self.register(self.action_runs[number].split()[0], version)

    def _has_run(self, number: int) -> bool:
        return len(self.action_runs) > number

    @contextlib.asynccontextmanager
    async def restarting_nodes(self, version: str = NEW) -> AsyncIterator[None]:
        task = asyncio.create_task(self.restart_on_action(version))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    @property
    def spec(self) -> RolloutSpec:
        """Return a rollout of all nodes, one after the other, with short deadlines."""
        return RolloutSpec(
            tuple(self.addresses),
            "restart",
            version=NEW,
            healthy_for=0.2,
            drain_deadline=5.0,
            return_deadline=20.0,
        )


@contextlib.asynccontextmanager
async def run_registered_nodes(
    etcd_url: str, directory: Path, sql_addresses: Sequence[str] = ()
) -> AsyncIterator[RolloutCluster]:
    """Run nodes that pass their checks, and register them: those at `sql_addresses`, or three that greet."""
    async with contextlib.AsyncExitStack() as stack:
        client = EtcdClient([etcd_url])
        stack.push_async_callback(client.close)
        cluster = RolloutCluster(client, directory, etcd_url)
        for sql_address in sql_addresses or [""] * 3:
            sql, status = await stack.enter_async_context(healthy_node())
            cluster.addresses[sql_address or sql] = status
            await cluster.register(sql_address or sql)
        yield cluster


async def wait_all_active(engine: Engine, cluster: RolloutCluster) -> None:
    for address in cluster.addresses:
        await wait_for_state(engine, address, "active")


async def wait_for_phase(engine: Engine, name: str, phase: RolloutPhase, seconds: float = 30.0) -> Rollout:
    await wait_until(lambda: engine.rollouts.get(name).phase is phase, seconds)
    return engine.rollouts.get(name)


async def wait_for_stage(
    engine: Engine, name: str, address: str, stage: Stage, seconds: float = 30.0
) -> None:
    await wait_until(lambda: engine.rollouts.get(name).steps[address].stage is stage, seconds)


def drained(engine: Engine) -> dict[str, str]:
    return {v.plan.node.address: v.drain.owner for v in engine.cluster.nodes() if v.drain is not None}
