"""Two Envoys listen on one port. When one stops listening, its queued connections must reach the other Envoy.

`TIDEVOY_SOAK=1 pytest -s tests/e2e/envoy_replacement/test_accept_queue.py` prints how many connections are
reset with and without net.ipv4.tcp_migrate_req.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.support.network_namespace import network_namespace
from tests.support.soak import SOAK
from tests.support.waiting import wait_until

CONCURRENT_CLIENTS, ROUNDS = 400, 5 if SOAK else 1
_RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: on, 0 seconds
_BOOTSTRAP = """
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:
  - name: sql
    address: {{socket_address: {{address: 127.0.0.1, port_value: {sql}}}}}
    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: sql
          cluster: greeter
  clusters:
  - name: greeter
    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000}}]}}
    load_assignment:
      cluster_name: greeter
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {greeter}}}}}}}
"""


@contextmanager
def greeter(port: int) -> Iterator[None]:
    """Run a server that sends a greeting and closes each connection."""
    with socket.create_server(("127.0.0.1", port), backlog=4096) as listening:

        def greet() -> None:
            while True:
                try:
                    accepted, _ = listening.accept()
                except OSError:
                    return  # the listening socket is closed
                with accepted:
                    try:
                        accepted.sendall(b"hello")
                    except ConnectionError:
                        continue

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@dataclass(slots=True)
class ConnectionLoad:
    """Concurrent clients in one thread that connect, read the greeting and disconnect."""

    port: int
    greeted: int = 0
    failures: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join()

    def _run(self) -> None:
        waiting: dict[int, socket.socket] = {}
        with select.epoll() as poll:
            while waiting or not self.stopping.is_set():
                while len(waiting) < CONCURRENT_CLIENTS and not self.stopping.is_set():
                    client = socket.socket()
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", self.port))
                    waiting[client.fileno()] = client
                    poll.register(client, select.EPOLLIN)
                for number, _ in poll.poll(10):
                    self._greet(waiting.pop(number))

    def _greet(self, client: socket.socket) -> None:
        with client:
            try:
                if client.recv(16):
                    self.greeted += 1
                else:
                    self.failures.append("closed")
            except OSError as error:
                self.failures.append(str(error))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


@pytest.mark.parametrize("migrates", [True, False] if SOAK else [True], ids=("migrate", "reset")[: 1 + SOAK])
async def test_kernel_hands_queued_connections_to_the_new_envoy(tmp_path: Path, migrates: bool) -> None:
    with network_namespace(tcp_migrate_req=migrates), Ports() as ports:
        bootstrap = _BOOTSTRAP.format(sql=(sql := ports.allocate()), greeter=(server := ports.allocate()))
        for number in range(ROUNDS):
            load = ConnectionLoad(sql)
            async with (
                EnvoyProcess(bootstrap, tmp_path / f"old-{number}", concurrency=2) as old,
                EnvoyProcess(bootstrap, tmp_path / f"new-{number}", concurrency=2) as new,
                http_client() as http,
            ):
                await wait_until(old.is_live)
                await wait_until(new.is_live)
                with greeter(server), load.running():
                    await wait_until(lambda load=load: load.greeted > 5_000)  # type: ignore[misc]
                    (await http.post(f"{old.admin_url}/drain_listeners")).raise_for_status()
                    now = load.greeted
                    await wait_until(lambda load=load, now=now: load.greeted > now + 5_000)  # type: ignore[misc]
            print(
                f"\ntcp_migrate_req={int(migrates)}: {load.greeted:,} greeted, {len(load.failures)} failed",
                end="",
            )
            if migrates:
                assert load.failures == []
