"""Builds the images that Pods run, as one archive: `python -m tests.support.kubernetes.container_images`.

The images are those of the tests with docker compose: Tidevoy's from its Dockerfiles, and fakes of PD, TiKV
and TiDB. The archive is kept until a file changes from which an image is built. Only root can build it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

from controlplane.version import VERSION
from tests.support.compose.docker_daemon import Docker
from tests.support.compose.images import REPOSITORY
from tests.support.compose.stack import docker_with_images
from tests.support.kubernetes.go_program import CACHE

PAUSE_IMAGE = "docker.io/local/pause:1"
UPGRADED_VERSION = "upgraded"
"""A second tag of the images, for upgrades."""

PD_IMAGE, TIKV_IMAGE, TIDB_IMAGE = (f"pingcap/{name}:v8.5.5" for name in ("pd", "tikv", "tidb"))
# Sources of the fakes' images. Tidevoy's own images are built from what .dockerignore includes.
_SOURCES = ("tests/support/compose", ".dockerignore", "docker-compose.yml")
# The first process of a Pod. It reaps the processes of Pods whose containers share them.
_PAUSE = """FROM local/debian-python
ENTRYPOINT ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while true; do sleep 3600 & wait; done"]
"""


def images_archive() -> Path:
    """Return the archive; build it first if needed."""
    ignored = (REPOSITORY / ".dockerignore").read_text()
    included = re.findall(r"^!(.+)$", ignored, re.MULTILINE)
    listed = ["git", "ls-files", "-z", "--", *_SOURCES, *included]
    output = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout
    digest = hashlib.sha256(_PAUSE.encode())
    for name in filter(None, output.split("\0")):
        digest.update(name.encode() + b"\0" + (REPOSITORY / name).read_bytes())
    archive = CACHE / f"images-{digest.hexdigest()[:12]}.tar"
    if not archive.exists():
        for outdated in CACHE.glob("images-*.tar"):
            outdated.unlink()
        asyncio.run(_build(archive))
    return archive


async def _build(archive: Path) -> None:
    async with docker_with_images() as docker:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "Dockerfile").write_text(_PAUSE)
            await docker("build", "--network=none", "--tag", PAUSE_IMAGE, directory, timeout=120.0)
        await _save(docker, archive)


async def _save(docker: Docker, archive: Path) -> None:
    names = [PAUSE_IMAGE, PD_IMAGE, TIKV_IMAGE, TIDB_IMAGE]
    for image in ("tidevoy/controlplane", "tidevoy/envoy"):
        for tag in (VERSION, UPGRADED_VERSION):
            await docker("tag", image, f"{image}:{tag}")
            names.append(f"{image}:{tag}")
    new = archive.with_suffix(".new")
    await docker("save", "--output", str(new), *names, timeout=600.0)
    new.rename(archive)


if __name__ == "__main__":
    print(images_archive())
