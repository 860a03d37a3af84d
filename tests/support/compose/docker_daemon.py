"""A private Docker daemon, which shares nothing but the kernel with other daemons on the machine.

The daemon changes neither the machine's firewall nor its packet forwarding. So containers reach each other,
but no other host. Docker's proxy process serves published ports. Builds use the machine's network.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit, find_program
from tests.support.compose.commands import CommandFailed, run_command

_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 60.0
_RUN_PREFIX = "run-"
_DATA_DIRECTORY = "data"
_PID_FILE = "docker.pid"
# With this much free memory, the daemon's files (about 4 GB) are kept in memory, which is faster than a disk.
_MIN_MEMORY_FOR_TMPFS_BYTES = 8 << 30
_CGROUPS = Path("/sys/fs/cgroup")


class Docker:
    """Runs `docker` and `docker-compose` with this daemon. Both return the output or raise CommandFailed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "docker.sock"
        self.environment = {
            "DOCKER_HOST": f"unix://{self.socket}",
            # Ignore the user's credentials and proxies. Use the builder that needs no plugin.
            "DOCKER_CONFIG": str(directory / "config"),
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }

    async def __call__(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run `docker ARGUMENT...`, within `timeout` seconds."""
        command = find_program("docker", "docker.io")
        return await run_command(command, *arguments, timeout=timeout, env=self.environment)

    async def compose(
        self, *arguments: str, project: Path, timeout: float, env: dict[str, str] | None = None
    ) -> str:
        """Run `docker-compose ARGUMENT...` in the directory `project`, within `timeout` seconds."""
        command = find_program("docker-compose", "docker-compose")
        environment = {**self.environment, "COMPOSE_PROJECT_NAME": "tidevoy", **(env or {})}
        return await run_command(
            command, "--ansi", "never", *arguments, timeout=timeout, env=environment, directory=project
        )

    async def remove_containers(self) -> None:
        """Remove all containers and networks. Images and volumes are removed with the directory."""
        containers = (await self("ps", "--all", "--quiet")).split()
        if containers:
            await self("rm", "--force", *containers, timeout=120.0)
        await self("network", "prune", "--force")


@asynccontextmanager
async def docker_daemon(directory: Path) -> AsyncIterator[Docker]:
    """Run a new daemon. At the end, remove its containers, networks and files.

    Each run has its own subdirectory of `directory`. First remove what killed runs have left: start a daemon
    in each of their subdirectories, remove its containers, and delete the subdirectory.
    """
    for earlier in _earlier_runs(directory):
        with _try_lock(earlier) as ours:
            if ours:
                async with _daemon(earlier):
                    pass
    fresh = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=directory))
    with _try_lock(fresh):
        if psutil.virtual_memory().available >= _MIN_MEMORY_FOR_TMPFS_BYTES:
            (fresh / _DATA_DIRECTORY).mkdir()
            await run_command(
                find_program("mount", "mount"),
                "-t",
                "tmpfs",
                "none",
                str(fresh / _DATA_DIRECTORY),
                timeout=30.0,
            )
        async with _daemon(fresh) as docker:
            yield docker


def _earlier_runs(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    return list(directory.glob(f"{_RUN_PREFIX}*"))


def interfaces() -> set[str]:
    """Return the network interfaces of this machine."""
    return {name for _, name in socket.if_nameindex()}


def find_leftovers(directory: Path) -> list[str]:
    """Return what remains of the daemon in `directory`: files, mounts, processes, control groups."""
    leftovers = [f"files in {directory}"] if directory.exists() else []
    leftovers += [f"mount {target}" for target in _mounts(directory)]
    leftovers += [f"control group {group}" for group in _control_groups(directory)]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(directory) in word for word in words):
            leftovers.append(f"process {process.pid} {' '.join(words)}")
    return leftovers


@contextmanager
def _try_lock(directory: Path) -> Iterator[bool]:
    """Lock `directory` during the block. Yield False if another run uses it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


@asynccontextmanager
async def _daemon(directory: Path) -> AsyncIterator[Docker]:
    process = ChildProcess("dockerd", _command(directory), directory=directory, env=_environment())
    docker = Docker(directory)
    try:
        await _wait_until_ready(process, docker)
        try:
            yield docker
        finally:
            await docker.remove_containers()
    finally:
        await process.terminate(kill_after_seconds=_STOP_TIMEOUT_SECONDS)
        # Even after a clean exit, a daemon leaves a mounted name space and its control group behind.
        for target in sorted(_mounts(directory), key=len, reverse=True):
            await run_command(find_program("umount", "mount"), target, timeout=30.0)
        for group in _control_groups(directory):
            group.rmdir()
        shutil.rmtree(directory)


def _command(directory: Path) -> list[str]:
    configuration = directory / "daemon.json"
    configuration.write_text("{}")
    return [
        find_program("dockerd", "docker.io"),
        # Without this option, the machine's /etc/docker/daemon.json would apply too.
        f"--config-file={configuration}",
        f"--host=unix://{directory / 'docker.sock'}",
        f"--data-root={directory / _DATA_DIRECTORY}",
        f"--exec-root={directory / 'exec'}",
        f"--pidfile={directory / _PID_FILE}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        f"--cgroup-parent=/{_control_group(directory)}",
        "--log-level=warn",
    ]


def _environment() -> dict[str, str]:
    # A user's PATH often lacks iptables, which Docker needs inside the containers' name spaces.
    return {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"}


async def _wait_until_ready(process: ChildProcess, docker: Docker) -> None:
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_SECONDS
    while True:
        if process.returncode is not None:
            raise ProcessFailed(process.name, describe_exit(process.returncode), process.tail(30))
        try:
            await docker("version", timeout=10.0)
        except CommandFailed as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ProcessFailed(process.name, f"does not answer ({error})", process.tail(30)) from None
            await asyncio.sleep(0.2)
        else:
            return


def _mounts(directory: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    targets = (line.split()[1] for line in lines)
    return [target for target in targets if Path(target).is_relative_to(directory)]


def _control_group(directory: Path) -> str:
    return f"tidevoy-{directory.name}"


def _control_groups(directory: Path) -> list[Path]:
    """Return the daemon's control groups, deepest first. cgroup v1 has one hierarchy per controller."""
    name = _control_group(directory)
    tops = [*_CGROUPS.glob(name), *_CGROUPS.glob(f"*/{name}")]
    below = [path for top in tops for path in top.rglob("*/") if path.is_dir()]
    return sorted({*tops, *below}, key=lambda path: len(path.parts), reverse=True)
