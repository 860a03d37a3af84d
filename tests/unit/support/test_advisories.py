"""The advisories in the repository: which versions they mean, and that they cover all locked packages."""

from __future__ import annotations

import datetime
import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.advisories import (
    CRATES,
    PYPI,
    Advisory,
    AdvisoryFile,
    Database,
    Package,
    VersionRange,
    read_lock,
    version_order,
)
from tests.support.dependency_audit import CARGO_LOCKS, LOCKS, check_advisories
from tests.support.pin_advisories import pin, version_ranges

DATABASE = Database("D", "0123456789", "2026-01-31")


@pytest.mark.parametrize(
    "versions",
    [
        (CRATES, "0.9.10", "1.0.0-alpha", "1.0.0-alpha.2", "1.0.0-alpha.11", "1.0.0-beta", "1.0.0", "1.0.1"),
        (CRATES, "1.0.0-9", "1.0.0-a", "1.0.0-a.b", "1.0.0"),
        (PYPI, "1.0.dev1", "1.0a2", "1.0rc1", "1.0", "1.0.post1", "1.10"),
    ],
)
def test_orders_versions(versions: tuple[str, ...]) -> None:
    ecosystem, *ordered = versions
    order = version_order(ecosystem)
    assert all(order(first) < order(second) for first, second in pairwise(ordered))


def test_build_metadata_does_not_matter() -> None:
    order = version_order(CRATES)
    assert order("1.0.0+2019") == order("1.0.0")


@pytest.mark.parametrize(
    ("versions", "affected"),
    [
        (VersionRange("0"), {"0.0.0-0", "1.2.2", "1.2.3", "2.0.0"}),
        (VersionRange("0", fixed="1.2.3"), {"0.0.0-0", "1.2.2"}),
        (VersionRange("1.2.2", fixed="2.0.0"), {"1.2.2", "1.2.3"}),
        (VersionRange("1.2.2", last_affected="1.2.3"), {"1.2.2", "1.2.3"}),
    ],
)
def test_range_has_versions(versions: VersionRange, affected: set[str]) -> None:
    order = version_order(CRATES)
    candidates = ("0.0.0-0", "1.2.2", "1.2.3", "2.0.0")
    assert {each for each in candidates if versions.has(each, order)} == affected


def test_reads_ranges_of_osv() -> None:
    """The events are those of RUSTSEC-2026-0104, with a range of commits."""
    events = [
        {"introduced": "0.0.0-0"},
        {"fixed": "0.103.13"},
        {"introduced": "0.104.0-alpha.1"},
        {"fixed": "0.104.0-alpha.7"},
        {"introduced": "2.0.0"},
    ]
    ranges: list[dict[str, Any]] = [
        {"type": "GIT", "events": [{"introduced": "0"}, {"fixed": "abcdef"}]},
        {"type": "SEMVER", "events": events},
        {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"last_affected": "1.5"}]},
    ]
    assert list(version_ranges({"ranges": ranges})) == [
        ["0", "0.103.13", None],
        ["0.104.0-alpha.1", "0.104.0-alpha.7", None],
        ["2.0.0", None, None],
        ["0", None, "1.5"],
    ]


def test_reads_versions_of_osv_without_ranges() -> None:
    commits = {"type": "GIT", "events": [{"introduced": "0"}]}
    assert list(version_ranges({"ranges": [commits], "versions": ["1.0", "1.1"]})) == [
        ["1.0", None, "1.0"],
        ["1.1", None, "1.1"],
    ]


def test_finds_affected_packages_and_names_unknown_ones() -> None:
    advisory = Advisory("PYSEC-1", "a", (VersionRange("0", fixed="1.0"), VersionRange("2.0")))
    file = AdvisoryFile(PYPI, DATABASE, ["a", "b"], [advisory])
    packages = [Package(PYPI, name, version) for name, version in (("a", "1.0"), ("a", "2.1"), ("c", "1"))]
    assert file.findings(packages) == ["a 2.1: PYSEC-1"]
    assert file.missing(packages) == ["c"]


@pytest.mark.parametrize(
    ("today", "verdict"), [("2026-03-03", "ok"), ("2026-03-04", "OLD"), ("2027-01-01", "OLD")]
)
def test_old_database_is_reported(today: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AdvisoryFile(PYPI, DATABASE, [], [])
    monkeypatch.setattr(AdvisoryFile, "read", lambda _: file)
    (line,) = check_advisories(PYPI, [], datetime.date.fromisoformat(today)).lines()
    assert line.split()[0] == verdict
    assert "D of 2026-01-31 (012345678): 0 packages of PyPI, 0 advisories" in line


def test_packages_that_were_locked_later_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    file = AdvisoryFile(PYPI, DATABASE, ["a"], [])
    monkeypatch.setattr(AdvisoryFile, "read", lambda _: file)
    result = check_advisories(PYPI, LOCKS, datetime.date(2026, 2, 1))
    assert result.lines()[0].startswith("SKIPPED")
    assert "pymysql" in result.skip_reason


@pytest.mark.parametrize(("ecosystem", "locks"), [(CRATES, CARGO_LOCKS), (PYPI, LOCKS)])
def test_no_locked_package_has_a_known_vulnerability(ecosystem: str, locks: tuple[Path, ...]) -> None:
    """Otherwise update the package, or run `make advisories`."""
    packages = [package for lock in locks for package in read_lock(lock)]
    file = AdvisoryFile.read(ecosystem)
    assert len(packages) > 100
    assert (file.findings(packages), file.missing(packages)) == ([], [])


def test_copies_advisories_of_locked_packages(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("Some_Package==1.0 \\\n    --hash=sha256:0\nother==2 ; python_version < '3.12'\n")
    checkout = tmp_path / "database"
    checkout.mkdir()

    def add(name: str, package: str, **fields: Any) -> None:
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]
        affected = [{"package": {"ecosystem": PYPI, "name": package}, "ranges": ranges}]
        (checkout / f"{name}.json").write_text(json.dumps({"id": name, "affected": affected, **fields}))

    add("PYSEC-1", "Some.Package")
    add("PYSEC-2", "another")
    add("PYSEC-3", "other", withdrawn="2026-01-01T00:00:00Z")
    git = ("git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t@example.org")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message=1", "--no-gpg-sign")):
        subprocess.run([*git, *command], check=True)
    data = pin("D", checkout, [lock], PYPI)
    assert data["packages"] == ["other", "some-package"]
    assert data["advisories"] == {"PYSEC-1": {"package": "some-package", "ranges": [["0", None, None]]}}
    assert data["database"]["name"] == "D"
    assert len(data["database"]["commit"]) == 40
