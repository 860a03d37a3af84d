"""The clients of the client matrix, and their builds. The matrix runs the same steps with many drivers.
`python -m tests.support.clients.client_builds` installs all clients.

Each language's lock file pins the versions. Each build has its own directory in the user's cache
directory, named after a hash of the build's inputs. So each set of versions is built once.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.child_process import ProgramMissing
from tests.support.build_tools import BuildFailed, find_go, find_tool, run_tool
from tests.support.cache import cache_directory, locked

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[2]
BUILD_CACHE = cache_directory("clients")


@dataclass(frozen=True, slots=True)
class ClientBuild:
    """Clients that are built together.

    `inputs`: glob patterns of the files in `sources` on which the build depends. `build` gets the directory
    of the sources, and an empty directory for the result.
    """

    name: str
    inputs: tuple[str, ...]
    build: Callable[[Path, Path], None]

    @property
    def sources(self) -> Path:
        """The directory of the sources in the repository."""
        return SOURCES / self.name

    def install(self) -> Path:
        """Return the directory of the build; build it first if needed, or wait for a concurrent build.

        Raises BuildFailed if the build fails, ProgramMissing if a tool is missing, and the subclass
        LanguageNotPackaged if Debian has no package of the tool.
        """
        digest = hashlib.sha256(f"{sys.version} {sys.base_prefix}".encode())
        for pattern in self.inputs:
            for file in sorted(self.sources.glob(pattern)):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        built = BUILD_CACHE / f"{self.name}-{digest.hexdigest()[:12]}"
        with locked(BUILD_CACHE, self.name):
            if not (built / "ready").exists():
                shutil.rmtree(built, ignore_errors=True)
                built.mkdir()
                self.build(self.sources, built)
                (built / "ready").touch()
        return built


@dataclass(frozen=True, slots=True)
class MatrixClient:
    """One client. `command` gets the directory of the build and returns the command line of the client.

    For each of `unsupported_steps`, the client prints why the driver cannot run the step. `max_rows`,
    `max_prepared_rows` and `max_blob_bytes` limit the transferred data, because some languages are slow.
    """

    name: str
    build: ClientBuild
    command: Callable[[Path], list[str]]
    unsupported_steps: frozenset[str] = frozenset()
    max_rows: int = 200_000
    max_prepared_rows: int = 200_000
    max_blob_bytes: int = 1 << 30


def _build_python(sources: Path, built: Path) -> None:
    # mysqlclient is available as C source only.
    find_tool("mariadb_config", "apt-get install libmariadb-dev")
    find_tool("gcc", "apt-get install gcc")
    find_tool("pkg-config", "apt-get install pkg-config")
    run_tool([sys.executable, "-m", "venv", str(built / "venv")], built)
    pip = [str(built / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run_tool([*pip, "install", "--require-hashes", "-r", str(sources / "requirements.lock")], built)


def _build_go(sources: Path, built: Path) -> None:
    run_tool([find_go(), "build", "-mod=readonly", "-o", built / "client", "."], sources)


def _build_node(sources: Path, built: Path) -> None:
    npm = find_tool("npm", "apt-get install nodejs npm")
    for name in ("package.json", "package-lock.json", *(file.name for file in sources.glob("*.mjs"))):
        shutil.copy(sources / name, built)
    run_tool([npm, "ci", "--silent", "--no-audit", "--no-fund"], built)


def _build_java(sources: Path, built: Path) -> None:
    maven = find_tool("mvn", "apt-get install maven")
    javac = find_tool("javac", "apt-get install default-jdk-headless")
    copy = ["dependency:copy-dependencies", f"-DoutputDirectory={built / 'lib'}"]
    run_tool([maven, "--batch-mode", "--quiet", "--file", sources / "pom.xml", *copy], built)
    files = sorted(sources.glob("*.java"))
    run_tool([javac, "-Xlint:all", "-Werror", "-cp", f"{built}/lib/*", "-d", built, *files], built)


def _build_rust(sources: Path, built: Path) -> None:
    cargo = find_tool("cargo", "rustup (rustup.rs)")
    # All versions share one target directory, because most of their dependencies are the same.
    target = BUILD_CACHE / "rust"
    run_tool([cargo, "build", "--quiet", "--release", "--locked"], sources, {"CARGO_TARGET_DIR": str(target)})
    shutil.copy(target / "release/client", built)


def _build_nothing(_sources: Path, _built: Path) -> None:
    """Debian packages contain the drivers, and the sources run in place."""


PYTHON = ClientBuild("python", ("requirements.lock",), _build_python)
GO = ClientBuild("go", ("go.mod", "go.sum", "*.go"), _build_go)
_NODE = ClientBuild("node", ("package.json", "package-lock.json", "*.mjs"), _build_node)
JAVA = ClientBuild("java", ("pom.xml", "*.java"), _build_java)
_RUST = ClientBuild("rust", ("Cargo.toml", "Cargo.lock", "src/*.rs"), _build_rust)
_PHP = ClientBuild("php", (), _build_nothing)
_PERL = ClientBuild("perl", (), _build_nothing)
_RUBY = ClientBuild("ruby", (), _build_nothing)


_PREPARED_STEPS = "query_prepared rows_prepared blob_prepared"
_LARGE_LIMITS = (1_000_000, 1_000_000)
_REDUCED_LIMITS = (50_000, 50_000, 17 << 20)
_SMALL_LIMITS = (10_000, 1_000, 1 << 20)
"""Limits on rows, on rows of prepared statements, and on bytes of a value.

