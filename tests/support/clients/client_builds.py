"""The clients of the matrix: what each is made of, and how it is installed, once for each set of versions.
`python -m tests.support.clients.client_builds` installs all of them, in its own good time.

Versions are pinned by the lock file of each language, beside the sources. What is built lies in `.clients/`
at the root of the repository, under a name that tells of the sources it was built from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.child_process import ProgramMissing, find_program
from tests.support.prebuild import end_with_input, give_way

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[2]
CACHE = ROOT / ".clients"
_BUILD_SECONDS = 900.0


class BuildFailed(Exception):
    """A client could not be installed; the text is what its tool wrote last."""


class LanguageMissing(ProgramMissing):
    """No package of Debian 12 has this compiler in a version that will do; `make test` cannot install it."""


@dataclass(frozen=True, slots=True)
class Kit:
    """Clients that are built together. `inputs`: what a build depends on, patterns of files in `sources`.

    `build` gets the sources and an empty directory. `command` is how a client is run from there.
    """

    name: str
    inputs: tuple[str, ...]
    build: Callable[[Path, Path], None]

    @property
    def sources(self) -> Path:
        """Where its files are in the repository."""
        return SOURCES / self.name

    def install(self) -> Path:
        """The directory with what was built, building it first if need be, or waiting while another does.

        BuildFailed when that fails; ProgramMissing, saying what to install, when a tool is not there, and
        LanguageMissing when that is beyond Debian.
        """
        digest = hashlib.sha256()
        for pattern in self.inputs:
            for file in sorted(self.sources.glob(pattern)):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        built = CACHE / f"{self.name}-{digest.hexdigest()[:12]}"
        CACHE.mkdir(exist_ok=True)
        with (CACHE / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (built / "ready").exists():
                shutil.rmtree(built, ignore_errors=True)
                built.mkdir()
                self.build(self.sources, built)
                (built / "ready").touch()
        return built


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its kit, and its command line in the directory where the kit was built.

    `lacks`: the steps that it cannot do; it says itself why. `most_rows`, `most_rows_prepared`: how many it
    reads at most, where more would only measure the language. `most_blob`: bytes of its largest value.
    """

    name: str
    kit: Kit
    command: Callable[[Path], list[str]]
    lacks: frozenset[str] = frozenset()
    most_rows: int = 1_000_000
    most_rows_prepared: int = 1_000_000
    most_blob: int = 1 << 30


def _run(
    command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None
) -> None:
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=directory,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_BUILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{command[0]} took more than {_BUILD_SECONDS:.0f} s") from None
    if done.returncode != 0:
        text = done.stdout.decode(errors="replace")
        raise BuildFailed(f"{' '.join(map(str, command))} failed:\n{text[-4000:]}")


def _tool(program: str, install: str) -> str:
    try:
        return find_program(program, "")
    except ProgramMissing:
        raise ProgramMissing(program, install) from None


def _build_python(sources: Path, built: Path) -> None:
    # mysqlclient comes as C source only.
    _tool("mariadb_config", "apt-get install libmariadb-dev")
    _tool("gcc", "apt-get install gcc")
    _tool("pkg-config", "apt-get install pkg-config")
    _run([sys.executable, "-m", "venv", str(built / "venv")], built)
    pip = [str(built / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "--require-hashes", "-r", str(sources / "requirements.lock")], built)


def _build_go(sources: Path, built: Path) -> None:
    try:
        go = find_program("go", "")
        told = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    except (ProgramMissing, subprocess.CalledProcessError):
        told = ""
    # An older one would fetch 1.24 by itself, but not before 1.21.
    found = re.match(r"go version go(\d+)\.(\d+)", told)
    if found is None or tuple(map(int, found.groups())) < (1, 21):
        raise LanguageMissing("Go 1.24 or newer", "the package of go.dev/doc/install")
    _run([go, "build", "-mod=readonly", "-o", built / "client", "."], sources)


def _build_node(sources: Path, built: Path) -> None:
    npm = _tool("npm", "apt-get install nodejs npm")
    for name in ("package.json", "package-lock.json", *(file.name for file in sources.glob("*.mjs"))):
        shutil.copy(sources / name, built)
    _run([npm, "ci", "--silent", "--no-audit", "--no-fund"], built)


def _build_java(sources: Path, built: Path) -> None:
    maven = _tool("mvn", "apt-get install maven")
    javac = _tool("javac", "apt-get install default-jdk-headless")
    copy = ["dependency:copy-dependencies", f"-DoutputDirectory={built / 'lib'}"]
    _run([maven, "--batch-mode", "--quiet", "--file", sources / "pom.xml", *copy], built)
    files = sorted(sources.glob("*.java"))
    _run([javac, "-Xlint:all", "-Werror", "-cp", f"{built}/lib/*", "-d", built, *files], built)


def _build_rust(sources: Path, built: Path) -> None:
    cargo = _tool("cargo", "rustup (rustup.rs)")
    # One directory for all versions: most of what is compiled stays the same.
    target = CACHE / "rust"
    _run([cargo, "build", "--quiet", "--release", "--locked"], sources, {"CARGO_TARGET_DIR": str(target)})
    shutil.copy(target / "release/client", built)


def _build_nothing(_sources: Path, _built: Path) -> None:
    """Debian packages contain the drivers, and the sources run in place."""


