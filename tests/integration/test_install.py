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


def install(kind: str, programs: Path) -> subprocess.CompletedProcess[str]:
    root = os.getuid() == 0
    return subprocess.run(
        # By its text: the checkout may be where nobody else can look.
        ["/bin/sh", "-s", kind],
        input=SCRIPT.read_text(),
        env={"PATH": str(programs)},
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
    assert "python|run|test|bench" in run.stderr
    assert run.returncode == 2
