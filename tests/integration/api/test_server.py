"""The process of the REST server: signals, listening sockets, and tasks that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
import trustme

from api.server import _open_listener, serve
from controlplane import address as addresses
from controlplane.config.reloading_certificates import ReloadingCertificates
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from tests.support.controlplane.api_server import settings


async def test_reload_waits_until_the_control_plane_has_started(tmp_path: Path, ports: Ports) -> None:
    initial = settings(tmp_path, ports)
    reloaded = asyncio.Event()
    loop = asyncio.get_running_loop()
    failures: list[OSError] = []

    def load() -> Settings:
        try:  # the xDS port is open once the control plane has started
            socket.create_connection(addresses.split(initial.xds.listen)).close()
        except OSError as error:
            failures.append(error)
        loop.call_soon_threadsafe(reloaded.set)
        return initial

    async with asyncio.timeout(30):
        initial_handler = signal.getsignal(signal.SIGHUP)  # SIG_IGN if the tests run under nohup
        server_task = asyncio.create_task(serve(initial, load, handle_signals=True))
        while signal.getsignal(signal.SIGHUP) is initial_handler:  # noqa: ASYNC110 - no notification exists
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await reloaded.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await server_task
    assert not failures


async def test_unexpected_error_in_a_task_ends_the_server_with_that_error(
    tmp_path: Path, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(ReloadingCertificates, "refresh", fail)
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    files = {name: str(tmp_path / "server.pem") for name in ("cert", "key")}
    initial = settings(tmp_path, ports, api={"listen": f"127.0.0.1:{ports.allocate()}", "tls": files})
    with pytest.raises(ExceptionGroup) as error:
        async with asyncio.timeout(30):
            await serve(initial, lambda: initial)
    assert error.value.subgroup(LookupError)


async def test_connections_of_clients_that_vanished_end(ports: Ports) -> None:
    with await _open_listener("api.listen", f"127.0.0.1:{ports.allocate()}") as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