_PYTHON = Kit("python", ("requirements.lock",), _build_python)
_GO = Kit("go", ("go.mod", "go.sum", "*.go"), _build_go)
_NODE = Kit("node", ("package.json", "package-lock.json", "*.mjs"), _build_node)
_JAVA = Kit("java", ("pom.xml", "*.java"), _build_java)
_RUST = Kit("rust", ("Cargo.toml", "Cargo.lock", "src/*.rs"), _build_rust)
_PHP = Kit("php", (), _build_nothing)
_PERL = Kit("perl", (), _build_nothing)
_RUBY = Kit("ruby", (), _build_nothing)


_PREPARED = "query_prepared rows_prepared blob_prepared"
_REDUCED = (100_000, 100_000, 17 << 20)
_SMALL = (10_000, 1_000, 1 << 20)
"""Limits on rows, prepared rows and bytes for clients of a slow language, and, `_SMALL`, for those whose
library or language another client tests with large results."""


def _python(name: str, driver: str, lacks: str, *most: int) -> Client:
    def command(built: Path) -> list[str]:
        return [str(built / "venv/bin/python"), "-m", "tests.support.clients.python", driver]

    return Client(name, _PYTHON, command, frozenset(lacks.split()), *most)


def _compiled(name: str, kit: Kit, lacks: str) -> Client:
    return Client(name, kit, lambda built: [str(built / "client")], frozenset(lacks.split()))


def _interpreted(
    name: str, kit: Kit, source: str, driver: str, lacks: str, most: tuple[int, int, int]
) -> Client:
    program, packages, *options = _INTERPRETERS[kit.name]

    def command(_: Path) -> list[str]:
        return [_tool(program, f"apt-get install {packages}"), *options, str(kit.sources / source), driver]

    return Client(name, kit, command, frozenset(lacks.split()), *most)


_INTERPRETERS = {
    "php": ("php", "php-cli php-mysql", "-d", "mysqli.allow_local_infile=1"),
    "perl": ("perl", "libdbd-mysql-perl libdbd-mariadb-perl"),
    "ruby": ("ruby", "ruby-mysql2"),
}
"""By kit: the program, the Debian packages with the drivers, and options of the program."""


def _node(driver: str) -> Callable[[Path], list[str]]:
    return lambda built: [_tool("node", "apt-get install nodejs"), str(built / "client.mjs"), driver]


def _java(driver: str) -> Callable[[Path], list[str]]:
    def command(built: Path) -> list[str]:
        java = _tool("java", "apt-get install default-jre-headless")
        return [java, "-XX:+UseSerialGC", "-Xmx1g", "-cp", f"{built}:{built}/lib/*", "Client", driver]

    return command


CLIENTS = (
    _python("PyMySQL", "pymysql", f"{_PREPARED} batch cursor change_user reset"),
    _python("asyncmy", "asyncmy", "cursor load_data change_user reset"),
    _python("connector-python (C)", "connector-c", "batch cursor", 1_000_000, 100_000),
    _python("connector-python (pure)", "connector-pure", "batch", 100_000, 100_000),
    _python("mysqlclient", "mysqlclient", f"{_PREPARED} batch cursor reset"),
    _compiled("go-sql-driver", _GO, "batch cursor change_user reset"),
    Client("mysql2", _NODE, _node("mysql2"), frozenset({"batch", "cursor"})),
    Client("mariadb (Node)", _NODE, _node("mariadb"), frozenset({"cursor", "change_user"}), *_SMALL),
    Client("Connector/J", _JAVA, _java("mysql")),
    Client(
        "MariaDB Connector/J",
        _JAVA,
        _java("mariadb"),
        frozenset({"cursor", "change_user", "reset"}),
        *_SMALL,
    ),
    _compiled("sqlx", _RUST, "batch cursor load_data change_user reset"),
    _interpreted("mysqli", _PHP, "client.php", "mysqli", "batch reset", _REDUCED),
    _interpreted("PDO", _PHP, "client.php", "pdo", "ping batch cursor change_user reset", _SMALL),
    _interpreted("DBD::mysql", _PERL, "client.pl", "mysql", "batch cursor change_user reset", _SMALL),
    _interpreted("DBD::MariaDB", _PERL, "client.pl", "MariaDB", "batch cursor change_user reset", _SMALL),
    _interpreted("mysql2 (Ruby)", _RUBY, "client.rb", "mysql2", "batch cursor change_user reset", _SMALL),
)
"""All of them, as the table shows them."""

COMPRESSING = ("mysqli", "PDO")
"""Clients that compress, if told to, even if the server does not offer compression."""

NEGOTIATING = ("DBD::mysql", "DBD::MariaDB", "mysql2", "mariadb (Node)", "MariaDB Connector/J")
"""Clients that compress, if told to, only if the server offers compression."""


def main() -> None:
    """Install whatever can be; what cannot is told by whoever needs it."""
    end_with_input()
    give_way()
    # What takes longest comes first.
    for kit in (_RUST, _PYTHON, _GO, _JAVA, _NODE):
        try:
            kit.install()
        except (BuildFailed, ProgramMissing) as problem:
            print(problem, file=sys.stderr)


if __name__ == "__main__":
    main()
