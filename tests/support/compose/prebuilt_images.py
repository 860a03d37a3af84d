"""A Docker daemon that has all images of docker-compose.yml: `python -m tests.support.compose.prebuilt_images`.

It writes the daemon's directory to standard output when they are there, and ends with its standard input.
Exit code 0 says that nothing is left of the daemon then.
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
            # Not before: whatever the daemon starts would give way for good.
            lower_own_priority()
            await images.build_all(docker, images.cache_directory())
        print(docker.directory, flush=True)
        await asyncio.Event().wait()


async def _main() -> None:
    links = interfaces()
    directories: list[Path] = []
    work = asyncio.create_task(_run_daemon(directories))
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        work.cancel()

    loop.add_reader(sys.stdin, end)
    with suppress(asyncio.CancelledError):
        await work
    left = [found for directory in directories for found in find_leftovers(directory)]
    left += [f"network interface {name}" for name in interfaces() - links]
    if left:
        sys.exit("\n".join(left))


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("only root can start a Docker daemon")
    asyncio.run(_main())
