"""A control plane as a child process: the real command `tidevoy serve` with its own configuration file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from controlplane import address as addresses
from controlplane.config.settings import Settings
from sandbox.child_process import ChildProcess
from sandbox.server import Server, http_responds


def tidevoy_command(main_module: str = "cli.main") -> list[str]:
    """Return the command `tidevoy`, however it was installed."""
    return [sys.executable, "-P", "-c", f"from {main_module} import main; main()"]


class ControlPlaneProcess(Server):
    """One control plane. `settings` is the content of its configuration file, as plain data."""

    stop_timeout = 15.0
    main_module = "cli.main"

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, name: str = "control-plane") -> None:
        super().__init__(name, directory)
        self.settings = settings

    @property
    def config_file(self) -> Path:
        """Its configuration file, written at each start."""
        return self.directory / f"{self.name}.yaml"

    @property
    def api_url(self) -> str:
        """Base URL of its REST API."""
        return f"http://{self.parsed_settings().api.listen}"

    def parsed_settings(self) -> Settings:
        """Return `settings` with all defaults filled in."""
        return Settings.model_validate(self.settings)

    def listen_ports(self) -> list[int]:
        """Return its REST and xDS ports."""
        parsed = self.parsed_settings()
        return [addresses.split(parsed.api.listen)[1], addresses.split(parsed.xds.listen)[1]]

    def command(self) -> list[str]:
        """Return the command `tidevoy serve`."""
        return [*tidevoy_command(self.main_module), "serve", "--config", str(self.config_file)]

    def environment(self) -> Mapping[str, str]:
        """Return our environment without TIDEVOY_*, so that only the file configures it."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
        return inherited | {"PYTHONUNBUFFERED": "1"}

    async def prepare(self) -> None:
        """Write the configuration file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(yaml.safe_dump(dict(self.settings), sort_keys=False))

    async def is_serving(self) -> bool:
        """Return whether the API responds."""
        return await http_responds(f"{self.api_url}/healthz")

    def failure_summary(self, process: ChildProcess) -> str:
        """Return its own error message (`tidevoy: ...`) if it exited with one, else its last lines."""
        last_line = process.tail(1)
        return last_line if last_line.startswith("tidevoy: ") else process.tail()
