"""`python -m release [DIRECTORY]`: build all files of a release. See `release`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from controlplane.errors import TidevoyError
from release.chart import build_chart
from release.checksums import write_checksums
from release.debian import build_controlplane_package, build_envoy_package
from release.errors import ReleaseError
from release.images import build_images
from release.programs import run
from release.python_packages import build_wheel, lock_requirements
from release.sbom import build_bill_of_materials
from release.version import read_version, release_notes
from sandbox.envoy import envoy_binary

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("debian", "chart", "images", "sbom")


def main(arguments: list[str] | None = None) -> int:
    """Build a release. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release", description="Build all files of a release.")
    parser.add_argument(
        "directory", nargs="?", default=ROOT / "dist", type=Path, help="default: dist; its content is deleted"
    )
    parser.add_argument("--skip", action="append", choices=PARTS, default=[], help="leave out a part")
    options = parser.parse_args(arguments)
    try:
        build_release(options.directory.resolve(), frozenset(PARTS) - set(options.skip))
    except (ReleaseError, TidevoyError) as error:
        print(f"The release could not be built: {error}", file=sys.stderr)
        return 1
    return 0


def build_release(directory: Path, parts: frozenset[str]) -> None:
    """Build the wheel and the other `parts` into a new directory. Raises ReleaseError."""
    version = read_version(ROOT)
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(), version)
    # The time of the files in packages, so that two builds of the same commit are equal.
    commit_time = run(["git", "log", "-1", "--format=%ct"], "install git", cwd=ROOT).strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time)
    envoy = envoy_binary()
    _clear(directory)
    requirements = lock_requirements(ROOT)
    wheel = _timed(lambda: build_wheel(ROOT, directory))
    builds: dict[str, tuple[Callable[[], Path], ...]] = {
        "debian": (
            lambda: build_controlplane_package(ROOT, wheel, requirements, version, directory),
            lambda: build_envoy_package(ROOT, wheel, envoy, version, directory),
        ),
        "chart": (lambda: build_chart(ROOT, version, directory),),
        "images": (lambda: build_images(ROOT, version, directory),),
        "sbom": (lambda: build_bill_of_materials(ROOT, requirements, version, directory),),
    }
    for part in PARTS:
        if part in parts:
            for build in builds[part]:
                _timed(build)
    (directory / "RELEASE_NOTES.md").write_text(notes)
    write_checksums(directory.iterdir(), directory / "SHA256SUMS")
    print(f"checksums: {directory / 'SHA256SUMS'}")


def _clear(directory: Path) -> None:
    """Delete an earlier release. Raises ReleaseError for a directory with other content."""
    if directory.exists() and any(directory.iterdir()) and not (directory / "SHA256SUMS").exists():
        raise ReleaseError(
            f"{directory} has files that are no complete release: delete it, or name another one"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _timed(build: Callable[[], Path]) -> Path:
    started_at = time.monotonic()
    file = build()
    size, seconds = file.stat().st_size / 1e6, time.monotonic() - started_at
    print(f"{file.name}: {size:.1f} MB, built in {seconds:.0f} s", flush=True)
    return file


if __name__ == "__main__":
    sys.exit(main())
