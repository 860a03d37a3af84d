"""Four workers serve sessions while endpoints and live configuration change as fast as Envoy applies them.

With `TIDEVOY_SOAK=1` the test runs for a minute, with a module built with AddressSanitizer.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox.tidb_sim.packets import err, frame
from tests.support.fake_servers import run_fake_server
from tests.support.module import address_sanitizer
from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap, write_endpoints, write_live_config
from tests.support.module.envoy import OK_PAYLOAD, ModuleEnvoy, accept_login, serve_envoy, with_timeout
from tests.support.soak import SOAK

SECONDS = 60.0 if SOAK else 0.0
MIN_CHANGES = 60
CLIENTS = 24
WORKERS = 4
# Number of nodes that are part of the configuration, but receive no sessions.
CLOSED_NODES = 400 if SOAK else 40
SEED = 16
PING = 0x0E
DENIED = err(1105, "not now", "HY000")

pytestmark = pytest.mark.timeout(1800 if SOAK else 120)


@dataclass
class ConfigChanger:
    """Writes random endpoints and live configurations. The first node is always active."""

    endpoints: Path
    nodes: list[str]
    random: random.Random = field(default_factory=lambda: random.Random(SEED))
    changes_written: int = 0

    def hosts(self) -> list[Host]:
        """Return the first node, which is always active, and a random choice of the others."""
        steady, *others = self.nodes
        self.changes_written += 1
        closed = [f"127.0.0.2:{10_000 + number}" for number in range(CLOSED_NODES)]
        chosen = self.random.sample(others, self.random.randint(0, len(others)))
        chosen += self.random.sample(closed, self.random.randint(0, len(closed)))
        return [Host(steady), *(self._host(endpoint, endpoint in closed) for endpoint in chosen)]

    def _host(self, endpoint: str, is_closed: bool) -> Host:
        state = self.random.choice(["draining", "drained"] if is_closed else ["draining", "active", "active"])
        counts = f"{self.changes_written}:{'0' * 16}=3,{self.changes_written:016x}=9"
        return Host(
            endpoint,
            weight=self.random.randint(1, 100),
            state=state,
            terminate_sessions=is_closed and self.random.random() < 0.5,
            outgoing=self.random.choice(["", counts]),
            incoming=self.random.choice(["", counts]),
            version=f"8.5.{self.changes_written}",
        )

    async def run(self, proxy: ModuleEnvoy, done: asyncio.Event) -> None:
        """Change endpoints or live configuration for SECONDS and at least MIN_CHANGES times; set `done`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SECONDS
        while self.changes_written < MIN_CHANGES or loop.time() < deadline:
            self.random.choice((write_endpoints, write_live_config))(self.endpoints, self.hosts())
            await proxy.get("/ready")  # the main thread answers after it has handled earlier events
        done.set()


async def refuse_exports(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Handle a node connection: accept every login, answer pings, and refuse to export sessions."""
    node = await accept_login(reader, writer)
    while True:
        _, payload = await node.read_packet()
        writer.write(frame(1, OK_PAYLOAD if payload[0] == PING else DENIED))


async def run_sessions(proxy: ModuleEnvoy, done: asyncio.Event) -> int:
    """Run sessions that log in, ping and end, until `done` is set. Return how many there were."""
    count = 0
    while not done.is_set():
        client = await proxy.connect()
        assert (await with_timeout(client.login()))[0] == 0x00
        for _ in range(count % 7):
            answer = await with_timeout(client.send_command(PING))
            assert answer[0] == 0x00, answer
        client.writer.close()
        proxy.clients.remove(client)
        count += 1
    return count


async def test_workers_serve_while_endpoints_and_live_configuration_change(tmp_path: Path) -> None:
    endpoints = tmp_path / "endpoints.json"
    envoy_type = address_sanitizer.SanitizedEnvoy if SOAK else ModuleEnvoy
    config = ModuleConfig(
        endpoints=endpoints, module=address_sanitizer.build_sanitized_module() if SOAK else None
    )
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(run_fake_server(refuse_exports)) for _ in range(4)]
        nodes = [peer.endpoint for peer in peers]
        text = json.dumps(bootstrap([Host(node) for node in nodes], config))
        proxy = envoy_type(text, tmp_path, concurrency=WORKERS)
        await stack.enter_async_context(serve_envoy(proxy, config))
        changer = ConfigChanger(endpoints, nodes)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(changer.run(proxy, done))
            clients = [tasks.create_task(run_sessions(proxy, done)) for _ in range(CLIENTS)]
        sessions = sum(client.result() for client in clients)
        stats = await proxy.stats("config_reload$|cluster.tidb.update_success$")
        print(f"{sessions:,} sessions while {changer.changes_written:,} changes; Envoy applied {stats}")
        assert sessions > CLIENTS
        assert all(count > MIN_CHANGES / 6 for count in stats.values())
        # Text read from freed memory would appear as an unknown node.
        valid_nodes = {*nodes, *(f"127.0.0.2:{10_000 + number}" for number in range(CLOSED_NODES)), ""}
        series = {labels for (name, labels) in await proxy.metrics() if name in ("sessions", "logins")}
        assert {label for labels in series for label in labels if ":" in label} <= valid_nodes
        assert "a bug" not in proxy.log
