"""The Helm chart as an archive, as `helm package` makes it."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

_CHART = "deploy/helm/tidevoy"


def build_chart(root: Path, version: str, directory: Path) -> Path:
    """Pack the chart. Its version was checked by `release.version`."""
    target = directory / f"tidevoy-{version}.tgz"

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        return entry

    with (
        gzip.GzipFile(target, "wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for file in sorted(path for path in (root / _CHART).rglob("*") if path.is_file()):
            archive.add(file, f"tidevoy/{file.relative_to(root / _CHART)}", filter=without_owner)
    return target
