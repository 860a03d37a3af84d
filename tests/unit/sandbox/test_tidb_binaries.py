"""How the sandbox finds the programs of a TiDB cluster, and what it reports if some are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.tidb_binaries import (
    BINARIES_FOLDER_VARIABLE,
    STORE_VARIABLE,
    BinariesMissing,
    StoreProgram,
    find_binaries,
    find_tidb_releases,
    read_version,
    require_binaries,
)

ALL = ("tidb-server", "pd-server", "tikv-server")
VALUES = {
    "address": "127.0.0.1:1",
    "status_address": "127.0.0.1:2",
    "pd": "127.0.0.1:3",
    "data": "/data",
    "log": "/log",
    "config": "/toml",
}


def write_program(path: Path, output: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}'\n")
    path.chmod(0o755)
    return path


def write_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_program(path / name)
    return path


def write_tiup_home(home: Path, **releases: str) -> dict[str, str]:
    """Return an environment in which TiUP has these releases, for example `tidb="v8.5.2 v8.5.3"`."""
    for name, versions in releases.items():
        for release in versions.split():
            write_program(home / "components" / name / release / f"{name}-server")
    return {"TIUP_HOME": str(home)}


def test_uses_given_folder(tmp_path: Path) -> None:
    binaries_folder = write_folder(tmp_path / "bin", *ALL)
    binaries = find_binaries(binaries_folder, environment={})
    assert binaries is not None
    assert (binaries.tidb, binaries.pd) == (binaries_folder / "tidb-server", binaries_folder / "pd-server")
    assert (binaries.store.program, binaries.store.is_tikv) == (binaries_folder / "tikv-server", True)


def test_option_precedes_environment_and_environment_precedes_tiup(tmp_path: Path) -> None:
    environment = write_tiup_home(tmp_path / "tiup", tidb="v8.5.3", pd="v8.5.3", tikv="v8.5.3")
    binaries = find_binaries(environment=environment)
    assert binaries is not None
    assert binaries.tidb == tmp_path / "tiup/components/tidb/v8.5.3/tidb-server"
    environment[BINARIES_FOLDER_VARIABLE] = str(write_folder(tmp_path / "named", *ALL))
    binaries = find_binaries(environment=environment)
    assert binaries is not None
    assert binaries.tidb == tmp_path / "named/tidb-server"
    binaries = find_binaries(write_folder(tmp_path / "option", *ALL), environment=environment)
    assert binaries is not None
    assert binaries.tidb == tmp_path / "option/tidb-server"


def test_uses_newest_tiup_release_that_has_all_programs(tmp_path: Path) -> None:
    environment = write_tiup_home(
        tmp_path,
        tidb="v8.5.3 v8.5.10 v9.0.0 v10.0.0-alpha",
        pd="v8.5.3 v8.5.10 v10.0.0-alpha",
        tikv="v8.5.3 v8.5.10 v9.0.0 v10.0.0-alpha",
    )
    binaries = find_binaries(environment=environment)
    assert binaries is not None
    assert {path.parent.name for path in (binaries.tidb, binaries.pd, binaries.store.program)} == {"v8.5.10"}


def test_finds_releases_by_name_before_version_output(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, *ALL)
    write_program(folder / "tidb-server", "Release Version: v8.4.0-placeholder")
    write_program(folder / "tidb-server-v7.5.3", "Release Version: None")
    write_program(folder / "tidb-server-v8.1.2", "Release Version: v8.1.2")
    write_program(folder / "tidb-server-v8.1", "Release Version: None")
    binaries = find_binaries(folder, environment={})
    assert binaries is not None
    releases = find_tidb_releases(binaries)
    assert [(release.version, release.reports_version) for release in releases] == [
        ("v7.5.3", False),
        ("v8.1.2", True),
        ("v8.4.0-placeholder", True),
    ]
    # A link with a release in its name names the release of the program.
    (folder / "tidb-server-v8.5.3").symlink_to("tidb-server")
    assert [release.version for release in find_tidb_releases(binaries)] == ["v7.5.3", "v8.1.2", "v8.5.3"]


def test_finds_all_releases_of_tiup(tmp_path: Path) -> None:
    environment = write_tiup_home(tmp_path, tidb="v8.5.3 v7.5.3 v8.5.10", pd="v8.5.3", tikv="v8.5.3")
    binaries = find_binaries(environment=environment)
    assert binaries is not None
    releases = find_tidb_releases(binaries)
    assert [release.version for release in releases] == ["v7.5.3", "v8.5.3", "v8.5.10"]


def test_other_store_replaces_tikv(tmp_path: Path) -> None:
    environment = write_tiup_home(tmp_path, tidb="v8.5.3", pd="v8.5.3", tikv="v7.5.0")
    assert find_binaries(environment=environment) is None
    store = write_program(tmp_path / "my store")
    environment[STORE_VARIABLE] = f"'{store}' --listen={{address}} --data {{data}}"
    binaries = find_binaries(environment=environment)
    assert binaries is not None
    assert not binaries.store.is_tikv
    assert binaries.store.command(**VALUES) == [str(store), "--listen=127.0.0.1:1", "--data", "/data"]


def test_tikv_command_has_all_arguments(tmp_path: Path) -> None:
    store = StoreProgram.parse(str(write_program(tmp_path / "tikv-server")))
    assert store.command(**VALUES)[1:] == [
        "--addr=127.0.0.1:1",
        "--status-addr=127.0.0.1:2",
        "--pd-endpoints=127.0.0.1:3",
        "--data-dir=/data",
        "--log-file=/log",
        "--config=/toml",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nowhere/store", "the store program /nowhere/store does not exist or is not executable"),
        ("{}/other", "other is not a known store; give its whole command, for example"),
        ("{}/other --at {{port}}", "the store's command has an unknown placeholder: 'port'"),
        ("{}/other {{address.port}}", "the store's command has an unknown placeholder: "),
        ("'{}/other", "the store's command cannot be parsed: no closing quotation"),
        ("", "the store's command is empty"),
    ],
)
def test_rejects_invalid_store_command(tmp_path: Path, text: str, message: str) -> None:
    write_program(tmp_path / "other")
    with pytest.raises(BinariesMissing) as missing:
        StoreProgram.parse(text.format(tmp_path))
    assert str(missing.value).startswith(message)


def test_error_names_missing_programs(tmp_path: Path) -> None:
    binaries_folder = write_folder(tmp_path, "pd-server")
    (binaries_folder / "tidb-server").write_text("not a program")
    with pytest.raises(
        BinariesMissing, match="has no tidb-server and no tikv-server; install them with `tiup "
    ):
        find_binaries(binaries_folder, environment={})


def test_requires_programs_or_raises_install_hint(tmp_path: Path) -> None:
    assert find_binaries(environment={"TIUP_HOME": str(tmp_path)}) is None
    with pytest.raises(BinariesMissing, match=r"^no TiDB programs were found; install them with `tiup "):
        require_binaries(environment={"TIUP_HOME": str(tmp_path)})


def test_command_exits_with_2_and_one_line_without_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox.tidb_binaries"]
    root = Path(__file__).parents[3]
    result = subprocess.run(
        command, env={"TIUP_HOME": str(tmp_path)}, cwd=root, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("no TiDB programs were found; install them with `tiup install tidb")


def test_reads_version_of_programs(tmp_path: Path) -> None:
    assert (
        read_version(write_program(tmp_path / "tidb", "Release Version: v8.5.3\nEdition: Community"))
        == "v8.5.3"
    )
    assert read_version(write_program(tmp_path / "tikv", "TiKV \nRelease Version:   8.5.3")) == "v8.5.3"
    assert read_version(write_program(tmp_path / "mute")) == ""
    assert read_version(tmp_path / "none") == ""
