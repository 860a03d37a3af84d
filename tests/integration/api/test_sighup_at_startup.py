"""SIGHUP during the start of the control plane."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

from api.server import serve
from controlplane import address as addresses
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
