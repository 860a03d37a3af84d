"""keepalived with the configuration of deploy/keepalived."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

from sandbox.child_process import find_program
from sandbox.server import Server
from tests.support.virtual_ip.bridged_network import Machine

CONFIGURATION = Path(__file__).resolve().parents[3] / "deploy/keepalived/keepalived.conf"


def render_configuration(**values: str) -> str:
    """Return the configuration of deploy/keepalived with these values, named as in the file."""
    text = CONFIGURATION.read_text()
    for name, value in values.items():
        text, count = re.subn(rf"(?m)^\${name}=.*$", f"${name}={value}", text)
        assert count == 1, f"{CONFIGURATION} sets {name} {count} times"
    return text


class Keepalived(Server):
    """One keepalived on a machine."""

    config_suffix = ".conf"
    hidden_variables = "(?i:.*_proxy)"  # The health checks use curl.

    def __init__(self, machine: Machine, directory: Path, configuration: str) -> None:
        super().__init__("keepalived", directory)
        self._machine, self._configuration = machine, configuration

    def command(self) -> list[str]:
        return self._machine.command(
            find_program("keepalived", "keepalived"),
            *("--vrrp", "--dont-fork", "--log-console", "--log-detail"),
            f"--use-file={self.config_file}",
            f"--pid={self._pid_file}",
            f"--vrrp_pid={self._vrrp_pid_file}",
        )

    def configuration(self) -> str:
        return self._configuration

    async def prepare(self) -> None:
        """Write the configuration, and remove what a killed keepalived has left behind."""
        await super().prepare()
        self.config_file.chmod(0o644)  # If others could write it, keepalived would run no command as root.
        for file in (self._pid_file, self._vrrp_pid_file):
            file.unlink(missing_ok=True)

    @property
    def _pid_file(self) -> Path:
        return self.directory / "keepalived.pid"

    @property
    def _vrrp_pid_file(self) -> Path:
        return self.directory / "vrrp.pid"

    async def kill(self) -> None:
        """Kill both processes of keepalived.

        The child, which has the virtual address, is in another process group. Stop it first: it would give
        up the address when its parent dies.
        """
        child = os.pidfd_open(int(self._vrrp_pid_file.read_text()))
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            signal.pidfd_send_signal(child, signal.SIGSTOP)
            await super().kill()
            signal.pidfd_send_signal(child, signal.SIGKILL)
            loop.add_reader(child, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(child)
            os.close(child)

    async def is_serving(self) -> bool:
        return "Startup complete" in self.process.output()
