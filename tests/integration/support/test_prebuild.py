"""Prebuilds in the background: how they report readiness, fail, yield CPU time and stop."""

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
    """Starts a prebuild with these lines."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(lines: str) -> Prebuild:
        (tmp_path / "prebuild_script.py").write_text(lines)
        return Prebuild("prebuild_script", tmp_path)

    return start


def test_prebuild_is_ready_when_it_says_so_and_runs_until_stopped(script: Script) -> None:
    prebuild = script("import sys\nprint('/there', flush=True)\nsys.stdin.read()\nsys.exit(3)")
    assert prebuild.wait_ready() == prebuild.wait_ready() == "/there"
    assert prebuild.stop() == prebuild.stop() == 3


def test_failed_prebuild_reports_reason_to_all_waiters(script: Script) -> None:
    prebuild = script("import sys\nsys.exit('no network')")
    for _ in range(2):
        with pytest.raises(ProcessFailed, match=r"^prebuild_script ended with exit code 1; .*\nno network"):
            prebuild.wait_ready()
    assert prebuild.stop() == 1


def test_children_exit_with_prebuild(script: Script) -> None:
    prebuild = script(
        "import subprocess\nfrom tests.support.prebuild import exit_when_stdin_closes\n"
        "exit_when_stdin_closes()\n"
        "child = subprocess.Popen(['sleep', 'infinity'])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    child = psutil.Process(int(prebuild.wait_ready()))
    assert prebuild.stop() == -9
    child.wait(10)


def test_prebuild_runs_only_on_idle_cpu_time() -> None:
    code = (
        "import os\nfrom tests.support.prebuild import lower_own_priority\nlower_own_priority()\n"
        "print(os.sched_getscheduler(0))"
    )
    code += f"\nprint(open('{AUTOGROUP}').read())" if AUTOGROUP.exists() else ""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    policy, *group = result.stdout.split("\n", 1)
    assert int(policy) == os.SCHED_IDLE
    assert not AUTOGROUP.exists() or group[0].strip().endswith(f"nice {IDLE_NICENESS}")
