"""A control plane as a child process: the real command `tidevoy serve` with its own configuration file."""

from __future__ import annotations

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
    """Return a command that runs `tidevoy` with this Python, even if no script `tidevoy` is installed."""
    return [sys.executable, "-P", "-c", f"from {main_module} import main; main()"]


class ControlPlaneProcess(Server):
    """One control plane. `settings` is the content of its configuration file, as plain data."""

    stop_timeout = 15.0
    hidden_variables = "TIDEVOY_.*"  # Only the configuration file may configure the control plane.
    extra_variables = {"PYTHONUNBUFFERED": "1"}  # noqa: RUF012
    main_module = "cli.main"

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, name: str = "control-plane") -> None:
        super().__init__(name, directory)
        self.settings = settings

    @property
    def api_url(self) -> str:
        return f"http://{self.parsed_settings().api.listen}"

    def parsed_settings(self) -> Settings:
        """Return `settings` with all defaults filled in."""
        return Settings.model_validate(self.settings)

    def listen_ports(self) -> list[int]:
        parsed = self.parsed_settings()
        return [addresses.split(parsed.api.listen)[1], addresses.split(parsed.xds.listen)[1]]

    def command(self) -> list[str]:
        return [*tidevoy_command(self.main_module), "serve", "--config", str(self.config_file)]

    def configuration(self) -> str:
        return yaml.safe_dump(dict(self.settings), sort_keys=False)

    async def is_serving(self) -> bool:
        return await http_responds(f"{self.api_url}/healthz")

    def failure_summary(self, process: ChildProcess) -> str:
        """Return the last output line if that is an error message (`tidevoy: ...`), else the last lines."""
        last_line = process.tail(1)
        return last_line if last_line.startswith("tidevoy: ") else process.tail()
