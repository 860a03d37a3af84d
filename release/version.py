"""The version of a release. It is written in pyproject.toml; other files must agree with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from release.errors import ReleaseError

# The version of the command line in a Debian package must sort like that of the wheel.
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


def read_version(root: Path) -> str:
    """Return the version in pyproject.toml. Raises ReleaseError if another file has a different one."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if not _RELEASE.fullmatch(version):
        raise ReleaseError(f"pyproject.toml: the version {version!r} is not of the form 1.2.3")
    for file, found in _other_versions(root).items():
        if found != version:
            raise ReleaseError(
                f"{file} has the version {found}, but pyproject.toml has {version}: make them equal"
            )
    return version


def _other_versions(root: Path) -> dict[str, str]:
    cargo = tomllib.loads((root / "filters/Cargo.toml").read_text())
    versions = {"filters/Cargo.toml": cargo["workspace"]["package"]["version"]}
    chart = root / "deploy/helm/tidevoy/Chart.yaml"
    if chart.exists():
        for key in ("version", "appVersion"):
            match = re.search(rf'^{key}: *"?([^"\s]+)', chart.read_text(), re.MULTILINE)
            versions[f"deploy/helm/tidevoy/Chart.yaml ({key})"] = match[1] if match else "none"
    return versions


def release_notes(changelog: str, version: str) -> str:
    """Return the entry of a version in CHANGELOG.md; before it is dated, that of the unreleased changes.

    Raises ReleaseError if there is neither.
    """
    for heading in (version, "Unreleased"):
        entry = re.search(
            rf"^## \[{re.escape(heading)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
        )
        if entry:
            return f"# Tidevoy {version}\n\n{entry[1].strip()}\n"
    raise ReleaseError(f"CHANGELOG.md has no entry for version {version}: add one")
