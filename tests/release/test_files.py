"""The files of a release: their checksums, and that another build makes the same files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from release.__main__ import build_release
from tests.release.conftest import PARTS

pytestmark = pytest.mark.timeout(1800)


def test_checksums_match(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=release, check=True)
    listed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in release.iterdir()} - {"SHA256SUMS"}


@pytest.mark.skipif(
    "TIDEVOY_DIST" in os.environ, reason="the release may have been built from another commit"
)
def test_two_builds_are_equal(release: Path, tmp_path: Path) -> None:
    build_release(tmp_path, PARTS)
    assert (tmp_path / "SHA256SUMS").read_text() == (release / "SHA256SUMS").read_text()
