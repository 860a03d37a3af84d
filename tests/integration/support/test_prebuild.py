"""What makes things beside the tests: how it tells that they are there, fails, gives way and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sandbox.child_process import ProcessFailed
from tests.support.prebuild import IDLE_NICENESS, Prebuild

ROOT = Path(__file__).parents[3]
AUTOGROUP = Path("/proc/self/autogroup")

Script = Callable[[str], Prebuild]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Starts a maker of these lines."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(lines: str) -> Prebuild:
        (tmp_path / "maker.py").write_text(lines)
        return Prebuild("maker", tmp_path)

    return start


def test_it_is_made_when_the_maker_says_so_and_stays_until_it_is_ended(script: Script) -> None:
    maker = script("import sys\nprint('/there', flush=True)\nsys.stdin.read()\nsys.exit(3)")
    assert maker.wait_ready() == maker.wait_ready() == "/there"
    assert maker.stop() == maker.stop() == 3


def test_a_maker_that_fails_tells_why_to_each_that_waits(script: Script) -> None:
    maker = script("import sys\nsys.exit('no network')")
    for _ in range(2):
        with pytest.raises(ProcessFailed, match=r"^maker ended with exit code 1; .*\nno network"):
            maker.wait_ready()
    assert maker.stop() == 1


def test_its_children_end_with_it(script: Script) -> None:
    maker = script(
        "import subprocess\nfrom tests.support.prebuild import end_with_input\nend_with_input()\n"
        "child = subprocess.Popen(['sleep', 'infinity'])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    child = psutil.Process(int(maker.wait_ready()))
    assert maker.stop() == -9
    child.wait(10)


def test_it_runs_only_when_nobody_else_wants_to() -> None:
    look = (
        "import os\nfrom tests.support.prebuild import give_way\ngive_way()\nprint(os.sched_getscheduler(0))"
    )
    look += f"\nprint(open('{AUTOGROUP}').read())" if AUTOGROUP.exists() else ""
    told = subprocess.run(
        [sys.executable, "-c", look],
        cwd=ROOT,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    policy, *group = told.stdout.split("\n", 1)
    assert int(policy) == os.SCHED_IDLE
    assert not AUTOGROUP.exists() or group[0].strip().endswith(f"nice {IDLE_NICENESS}")
