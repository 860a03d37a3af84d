"""Runs a Docker daemon with all images of docker-compose.yml (`python -m` this module).

It writes the daemon's directory to standard output when the images are ready, and exits when its input
closes. Exit code 0 means that nothing of the daemon remains.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.compose import images
from tests.support.compose.docker_daemon import docker_daemon, find_leftovers, interfaces
from tests.support.prebuild import lower_own_priority


async def _run_daemon(directories: list[Path]) -> None:
    async with docker_daemon(images.cache_directory()) as docker:
        directories.append(docker.directory)
        with docker.at_idle_priority():
            # Not earlier: everything that the daemon starts would keep the low priority.
            lower_own_priority()
            await images.build_all(docker, images.cache_directory())
        print(docker.directory, flush=True)
        await asyncio.Event().wait()


async def _main() -> None:
    links = interfaces()
    directories: list[Path] = []
    work = asyncio.create_task(_run_daemon(directories))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(sys.stdin)
        work.cancel()

    loop.add_reader(sys.stdin, stop)
    with suppress(asyncio.CancelledError):
        await work
    leftovers = [leftover for directory in directories for leftover in find_leftovers(directory)]
    leftovers += [f"network interface {name}" for name in interfaces() - links]
    if leftovers:
        sys.exit("\n".join(leftovers))


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("starting a Docker daemon requires root")
    asyncio.run(_main())
