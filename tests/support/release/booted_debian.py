"""A minimal Debian in a directory that systemd has booted, with this machine's network."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.child_process import ChildProcess, find_program
from tests.support.cache import cache_directory
from tests.support.compose.commands import CommandFailed, run_command
from tests.support.compose.images import debian_archive
from tests.support.waiting import wait_until

# `apt-get` checks certificates of servers, and a minimal Debian has none.
_PACKAGES = ("ca-certificates", "systemd", "systemd-sysv")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BOOT_TIMEOUT_SECONDS = 120.0
_STOP_TIMEOUT_SECONDS = 60.0
_INSTALL_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class BootedDebian:
    """Commands run in the name spaces of systemd, whose process is `init`. `directory` is their root."""

    directory: Path
    init: int

    async def run(self, *command: str, environment: dict[str, str]) -> str:
        """Run a command in /root with only these variables, and return its output. Raises CommandFailed."""
        values = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **environment}
        return await run_command(
            *(find_program("nsenter", "util-linux"), f"--target={self.init}", "--mount", "--pid", "--cgroup"),
            *("--ipc", "--uts", "--root", f"--wd={self.directory}/root"),
            *("env", "-i", *(f"{name}={value}" for name, value in values.items()), *command),
            timeout=_INSTALL_TIMEOUT_SECONDS,
        )


@asynccontextmanager
async def booted_debian() -> AsyncIterator[BootedDebian]:
    """Boot a minimal Debian 12. Shut it down and remove it at the end."""
    archive = await debian_archive(cache_directory("compose"), "debian-systemd", _PACKAGES)
    with tempfile.TemporaryDirectory(prefix="tidevoy-debian-") as temporary:
        directory = Path(temporary, "root")
        await run_command("mkdir", str(directory), timeout=10.0)
        await run_command("tar", "-C", str(directory), "-xf", str(archive), timeout=120.0)
        _copy_network_settings(directory)
        async with _running_systemd(directory) as debian:
            yield debian


@asynccontextmanager
async def _running_systemd(directory: Path) -> AsyncIterator[BootedDebian]:
    nspawn = (
        *(find_program("systemd-nspawn", "systemd-container"), f"--directory={directory}", "--boot"),
        *("--register=no", "--keep-unit", "--resolv-conf=off", "--console=pipe"),
    )
    process = ChildProcess("systemd", nspawn, directory=directory.parent)
    booted: list[BootedDebian] = []

    async def has_booted() -> bool:
        assert process.returncode is None, process.tail(40)
        for child in _children_in(directory, process.pid):
            with suppress(CommandFailed):
                debian = BootedDebian(directory, child)
                if (await debian.run("systemctl", "is-system-running", environment={})) == "running\n":
                    booted.append(debian)
        return bool(booted)

    try:
        try:
            await wait_until(has_booted, _BOOT_TIMEOUT_SECONDS)
        except TimeoutError:
            pytest.fail(f"systemd has not booted:\n{process.tail(40)}")
        yield booted[0]
    finally:
        # systemd-nspawn passes the signal on as an order to shut down.
        await process.terminate(_STOP_TIMEOUT_SECONDS)


def _children_in(directory: Path, process: int) -> list[int]:
    """Return the child processes whose root is the directory.

    The first child has another root: it prepares the name spaces and starts systemd.
    """
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    found = []
    for child in children:
        with suppress(FileNotFoundError):  # it has ended
            if Path(f"/proc/{child}/root").samefile(directory):
                found.append(int(child))
    return found


def _copy_network_settings(root: Path) -> None:
    """Let apt and pip reach the network as they do on this machine."""
    certificates = "/etc/ssl/certs/ca-certificates.crt"
    names = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname", certificates, "/etc/apt/sources.list")
    for file in names:
        if Path(file).exists():
            shutil.copy(file, f"{root}{file}")
    for directory in ("/etc/apt/apt.conf.d", "/etc/apt/sources.list.d"):
        shutil.copytree(directory, f"{root}{directory}", dirs_exist_ok=True)
