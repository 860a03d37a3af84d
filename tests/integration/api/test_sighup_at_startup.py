"""SIGHUP to a control plane that is still starting."""

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


async def test_a_reload_waits_for_the_start(tmp_path: Path, ports: Ports) -> None:
    wanted = settings(tmp_path, ports)
    reloaded = asyncio.Event()
    loop = asyncio.get_running_loop()
    failures: list[OSError] = []

    def load() -> Settings:
        try:  # its xDS port is open once the control plane has started
            socket.create_connection(addresses.split(wanted.xds.listen)).close()
        except OSError as error:
            failures.append(error)
        loop.call_soon_threadsafe(reloaded.set)
        return wanted

    async with asyncio.timeout(30):
        before = signal.getsignal(signal.SIGHUP)  # ignored, when the tests run under nohup
        serving = asyncio.create_task(serve(wanted, load, handle_signals=True))
        while signal.getsignal(signal.SIGHUP) is before:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await reloaded.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert not failures
