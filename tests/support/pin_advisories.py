"""Writes `advisories.json` from checkouts of two databases, which `make advisories` fetches first.

Only the advisories of locked packages are kept, with what is needed to compare versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from tests.support.advisories import ADVISORIES, CRATES, PYPI, read_lock
from tests.support.dependency_audit import CARGO_LOCKS, LOCKS


def pin(database: str, checkout: Path, locks: Sequence[Path], ecosystem: str) -> dict[str, Any]:
    """Return the part of `advisories.json` for one ecosystem."""
    packages = {package.name for lock in locks for package in read_lock(lock)}
    advisories: dict[str, dict[str, Any]] = {}
    for record in _records(checkout):
        if "withdrawn" in record:
            continue
        for affected in record.get("affected", ()):
            package = affected["package"]
            name = canonicalize_name(package["name"]) if ecosystem == PYPI else package["name"]
            if package["ecosystem"] != ecosystem or name not in packages:
                continue
            ranges = list(version_ranges(affected))
            if not ranges:
                raise ValueError(f"{record['id']} has no range of versions of {name}")
            kept = advisories.setdefault(record["id"], {"package": name, "ranges": []})
            if kept["package"] != name:
                raise ValueError(f"{record['id']} is about several locked packages")
            kept["ranges"] += ranges
    commit, date = _git(checkout, "log", "-1", "--format=%H %cs").split()
    return {
        "database": {"name": database, "commit": commit, "date": date},
        "packages": sorted(packages),
        "advisories": dict(sorted(advisories.items())),
    }


def version_ranges(affected: Mapping[str, Any]) -> Iterator[list[str | None]]:
    """Yield `introduced`, `fixed` and `last_affected` of each range, as VersionRange has them.

    An advisory without ranges lists the affected versions.
    """
    for each in affected.get("ranges", ()):
        if each["type"] == "GIT":
            continue
        introduced = None
        for event in each["events"]:
            ((kind, version),) = event.items()
            if kind == "introduced":
                introduced = "0" if version == "0.0.0-0" else version
            else:
                yield [introduced, version, None] if kind == "fixed" else [introduced, None, version]
                introduced = None
        if introduced is not None:
            yield [introduced, None, None]
    if not any(each["type"] != "GIT" for each in affected.get("ranges", ())):
        yield from ([version, None, version] for version in affected.get("versions", ()))


def _records(checkout: Path) -> Iterator[Any]:
    for file in _git(checkout, "ls-files", "*.json", "vulns/*.yaml").splitlines():
        text = (checkout / file).read_text()
        yield json.loads(text) if file.endswith(".json") else yaml.load(text, yaml.CSafeLoader)


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rustsec", type=Path, help="a checkout of RustSec's database, branch osv")
    parser.add_argument("pypa", type=Path, help="a checkout of PyPA's database")
    arguments = parser.parse_args()
    data = {
        CRATES: pin("RustSec", arguments.rustsec, CARGO_LOCKS, CRATES),
        PYPI: pin("PyPA", arguments.pypa, LOCKS, PYPI),
    }
    ADVISORIES.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