Large limits are for compiled clients, reduced limits for slow languages. A client has small limits if another
client with the same library or language has larger limits.
"""


def _python_client(name: str, driver: str, unsupported: str, *limits: int) -> MatrixClient:
    def command(built: Path) -> list[str]:
        return [str(built / "venv/bin/python"), "-m", "tests.support.clients.python", driver]

    return MatrixClient(name, PYTHON, command, frozenset(unsupported.split()), *limits)


def _compiled_client(name: str, client_build: ClientBuild, unsupported: str) -> MatrixClient:
    return MatrixClient(
        name,
        client_build,
        lambda built: [str(built / "client")],
        frozenset(unsupported.split()),
        *_LARGE_LIMITS,
    )


def _interpreted_client(
    name: str,
    client_build: ClientBuild,
    source: str,
    driver: str,
    unsupported: str,
    limits: tuple[int, int, int],
) -> MatrixClient:
    program, packages, *options = _INTERPRETERS[client_build.name]

    def command(_: Path) -> list[str]:
        return [
            find_tool(program, f"apt-get install {packages}"),
            *options,
            str(client_build.sources / source),
            driver,
        ]

    return MatrixClient(name, client_build, command, frozenset(unsupported.split()), *limits)


_INTERPRETERS = {
    "php": ("php", "php-cli php-mysql", "-d", "mysqli.allow_local_infile=1"),
    "perl": ("perl", "libdbd-mysql-perl libdbd-mariadb-perl"),
    "ruby": ("ruby", "ruby-mysql2"),
}
"""The interpreter of each build (by its name), the Debian packages, and the interpreter's options."""


def _node_command(driver: str) -> Callable[[Path], list[str]]:
    return lambda built: [find_tool("node", "apt-get install nodejs"), str(built / "client.mjs"), driver]


def _java_command(driver: str) -> Callable[[Path], list[str]]:
    def command(built: Path) -> list[str]:
        java = find_tool("java", "apt-get install default-jre-headless")
        return [java, "-XX:+UseSerialGC", "-Xmx1g", "-cp", f"{built}:{built}/lib/*", "Client", driver]

    return command


CLIENTS = (
    _python_client("PyMySQL", "pymysql", f"{_PREPARED_STEPS} batch cursor change_user reset"),
    _python_client("asyncmy", "asyncmy", "cursor load_data change_user reset"),
    _python_client("connector-python (C)", "connector-c", "batch cursor", 200_000, 20_000),
    _python_client("connector-python (pure)", "connector-pure", "batch", 20_000, 10_000, 17 << 20),
    _python_client("mysqlclient", "mysqlclient", f"{_PREPARED_STEPS} batch cursor reset"),
    _compiled_client("go-sql-driver", GO, "batch cursor change_user reset"),
    MatrixClient("mysql2", _NODE, _node_command("mysql2"), frozenset({"batch", "cursor"})),
    MatrixClient(
        "mariadb (Node)",
        _NODE,
        _node_command("mariadb"),
        frozenset({"cursor", "change_user"}),
        *_SMALL_LIMITS,
    ),
    MatrixClient("Connector/J", JAVA, _java_command("mysql")),
    MatrixClient(
        "MariaDB Connector/J",
        JAVA,
        _java_command("mariadb"),
        frozenset({"cursor", "change_user", "reset"}),
        *_SMALL_LIMITS,
    ),
    _compiled_client("sqlx", _RUST, "batch cursor load_data change_user reset"),
    _interpreted_client("mysqli", _PHP, "client.php", "mysqli", "batch reset", _REDUCED_LIMITS),
    _interpreted_client(
        "PDO", _PHP, "client.php", "pdo", "ping batch cursor change_user reset", _SMALL_LIMITS
    ),
    _interpreted_client(
        "DBD::mysql", _PERL, "client.pl", "mysql", "batch cursor change_user reset", _SMALL_LIMITS
    ),
    _interpreted_client(
        "DBD::MariaDB", _PERL, "client.pl", "MariaDB", "batch cursor change_user reset", _SMALL_LIMITS
    ),
    _interpreted_client(
        "mysql2 (Ruby)", _RUBY, "client.rb", "mysql2", "batch cursor change_user reset", _SMALL_LIMITS
    ),
)
"""All clients, in the order in which they run and are reported."""

ALWAYS_COMPRESSING = ("mysqli", "PDO")
"""Clients that compress whenever they are configured to, even if the server does not offer compression."""

NEGOTIATED_COMPRESSING = ("DBD::mysql", "DBD::MariaDB", "mysql2", "mariadb (Node)", "MariaDB Connector/J")
"""Clients that compress if they are configured to and the server offers compression."""


def main() -> None:
    """Install all clients that have a build. Print an error for each build that fails."""
    for client_build in (_RUST, PYTHON, GO, JAVA, _NODE):
        try:
            client_build.install()
        except (BuildFailed, ProgramMissing) as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
