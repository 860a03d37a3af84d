"""Finds the programs of a real TiDB cluster, in a given folder or where TiUP installs them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from controlplane.errors import TidevoyError

BINARIES_FOLDER_VARIABLE = "TIDEVOY_TIDB_BIN"
STORE_VARIABLE = "TIDEVOY_TIDB_STORE"
INSTALL_HINT = (
    "install them with `tiup install tidb pd tikv` (https://tiup.io), or name a folder that has tidb-server,"
    f" pd-server and tikv-server in {BINARIES_FOLDER_VARIABLE}"
)
_RELEASE_PATTERN = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
_RELEASE_LINE_PATTERN = re.compile(r"^Release Version:\s*(\S+)", re.MULTILINE)
_VERSION_TIMEOUT_SECONDS = 20.0
_TIKV = "tikv-server"
_TIDB_PREFIX = "tidb-server-"
_STORE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    _TIKV: (
        *("--addr={address}", "--status-addr={status_address}", "--pd-endpoints={pd}"),
        *("--data-dir={data}", "--log-file={log}", "--config={config}"),
    ),
    # From TiDB: the store of its unit tests (pkg/store/mockstore/unistore) with TiKV's gRPC interface.
    "unistore-server": (
        *("-addr={address}", "-status-addr={status_address}", "-pd={pd}"),
        *("-data={data}", "-log-file={log}", "-L=error"),
    ),
}
"""The arguments of known stores, by program name. For other stores, the user gives the whole command."""
NO_BINARIES_MESSAGE = f"no TiDB programs were found; {INSTALL_HINT}"


class BinariesMissing(TidevoyError):
    """The programs of a TiDB cluster were not found."""


@dataclass(frozen=True, slots=True)
class StoreProgram:
    """The store's command. Placeholders: {address}, {status_address}, {pd}, {data}, {log}, {config}."""

    command_template: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the path of a known store, or a command with placeholders.

        Raises BinariesMissing if the program does not exist, or its arguments are unknown or invalid.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise BinariesMissing(f"the store's command cannot be parsed: {str(error).lower()}") from None
        if not words:
            raise BinariesMissing("the store's command is empty")
        program = Path(words[0]).expanduser().absolute()
        if not _is_program(program):
            raise BinariesMissing(f"the store program {program} does not exist or is not executable")
        arguments = tuple(words[1:])
        if not arguments:
            known_arguments = _STORE_ARGUMENTS.get(program.name)
            if known_arguments is None:
                raise BinariesMissing(
                    f"{program.name} is not a known store; give its whole command, for example"
                    f" '{program} --addr {{address}} --status-addr {{status_address}} --pd {{pd}}"
                    " --data-dir {data} --log-file {log}'"
                )
            arguments = known_arguments
        try:
            for word in arguments:
                word.format(address="", status_address="", pd="", data="", log="", config="")
        except (AttributeError, KeyError, IndexError, ValueError) as error:
            raise BinariesMissing(f"the store's command has an unknown placeholder: {error}") from None
        return cls((str(program), *arguments))

    @property
    def program(self) -> Path:
        return Path(self.command_template[0])

    @property
    def is_tikv(self) -> bool:
        """Whether the store is TiKV. Other stores may lack some features."""
        return self.program.name == _TIKV

    def command(self, **values: str) -> list[str]:
        return [self.command_template[0], *(word.format(**values) for word in self.command_template[1:])]


@dataclass(frozen=True, slots=True)
class TidbRelease:
    """A `tidb-server`. `version`: such as `v8.5.3`; empty if it is unknown.

    `reports_version`: whether `-V` prints `version`. A build without TiDB's Makefile prints another one.
    """

    program: Path
    version: str
    reports_version: bool

    @property
    def number(self) -> tuple[int, int, int]:
        """The release as a number, such as (8, 5, 3); zeros if it is unknown."""
        match = _RELEASE_PATTERN.match(self.version)
        return (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)

    @classmethod
    def of(cls, program: Path) -> Self:
        """Return the release that the name of the program or of its folder contains, else that of `-V`."""
        reported = read_version(program)
        for name in (program.name.removeprefix(_TIDB_PREFIX), program.parent.name):
            if _RELEASE_PATTERN.fullmatch(name):
                return cls(program, name, name == reported)
        return cls(program, reported, True)


@dataclass(frozen=True, slots=True)
class TidbBinaries:
    """The programs of a TiDB cluster."""

    tidb: Path
    pd: Path
    store: StoreProgram

    def describe(self) -> dict[str, str]:
        """Return the version, if known, and the path of PD, the store and TiDB."""
        programs = {"PD": self.pd, "store": self.store.program, "TiDB": self.tidb}
        return {name: f"{read_version(path)} ({path})".strip() for name, path in programs.items()}


