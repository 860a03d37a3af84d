"""`sandbox/install.sh` as somebody who is not root: it installs nothing, and says what root should."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "sandbox" / "install.sh"
NOBODY = 65534
PROGRAMS = ("python3", "mariadbd", "mariadb", "openssl")  # all that `run` needs but etcd
# What `test` needs beside that: programs, and those for clients with their packages.
FOR_TESTS = (
    *("sysbench", "haproxy", "perf"),  # these for `bench` too
    *("dockerd", "docker-compose", "debootstrap", "iptables", "ip", "etcdctl", "prometheus", "chromium"),
)
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
    "The tests with go-sql-driver need Go 1.24 or newer, and there is {}; they are skipped until it is"
    " installed (go.dev/doc/install says how)\n"
)


@pytest.fixture
def programs() -> Iterator[Path]:
    """A directory for PATH, which anybody may read, with programs that do nothing."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o755)
        (directory / "id").symlink_to("/usr/bin/id")
        for name in PROGRAMS:
            (directory / name).symlink_to("/bin/true")
        yield directory


def install(kind: str, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = os.getuid() == 0
    return subprocess.run(
        # By its text: the checkout may be where nobody else can look.
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


def test_what_is_missing_is_named_to_a_user_who_cannot_install(programs: Path) -> None:
    run = install("run", programs)
    assert run.stderr == (
        "Some Debian packages are missing and only root can install them; install them with:"
        " apt-get install --no-install-recommends etcd-server\n"
    )
    assert (run.stdout, run.returncode) == ("", 1)


def test_with_everything_there_it_says_nothing(programs: Path) -> None:
    (programs / "etcd").symlink_to("/bin/true")
    run = install("run", programs)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)


def test_a_kind_that_it_does_not_know_is_told(programs: Path) -> None:
    run = install("everything", programs)
    assert "python|rust|run|test|tidb|bench" in run.stderr
    assert run.returncode == 2


@pytest.fixture
def for_tests(programs: Path) -> Path:
    """With all that `test` needs."""
    for name in ("etcd", *FOR_TESTS, *FOR_CLIENTS):
        (programs / name).symlink_to("/bin/true")
    for name in ("sort", "head", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    says(programs / "go", "go version go1.24.0 linux/amd64")
    return programs


def says(program: Path, text: str) -> None:
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)


def test_what_tests_compile_and_run_clients_with_is_named(for_tests: Path) -> None:
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
def test_headers_are_wanted_for_debians_own_python_only(
    prefix: str, header: bool, package: str, for_tests: Path
) -> None:
    python = for_tests / "python3"
    python.unlink()
    (for_tests / "Python.h").touch()
    place = for_tests if header else for_tests / "absent"
    pretended = (
        f"import sys, sysconfig; sys.base_prefix = {prefix!r}; sys.version_info = (3, 11);"
        f" sysconfig.get_path = lambda name: {str(place)!r}; exec(sys.argv[1])"
    )
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *ensurepip*) exit ;; esac\nexec /usr/bin/python3 -c "{pretended}" "$2"\n'
    )
    python.chmod(0o755)
    run = install("test", for_tests)
    assert (run.returncode, run.stderr.rpartition("recommends")[2].rstrip("\n")) == (
        int(bool(package)),
        package,
    )


@pytest.mark.parametrize(
    ("version", "found"), [(None, "none"), ("go1.19.8", "go1.19.8"), ("go1.21.0", ""), ("go1.30.1", "")]
)
def test_without_go_the_rest_is_tested(version: str | None, found: str, for_tests: Path) -> None:
    (for_tests / "go").unlink()
    if version is not None:
        says(for_tests / "go", f"go version {version} linux/amd64")
    run = install("test", for_tests)
    assert (run.stderr, run.returncode) == (NO_GO.format(found) if found else "", 0)


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        (None, "finds none;"),
        ("1.84.1", "finds 1.84.1;"),
        ("1.85.0", ""),
        ("1.100.0", ""),
    ],
)
def test_a_rust_toolchain_must_be_there_and_new_enough(
    version: str | None, complaint: str, programs: Path
) -> None:
    for name in ("sort", "head", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    for name in ("cargo", "cc"):
        (programs / name).symlink_to("/bin/true")
    if version is not None:
        says(programs / "rustc", f"rustc {version} (0123456789 2025-01-01)")
    run = install("rust", programs, RUST="1.85")
    assert run.returncode == (1 if complaint else 0)
    if complaint:
        assert run.stderr.startswith("make needs Rust 1.85 or newer to build the module for Envoy, and ")
        assert complaint in run.stderr
    else:
        assert run.stderr == ""


def test_what_compiles_the_module_is_named_too(programs: Path) -> None:
    for name in ("sort", "head", "cut"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "cargo").symlink_to("/bin/true")
    says(programs / "rustc", "rustc 1.95.0")
    run = install("rust", programs, RUST="1.85")
    assert run.stderr.endswith(" apt-get install --no-install-recommends gcc libc6-dev\n")
    assert run.returncode == 1
