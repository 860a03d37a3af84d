"""`sandbox/install.sh` as somebody who is not root: it installs nothing, and says what root should."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "sandbox" / "install.sh"
NOBODY = 65534
PROGRAMS = ("python3", "mariadbd", "mariadb")  # all that `run` needs but etcd


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
    assert "python|rust|run|test|bench" in run.stderr
    assert run.returncode == 2


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
        (programs / "rustc").write_text(f"#!/bin/sh\necho 'rustc {version} (0123456789 2025-01-01)'\n")
        (programs / "rustc").chmod(0o755)
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
    (programs / "rustc").write_text("#!/bin/sh\necho 'rustc 1.95.0'\n")
    (programs / "rustc").chmod(0o755)
    run = install("rust", programs, RUST="1.85")
    assert run.stderr.endswith(" apt-get install --no-install-recommends gcc libc6-dev\n")
    assert run.returncode == 1
