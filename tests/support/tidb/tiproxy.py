"""Runs TiProxy, as a test needs it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from sandbox.ports import Ports
from sandbox.server import Server, http_client, sends_mysql_greeting
from sandbox.tidb_binaries import BINARIES_FOLDER_VARIABLE


def find_tiproxy() -> str | None:
    """Return the program `tiproxy` in the folder of the TiDB programs, or on the PATH."""
    folders = os.pathsep.join((os.environ.get(BINARIES_FOLDER_VARIABLE, ""), os.environ.get("PATH", "")))
    return shutil.which("tiproxy", path=folders)


class TiProxy(Server):
    """TiProxy with the configuration of its documentation."""

    config_suffix = ".toml"
    stop_timeout = 40.0

    def __init__(self, program: str, directory: Path, ports: Ports, pd: str) -> None:
        super().__init__("tiproxy", directory)
        self.sql_port, self._api_port = ports.allocate(), ports.allocate()
        self._program, self._pd = program, pd

    def listen_ports(self) -> list[int]:
        return [self.sql_port, self._api_port]

    def command(self) -> list[str]:
        return [self._program, "--config", str(self.config_file)]

    def configuration(self) -> str:
        return (
            f'workdir = "{self.directory}/work"\n'
            f'[proxy]\naddr = "127.0.0.1:{self.sql_port}"\npd-addrs = "{self._pd}"\n'
            "graceful-close-conn-timeout = 15\nmax-connections = 1000\n"
            f'[api]\naddr = "127.0.0.1:{self._api_port}"\n'
            '[log]\nlevel = "warn"\n'
        )

    async def is_serving(self) -> bool:
        return await sends_mysql_greeting(self.sql_port)

    async def start_traffic_job(self, kind: str, **options: str) -> None:
        """Start a `capture` or a `replay`."""
        async with http_client(f"http://127.0.0.1:{self._api_port}") as client:
            response = await client.post(f"/api/traffic/{kind}", data=options)
            assert response.status_code == 200, response.text

    async def cancel_traffic_jobs(self) -> None:
        async with http_client(f"http://127.0.0.1:{self._api_port}") as client:
            response = await client.post("/api/traffic/cancel")
            assert response.status_code == 200, response.text

    async def traffic_job(self, kind: str) -> dict[str, Any]:
        """Return what TiProxy says about the only `capture` or `replay`."""
        async with http_client(f"http://127.0.0.1:{self._api_port}") as client:
            response = (await client.get("/api/traffic/show")).raise_for_status()
        [job] = [job for job in response.json() if job["type"] == kind]
        return dict(job)
