"""The parts of a release that need no build."""

from __future__ import annotations

import gzip
import subprocess
import tarfile
from pathlib import Path

import pytest

from release.__main__ import ROOT
from release.chart import build_chart
from release.checksums import write_checksums
from release.debian_package import ControlFields, PackageTree, build_package
from release.errors import ReleaseError
from release.programs import run
from release.version import read_version, release_notes

CHANGELOG = """# Changelog

## [Unreleased]

* Coming.

## [0.2.0] - 2026-01-02

### Added

* Something.

## [0.1.0] - 2026-01-01

* The first release.
"""
FIELDS = ControlFields(
    package="example",
    version="1.2.3",
    architecture="amd64",
    depends=("python3 (>= 3.11)", "adduser"),
    description="a short line\nA text.\n\nAnother one.",
)


def write_versions(root: Path, project: str, cargo: str, chart: str) -> None:
    for file, text in (
        ("pyproject.toml", f'[project]\nversion = "{project}"\n'),
        ("filters/Cargo.toml", f'[workspace.package]\nversion = "{cargo}"\n'),
        ("deploy/helm/tidevoy/Chart.yaml", f'name: tidevoy\nversion: {chart}\nappVersion: "{chart}"\n'),
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def test_all_files_have_the_same_version() -> None:
    assert read_version(ROOT).count(".") == 2


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            ("1.2.3", "1.2.4", "1.2.3"),
            "filters/Cargo.toml has the version 1.2.4, but pyproject.toml has 1.2.3",
        ),
        (("1.2.3", "1.2.3", "1.2.2"), "Chart.yaml (version) has the version 1.2.2"),
        (("1.2", "1.2", "1.2"), "not of the form 1.2.3"),
    ],
)
def test_different_versions_are_refused(versions: tuple[str, str, str], message: str, tmp_path: Path) -> None:
    write_versions(tmp_path, *versions)
    with pytest.raises(ReleaseError) as refused:
        read_version(tmp_path)
    assert message in str(refused.value)


def test_notes_are_the_entry_of_the_version() -> None:
    assert release_notes(CHANGELOG, "0.2.0") == "# Tidevoy 0.2.0\n\n### Added\n\n* Something.\n"
    assert release_notes(CHANGELOG, "0.1.0").endswith("\n\n* The first release.\n")
    assert release_notes(CHANGELOG, "0.3.0") == "# Tidevoy 0.3.0\n\n* Coming.\n"
    with pytest.raises(ReleaseError, match=r"no entry for version 0\.3\.0"):
        release_notes("# Changelog\n", "0.3.0")


def test_sha256sum_accepts_the_checksums(tmp_path: Path) -> None:
    for name in ("b.deb", "a.whl"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path.glob("*.*"), tmp_path / "SHA256SUMS")
    command = ["sha256sum", "--check", "SHA256SUMS"]
    assert (
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
        == b"a.whl: OK\nb.deb: OK\n"
    )
    (tmp_path / "a.whl").write_text("changed")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_chart_has_one_directory_no_links_and_no_owner(tmp_path: Path) -> None:
    chart = tmp_path / "deploy/helm/tidevoy"
    (chart / "files").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("name: tidevoy\n")
    boards = tmp_path / "deploy/grafana/dashboards"
    boards.mkdir(parents=True)
    (boards / "nodes.json").write_text("{}\n")
    (chart / "files/dashboards").symlink_to("../../../grafana/dashboards")
    (chart / "files/nodes.json").symlink_to("dashboards/nodes.json")
    with tarfile.open(build_chart(tmp_path, "1.2.3", tmp_path)) as archive:
        entries = {entry.name: (entry.isreg(), entry.size) for entry in archive}
        owners = {(entry.uid, entry.uname, entry.mtime) for entry in archive}
    names = ("Chart.yaml", "files/dashboards/nodes.json", "files/nodes.json")
    assert entries == {f"tidevoy/{name}": (True, size) for name, size in zip(names, (14, 3, 3), strict=True)}
    assert owners == {(0, "", 0)}


def test_debian_package_has_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    source = tmp_path / "source"
    source.write_text("text\n")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "postinst").write_text("#!/bin/sh\n")

    def build(directory: Path) -> Path:
        directory.mkdir()
        tree = PackageTree(directory / "tree")
        tree.add_file(source, "/usr/bin/example", 0o755)
        tree.add_conffile(source, "/etc/example.conf")
        tree.add_link("example", "/usr/bin/other")
        tree.add_documents("example", source, source)
        return build_package(tree, FIELDS, scripts, directory)

    package = build(tmp_path / "first")
    assert package.name == "example_1.2.3_amd64.deb"
    assert package.read_bytes() == build(tmp_path / "second").read_bytes()
    unpacked = tmp_path / "unpacked"
    run(["dpkg-deb", "--raw-extract", str(package), str(unpacked)], "")
    assert (unpacked / "DEBIAN/conffiles").read_text() == "/etc/example.conf\n"
    assert (unpacked / "DEBIAN/postinst").stat().st_mode & 0o777 == 0o755
    assert (unpacked / "usr/bin/example").stat().st_mode & 0o777 == 0o755
    assert (unpacked / "usr/bin/other").readlink() == Path("example")
    assert gzip.decompress((unpacked / "usr/share/doc/example/changelog.gz").read_bytes()) == b"text\n"
    fields = run(["dpkg-deb", "--field", str(package)], "")
    assert "Depends: python3 (>= 3.11), adduser\n" in fields
    assert "Description: a short line\n A text.\n .\n Another one.\n" in fields
    assert "Recommends" not in fields
    assert "root/root" in run(["dpkg-deb", "--contents", str(package)], "")


def test_missing_and_failing_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="no program nothing-like-this: install it"):
        run(["nothing-like-this"], "install it")
    with pytest.raises(ReleaseError, match="failed:\nreason"):
        run(["sh", "-c", "echo reason; exit 3"], "")
