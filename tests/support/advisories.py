"""Known vulnerabilities of the locked packages, from a file that is part of the repository.

`advisories.json` has the advisories of two public databases for these packages: RustSec for crates, PyPA for
Python packages. So the audit says what it has checked, also without a network. Versions are in ranges, as in
the OSV format (https://ossf.github.io/osv-schema/). `tests.support.pin_advisories` writes the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

ADVISORIES = Path(__file__).with_suffix(".json")
CRATES, PYPI = "crates.io", "PyPI"

_PINNED_REQUIREMENT = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.M)


@dataclass(frozen=True, slots=True)
class Package:
    """A locked package. `ecosystem`: `crates.io` or `PyPI`."""

    ecosystem: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Database:
    """A public database. `commit` and `date` (of the commit, YYYY-MM-DD): which state of it was copied."""

    name: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions from `introduced` to before `fixed`, or to `last_affected`; without both, all later ones."""

    introduced: str
    fixed: str | None = None
    last_affected: str | None = None

    def has(self, version: str, order: Callable[[str], Any]) -> bool:
        """Return whether the version is in the range. `order`: the sort key of versions."""
        key = order(version)
        return (
            (self.introduced == "0" or order(self.introduced) <= key)
            and (self.fixed is None or key < order(self.fixed))
            and (self.last_affected is None or key <= order(self.last_affected))
        )


@dataclass(frozen=True, slots=True)
class Advisory:
    """A vulnerability in some versions of a package, or that the package is not maintained."""

    id: str
    package: str
    ranges: tuple[VersionRange, ...]


class AdvisoryFile:
    """The advisories of one ecosystem for the packages that were locked when the file was written."""

    def __init__(
        self, ecosystem: str, database: Database, packages: Iterable[str], advisories: Iterable[Advisory]
    ) -> None:
        self.ecosystem, self.database = ecosystem, database
        self.packages = frozenset(packages)
        self.advisories = tuple(advisories)

    def findings(self, packages: Iterable[Package]) -> list[str]:
        """Return a line for each advisory that applies to one of the packages."""
        order = version_order(self.ecosystem)
        return [
            f"{package.name} {package.version}: {advisory.id}"
            for package in packages
            for advisory in self.advisories
            if advisory.package == package.name
            and any(each.has(package.version, order) for each in advisory.ranges)
        ]

    def missing(self, packages: Iterable[Package]) -> list[str]:
        """Return the names of packages that were locked later."""
        return sorted({package.name for package in packages} - self.packages)

    @classmethod
    def read(cls, ecosystem: str) -> AdvisoryFile:
        """Read the part of `advisories.json` for this ecosystem."""
        data = json.loads(ADVISORIES.read_text())[ecosystem]
        advisories = [
            Advisory(name, each["package"], tuple(VersionRange(*values) for values in each["ranges"]))
            for name, each in data["advisories"].items()
        ]
        return cls(ecosystem, Database(**data["database"]), data["packages"], advisories)


def read_lock(file: Path) -> list[Package]:
    """Return the packages of a `Cargo.lock`, without local crates, or of a `requirements.lock`."""
    if file.name == "Cargo.lock":
        return [
            Package(CRATES, package["name"], package["version"])
            for package in tomllib.loads(file.read_text())["package"]
            if "source" in package
        ]
    return [
        Package(PYPI, canonicalize_name(name), version)
        for name, version in _PINNED_REQUIREMENT.findall(file.read_text())
    ]


def version_order(ecosystem: str) -> Callable[[str], Any]:
    """Return the sort key of versions: that of PEP 440 for Python packages, of SemVer for crates."""
    return Version if ecosystem == PYPI else _semver_key


def _semver_key(version: str) -> tuple[Any, ...]:
    """Return the precedence of a version (https://semver.org/#spec-item-11)."""
    core, _, prerelease = version.partition("+")[0].partition("-")
    identifiers = tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in prerelease.split(".") if part
    )
    return (*map(int, core.split(".")), not prerelease, identifiers)
