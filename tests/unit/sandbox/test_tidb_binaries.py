"""Where the programs of a TiDB cluster are searched for, and the errors when some are missing."""

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


def program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{says}'\n")
    path.chmod(0o755)
    return path


def folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        program(path / name)
    return path


def tiup(home: Path, **releases: str) -> dict[str, str]:
    """An environment in which TiUP has these releases, for example `tidb="v8.5.2 v8.5.3"`."""
    for name, versions in releases.items():
        for release in versions.split():
            program(home / "components" / name / release / f"{name}-server")
    return {"TIUP_HOME": str(home)}


def test_a_given_folder_is_used(tmp_path: Path) -> None:
    named = folder(tmp_path / "bin", *ALL)
    found = find_binaries(named, environment={})
    assert found is not None
    assert (found.tidb, found.pd) == (named / "tidb-server", named / "pd-server")
    assert (found.store.program, found.store.is_tikv) == (named / "tikv-server", True)


def test_the_option_precedes_the_environment_which_precedes_tiup(tmp_path: Path) -> None:
    environment = tiup(tmp_path / "tiup", tidb="v8.5.3", pd="v8.5.3", tikv="v8.5.3")
    found = find_binaries(environment=environment)
    assert found is not None
    assert found.tidb == tmp_path / "tiup/components/tidb/v8.5.3/tidb-server"
    environment[BINARIES_FOLDER_VARIABLE] = str(folder(tmp_path / "named", *ALL))
    found = find_binaries(environment=environment)
    assert found is not None
    assert found.tidb == tmp_path / "named/tidb-server"
    found = find_binaries(folder(tmp_path / "option", *ALL), environment=environment)
    assert found is not None
    assert found.tidb == tmp_path / "option/tidb-server"


def test_the_newest_release_of_which_tiup_has_all_programs_is_used(tmp_path: Path) -> None:
    environment = tiup(
        tmp_path,
        tidb="v8.5.3 v8.5.10 v9.0.0 v10.0.0-alpha",
        pd="v8.5.3 v8.5.10 v10.0.0-alpha",
        tikv="v8.5.3 v8.5.10 v9.0.0 v10.0.0-alpha",
    )
    found = find_binaries(environment=environment)
    assert found is not None
    assert {path.parent.name for path in (found.tidb, found.pd, found.store.program)} == {"v8.5.10"}


def test_another_store_needs_no_tikv(tmp_path: Path) -> None:
    environment = tiup(tmp_path, tidb="v8.5.3", pd="v8.5.3", tikv="v7.5.0")
    assert find_binaries(environment=environment) is None
    store = program(tmp_path / "my store")
    environment[STORE_VARIABLE] = f"'{store}' --listen={{address}} --data {{data}}"
    found = find_binaries(environment=environment)
    assert found is not None
    assert not found.store.is_tikv
    assert found.store.command(**VALUES) == [str(store), "--listen=127.0.0.1:1", "--data", "/data"]


def test_the_command_that_starts_tikv(tmp_path: Path) -> None:
    store = StoreProgram.parse(str(program(tmp_path / "tikv-server")))
    assert store.command(**VALUES)[1:] == [
        "--addr=127.0.0.1:1",
        "--status-addr=127.0.0.1:2",
        "--pd-endpoints=127.0.0.1:3",
        "--data-dir=/data",
        "--log-file=/log",
        "--config=/toml",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("/nowhere/store", "there is no program /nowhere/store to be the store"),
        ("{}/other", "it is not known how to start other; give its whole command, for example"),
        ("{}/other --at {{port}}", "the store's command has an unknown placeholder: 'port'"),
        ("{}/other {{address.port}}", "the store's command has an unknown placeholder: "),
        ("'{}/other", "the store's command cannot be read: no closing quotation"),
        ("", "the store's command is empty"),
    ],
)
def test_a_store_that_cannot_be_started(tmp_path: Path, text: str, says: str) -> None:
    program(tmp_path / "other")
    with pytest.raises(BinariesMissing) as missing:
        StoreProgram.parse(text.format(tmp_path))
    assert str(missing.value).startswith(says)


def test_missing_programs_are_named(tmp_path: Path) -> None:
    named = folder(tmp_path, "pd-server")
    (named / "tidb-server").write_text("not a program")
    with pytest.raises(
        BinariesMissing, match="has no tidb-server and no tikv-server; install them with `tiup "
    ):
        find_binaries(named, environment={})


def test_no_programs_at_all(tmp_path: Path) -> None:
    assert find_binaries(environment={"TIUP_HOME": str(tmp_path)}) is None
    with pytest.raises(
        BinariesMissing, match=r"^there are no programs of TiDB here; install them with `tiup "
    ):
        require_binaries(environment={"TIUP_HOME": str(tmp_path)})


def test_the_command_exits_with_2_and_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox.tidb_binaries"]
    root = Path(__file__).parents[3]
    told = subprocess.run(
        command, env={"TIUP_HOME": str(tmp_path)}, cwd=root, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.count("\n") == 1
    assert told.stderr.startswith("there are no programs of TiDB here; install them with `tiup install tidb")


def test_versions(tmp_path: Path) -> None:
    assert read_version(program(tmp_path / "tidb", "Release Version: v8.5.3\nEdition: Community")) == "v8.5.3"
    assert read_version(program(tmp_path / "tikv", "TiKV \nRelease Version:   8.5.3")) == "v8.5.3"
    assert read_version(program(tmp_path / "mute")) == ""
    assert read_version(tmp_path / "none") == ""
