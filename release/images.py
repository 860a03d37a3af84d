"""The container images, built by the Dockerfiles that docker-compose.yml uses, too."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from release.errors import ReleaseError
from release.programs import run

IMAGES = {"tidevoy/controlplane": "controlplane/Dockerfile", "tidevoy/envoy": "envoy/Dockerfile"}
_HINT = "install Docker, or leave the images out (--skip images)"


def build_images(root: Path, version: str, directory: Path, options: Iterable[str] = ()) -> Path:
    """Build both images, and return an archive of them for `docker load`. Raises ReleaseError.

    `options` are further ones of `docker build`. Packages may come from a mirror, as in the compose file.
    """
    mirrors = [f"--build-arg={name}" for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX") if name in os.environ]
    tags = []
    for name, dockerfile in IMAGES.items():
        tags.append(f"{name}:{version}")
        labels = {
            "org.opencontainers.image.title": name,
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.description": "Load balancer for TiDB",
        }
        run(
            [
                *(
                    "docker",
                    "build",
                    "--quiet",
                    "--file",
                    str(root / dockerfile),
                    "--tag",
                    tags[-1],
                    *mirrors,
                    *options,
                ),
                *(f"--label={label}={value}" for label, value in labels.items()),
                str(root),
            ],
            _HINT,
        )
    target = directory / f"tidevoy-{version}-images.tar.gz"
    with subprocess.Popen(["docker", "save", *tags], stdout=subprocess.PIPE) as saved:
        assert saved.stdout is not None
        with gzip.GzipFile(target, "wb", compresslevel=6, mtime=0) as archive:
            shutil.copyfileobj(saved.stdout, archive)
    if saved.returncode != 0:
        raise ReleaseError(f"docker save {' '.join(tags)} failed with exit code {saved.returncode}")
    return target