def find_binaries(
    folder: Path | None = None, store: str | None = None, environment: Mapping[str, str] = os.environ
) -> TidbBinaries | None:
    """Return the programs in `folder`, by default in the folder that the environment names, else from TiUP.

    `store` is the program or command of the store. By default, the environment names it, or it is in the
    same place as the other programs. Returns None if no folder is named and TiUP has no programs.
    Raises BinariesMissing if a given folder or store does not exist or is incomplete.
    """
    binaries_folder = folder or (
        Path(environment[BINARIES_FOLDER_VARIABLE]) if environment.get(BINARIES_FOLDER_VARIABLE) else None
    )
    store_text = store or environment.get(STORE_VARIABLE)
    program = StoreProgram.parse(store_text) if store_text else None
    if binaries_folder is not None:
        return _from_folder(binaries_folder.expanduser().absolute(), program)
    return _from_tiup(Path(environment.get("TIUP_HOME") or Path.home() / ".tiup"), program)


def require_binaries(
    folder: Path | None = None, store: str | None = None, environment: Mapping[str, str] = os.environ
) -> TidbBinaries:
    """Like `find_binaries`, but raise BinariesMissing, with installation advice, if there are no programs."""
    binaries = find_binaries(folder, store, environment)
    if binaries is None:
        raise BinariesMissing(NO_BINARIES_MESSAGE)
    return binaries


def find_tidb_releases(binaries: TidbBinaries) -> list[TidbRelease]:
    """Return all known releases of `tidb-server`, oldest first.

    These are `binaries.tidb`, the programs `tidb-server-vX.Y.Z` in its folder, and all releases of TiUP.
    """
    folder = binaries.tidb.parent
    programs = [*folder.glob(f"{_TIDB_PREFIX}v*"), binaries.tidb]
    if _RELEASE_PATTERN.fullmatch(folder.name):
        programs += folder.parent.glob("v*/tidb-server")
    unique = {program.resolve(): program for program in reversed(programs) if _is_program(program)}
    releases = {release.number: release for release in map(TidbRelease.of, unique.values())}
    return [releases[number] for number in sorted(releases) if any(number)]


def read_version(program: Path) -> str:
    """Return the release of a program, for example `v8.5.3`; empty if the program does not report one."""
    try:
        result = subprocess.run(
            [str(program), "-V"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    line = _RELEASE_LINE_PATTERN.search(result.stdout)
    return "" if line is None else f"v{line[1].removeprefix('v')}"


def _from_folder(folder: Path, store: StoreProgram | None) -> TidbBinaries:
    missing = [name for name in ("tidb-server", "pd-server") if not _is_program(folder / name)]
    if store is None:
        stores = [folder / name for name in _STORE_ARGUMENTS if _is_program(folder / name)]
        if stores:
            store = StoreProgram.parse(shlex.quote(str(stores[0])))
        else:
            missing.append(_TIKV)
    if missing or store is None:
        raise BinariesMissing(f"{folder} has no {' and no '.join(missing)}; {INSTALL_HINT}")
    return TidbBinaries(folder / "tidb-server", folder / "pd-server", store)


def _from_tiup(home: Path, store: StoreProgram | None) -> TidbBinaries | None:
    """Return the newest release of which TiUP has all programs: `home`/components/NAME/vX.Y.Z/NAME-server."""
    names = ("tidb", "pd") if store is not None else ("tidb", "pd", "tikv")
    releases = [dict(_releases(home / "components" / name, f"{name}-server")) for name in names]
    common = set(releases[0]).intersection(*releases[1:])
    if not common:
        return None
    paths = [release[max(common)] for release in releases]
    return TidbBinaries(paths[0], paths[1], store or StoreProgram.parse(shlex.quote(str(paths[2]))))


def _releases(component: Path, program: str) -> Iterator[tuple[tuple[int, ...], Path]]:
    for folder in component.glob("v*"):
        release = _RELEASE_PATTERN.fullmatch(folder.name)
        if release is not None and _is_program(folder / program):
            yield tuple(map(int, release.groups())), folder / program


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def main() -> int:
    """`python -m sandbox.tidb_binaries`: print the programs, or what is missing (exit code 2)."""
    try:
        binaries = require_binaries()
    except BinariesMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    print("\n".join(f"{name}: {program}" for name, program in binaries.describe().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
