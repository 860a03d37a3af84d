"""A minimal Debian in a directory, on which the files of a release are installed as users do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox.child_process import ChildProcess, find_program
from tests.support.cache import cache_directory
from tests.support.compose.commands import run_command
from tests.support.compose.images import debian_archive

_INSTALL_TIMEOUT_SECONDS = 600.0
_STOP_TIMEOUT_SECONDS = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class CleanRoot:
    """Commands run with `directory` as their root, in a mount and a process name space of their own.

    They share the network with the tests.
    """

    directory: Path

    async def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a command to its end, and return its output. Raises CommandFailed."""
        return await run_command(*self._enter(command, environment), timeout=_INSTALL_TIMEOUT_SECONDS)

    @asynccontextmanager
    async def running(self, name: str, *command: str) -> AsyncIterator[ChildProcess]:
        """Run a program during the block. It gets SIGTERM at the end, and must stop by itself."""
        process = ChildProcess(name, self._enter(command, None), directory=self.directory.parent)
        try:
            yield process
            process.signal_group(signal.SIGTERM)  # `unshare` itself ignores it
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await process.wait()
        finally:
            await process.kill()

    def add_file(self, source: Path) -> str:
        """Copy a file to /root, and return its path there."""
        shutil.copy(source, self.directory / "root")
        return f"/root/{source.name}"

    def has(self, path: str) -> bool:
        """Return whether there is a file or directory at this absolute path."""
        return Path(f"{self.directory}{path}").exists()

    async def install_packages(self, *packages: str) -> None:
        """Install Debian packages by name or path, with what they depend on, but not what they recommend."""
        await self.run("apt-get", "update", "-qq")
        options = ("-qq", "--yes", "--no-install-recommends")
        await self.run(
            "apt-get", "install", *options, *packages, environment={"DEBIAN_FRONTEND": "noninteractive"}
        )

    def copy_network_settings(self) -> None:
        """Let apt and pip reach the network as they do on this machine."""
        certificates = "/etc/ssl/certs/ca-certificates.crt"
        for file in (
            "/etc/resolv.conf",
            "/etc/hosts",
            "/etc/hostname",
            certificates,
            "/etc/apt/sources.list",
        ):
            if Path(file).exists():
                shutil.copy(file, f"{self.directory}{file}")
        for directory in ("/etc/apt/apt.conf.d", "/etc/apt/sources.list.d"):
            shutil.copytree(directory, f"{self.directory}{directory}", dirs_exist_ok=True)

    def _enter(self, command: Sequence[str], environment: Mapping[str, str] | None) -> list[str]:
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        values = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **proxies, **(environment or {})}
        unshare = (
            *(find_program("unshare", "util-linux"), "--mount", "--pid", "--fork", "--kill-child"),
            *(f"--root={self.directory}", "--mount-proc"),
        )
        return [*unshare, "env", "-i", *(f"{name}={value}" for name, value in values.items()), *command]


@asynccontextmanager
async def clean_root() -> AsyncIterator[CleanRoot]:
    """Unpack a minimal Debian 12, with nothing but the certificates of authorities. Remove it at the end."""
    archive = await debian_archive(cache_directory("compose"), "debian-clean", ("ca-certificates",))
    with tempfile.TemporaryDirectory(prefix="tidevoy-root-") as temporary:
        directory = f"{temporary}/root"
        await run_command("mkdir", directory, timeout=10.0)
        await run_command("tar", "-C", directory, "-xf", str(archive), timeout=120.0)
        root = CleanRoot(Path(directory))
        root.copy_network_settings()
        yield root
