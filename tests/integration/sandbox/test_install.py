"""`sandbox/install.sh`, run by a user who is not root, installs nothing and reports missing packages."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "sandbox" / "install.sh"
NOBODY = 65534
PROGRAMS = ("python3", "mariadbd", "mariadb", "openssl")  # `install.sh run` needs these and etcd.
# `install.sh test` also needs these programs, and FOR_CLIENTS.
FOR_TESTS = (
    *("sysbench", "haproxy", "perf"),  # `install.sh bench` needs these, too.
    *("dockerd", "docker-compose", "debootstrap", "iptables", "ip", "etcdctl", "prometheus", "chromium"),
    *("keepalived", "curl"),
)
# The programs that the tests with client libraries need, and the Debian packages of each program.
FOR_CLIENTS = {
    "mariadb_config": "libmariadb-dev",
    "gcc": "gcc libc6-dev",
    "pkg-config": "pkg-config",
    "mvn": "maven",
    "javac": "default-jdk-headless",
    "node": "nodejs",
    "npm": "npm",
    "php": "php-cli php-mysql",
    "perl": "libdbd-mysql-perl libdbd-mariadb-perl",
    "ruby": "ruby ruby-mysql2",
}
NO_GO = (
    "The tests with go-sql-driver need Go 1.24 or newer, but found {}; they are skipped until it is"
    " installed (see go.dev/doc/install)\n"
)


@pytest.fixture
def programs() -> Iterator[Path]:
    """Yield a directory for PATH that all users can read, with programs that do nothing."""
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        directory.chmod(0o755)
        (directory / "id").symlink_to("/usr/bin/id")
        for name in PROGRAMS:
            (directory / name).symlink_to("/bin/true")
        yield directory


def install(kind: str, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = os.getuid() == 0
    return subprocess.run(
        # The script comes from stdin, because NOBODY may be unable to read the checkout.
        ["/bin/sh", "-s", kind],
        input=SCRIPT.read_text(),
        env={"PATH": str(programs), **environment},
        cwd="/",
        user=NOBODY if root else None,
        group=NOBODY if root else None,
        extra_groups=[] if root else None,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_names_missing_packages_to_user_without_root(programs: Path) -> None:
    run = install("run", programs)
    assert run.stderr == (
        "Some Debian packages are missing and only root can install them; install them with:"
        " apt-get install --no-install-recommends etcd-server\n"
    )
    assert (run.stdout, run.returncode) == ("", 1)


def test_prints_nothing_if_nothing_is_missing(programs: Path) -> None:
    (programs / "etcd").symlink_to("/bin/true")
    run = install("run", programs)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)


def test_rejects_unknown_kind(programs: Path) -> None:
    run = install("everything", programs)
    assert "python|rust|run|test|dist|tidb|bench" in run.stderr
    assert run.returncode == 2


@pytest.fixture
def for_tests(programs: Path) -> Path:
    """Return the directory `programs`, with all programs that `install.sh test` needs."""
    for name in ("etcd", *FOR_TESTS, *FOR_CLIENTS):
        (programs / name).symlink_to("/bin/true")
    for name in ("sort", "head", "tail", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    write_printing_program(programs / "go", "go version go1.24.0 linux/amd64")
    return programs


def write_printing_program(program: Path, text: str) -> None:
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)


def test_names_missing_packages_of_clients(for_tests: Path) -> None:
    assert install("test", for_tests).stderr == ""
    for name in FOR_CLIENTS:
        (for_tests / name).unlink()
    run = install("test", for_tests)
    packages = " ".join(FOR_CLIENTS.values())
    assert run.stderr.endswith(f" apt-get install --no-install-recommends {packages}\n")
    assert run.returncode == 1


@pytest.mark.parametrize(
    ("prefix", "header", "package"),
    [("/usr", False, " python3.11-dev"), ("/usr", True, ""), ("/opt/python", False, "")],
)
def test_requires_headers_only_for_python_of_debian(
    prefix: str, header: bool, package: str, for_tests: Path
) -> None:
    python = for_tests / "python3"
    python.unlink()
    (for_tests / "Python.h").touch()
    include_directory = for_tests if header else for_tests / "absent"
    setup_code = (
        f"import sys, sysconfig; sys.base_prefix = {prefix!r}; sys.version_info = (3, 11);"
        f" sysconfig.get_path = lambda name: {str(include_directory)!r}; exec(sys.argv[1])"
    )
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *ensurepip*) exit ;; esac\nexec /usr/bin/python3 -c "{setup_code}" "$2"\n'
    )
    python.chmod(0o755)
    run = install("test", for_tests)
    assert (run.returncode, run.stderr.rpartition("recommends")[2].rstrip("\n")) == (
        int(bool(package)),
        package,
    )


@pytest.mark.parametrize(
    ("version", "reported_version"),
    [(None, "none"), ("go1.19.8", "go1.19.8"), ("go1.21.0", ""), ("go1.30.1", "")],
)
def test_missing_go_is_reported_but_not_required(
    version: str | None, reported_version: str, for_tests: Path
) -> None:
    (for_tests / "go").unlink()
    if version is not None:
        write_printing_program(for_tests / "go", f"go version {version} linux/amd64")
    run = install("test", for_tests)
    assert (run.stderr, run.returncode) == (NO_GO.format(reported_version) if reported_version else "", 0)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "found none;"),
        ("1.84.1", "found 1.84.1;"),
        ("1.85.0", ""),
        ("1.100.0", ""),
    ],
)
def test_requires_recent_rust_toolchain(version: str | None, message: str, programs: Path) -> None:
    for name in ("sort", "head", "tail", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    for name in ("cargo", "cc"):
        (programs / name).symlink_to("/bin/true")
    if version is not None:
        write_printing_program(programs / "rustc", f"rustc {version} (0123456789 2025-01-01)")
    run = install("rust", programs, RUST="1.85")
    assert run.returncode == (1 if message else 0)
    if message:
        assert run.stderr.startswith("make needs Rust 1.85 or newer to build the module for Envoy, but ")
        assert message in run.stderr
    else:
        assert run.stderr == ""


def test_names_missing_compiler_of_module(programs: Path) -> None:
    for name in ("sort", "head", "tail", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "cargo").symlink_to("/bin/true")
    write_printing_program(programs / "rustc", "rustc 1.95.0")
    run = install("rust", programs, RUST="1.85")
    assert run.stderr.endswith(" apt-get install --no-install-recommends gcc libc6-dev\n")
    assert run.returncode == 1
