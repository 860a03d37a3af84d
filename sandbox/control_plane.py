"""A control plane as a child: the real command `tidevoy serve` with a configuration file of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from controlplane import address as addresses
from controlplane.config.settings import Settings
from sandbox.child_process import Process
from sandbox.server import Server, answers

TIDEVOY_COMMAND = (sys.executable, "-P", "-c", "from cli.main import main; main()")
"""The console script, wherever it was installed."""


class ControlPlane(Server):
    """One control plane. `settings` is what its configuration file says, as plain data."""

    stop_grace = 15.0

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, name: str = "control-plane") -> None:
        super().__init__(name, directory)
        self.settings = settings

    @property
    def config_file(self) -> Path:
        """Its configuration file, written anew by each start."""
        return self.directory / f"{self.name}.yaml"

    @property
    def api(self) -> str:
        """Base URL of its REST API."""
        return f"http://{self.parsed().api.listen}"

    def parsed(self) -> Settings:
        """`settings` with all defaults filled in."""
        return Settings.model_validate(self.settings)

    def listens(self) -> list[int]:
        """Its REST and xDS ports."""
        parsed = self.parsed()
        return [addresses.split(parsed.api.listen)[1], addresses.split(parsed.xds.listen)[1]]

    def command(self) -> list[str]:
        """`tidevoy serve`."""
        return [*TIDEVOY_COMMAND, "serve", "--config", str(self.config_file)]

    def environment(self) -> Mapping[str, str]:
        """Ours without TIDEVOY_*, so that its file alone says what it does."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
        return kept | {"PYTHONUNBUFFERED": "1"}

    async def prepare(self) -> None:
        """Write the configuration file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(yaml.safe_dump(dict(self.settings), sort_keys=False))

    async def serves(self) -> bool:
        """Whether the API answers."""
        return await answers(f"{self.api}/healthz")

    def complaint(self, process: Process) -> str:
        """Its own sentence (`tidevoy: ...`) when it ended with one, else its last lines."""
        last = process.tail(1)
        return last if last.startswith("tidevoy: ") else process.tail()
