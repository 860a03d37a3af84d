"""The Helm chart as an archive, as `helm package` makes it.

The chart has links to the alerts and dashboards that docker compose uses. The archive has these files.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

_CHART = "deploy/helm/tidevoy"


def build_chart(root: Path, version: str, directory: Path) -> Path:
    """Pack the chart. Its version was checked by `release.version`."""
    target = directory / f"tidevoy-{version}.tgz"

    def normalized(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mode = 0o644
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        return entry

    with (
        gzip.GzipFile(target, "wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", dereference=True) as archive,
    ):
        for file in sorted(_files(root / _CHART)):
            archive.add(file, f"tidevoy/{file.relative_to(root / _CHART)}", filter=normalized)
    return target


def _files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory, followlinks=True):
        yield from (Path(parent, name) for name in names)
