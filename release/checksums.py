"""The checksums of a release's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def write_checksums(files: Iterable[Path], target: Path) -> None:
    """Write the SHA-256 sums in the format that `sha256sum --check` reads."""
    lines = []
    for file in sorted(files):
        with file.open("rb") as content:
            lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n")
    target.write_text("".join(lines))
