"""deploy/sysbench/compare.sh runs sysbench in alternation and prints medians and ratios."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "deploy/sysbench/compare.sh"
# The end of a run's output, as sysbench 1.0.20 prints it.
_OUTPUT = """\
SQL statistics:
    queries performed:
        read:                            $queries
        total:                           $queries
    transactions:                        $queries  ($queries.25 per sec.)
    queries:                             $queries  ($queries.25 per sec.)
    ignored errors:                      3      (1.50 per sec.)
    reconnects:                          0      (0.00 per sec.)

General statistics:
    total time:                          1.0007s
    total number of events:              $queries

Latency (ms):
         min:                                    0.03
         avg:                                    0.25
         max:                                   11.89
         95th percentile:                        $((queries / 100)).50
         sum:                                  1000.00
"""
# Prints the next line of the file `rates` as the queries of the run. `fail` makes it fail.
_SYSBENCH = f"""#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >> calls
queries=$(head -n 1 rates)
sed -i 1d rates
[ "$queries" != fail ] || {{ echo 'FATAL: no server'; exit 1; }}
cat <<END
{_OUTPUT}END
"""


def compare(
    directory: Path, rates: list[str], *arguments: str, rounds: int = 1
) -> tuple[int, str, list[str]]:
    """Run the script with a fake sysbench; return exit code, output and the arguments of each run."""
    program = directory / "sysbench"
    program.write_text(_SYSBENCH)
    program.chmod(0o755)
    (directory / "rates").write_text("".join(f"{rate}\n" for rate in rates))
    environment = os.environ | {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "ROUNDS": str(rounds),
        "RUN_SECONDS": "7",
        "LC_ALL": "C",
    }
    result = subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    calls = directory / "calls"
    called = calls.read_text().splitlines() if calls.exists() else []
    return result.returncode, result.stdout + result.stderr, called


def test_runs_alternate_and_get_all_arguments(tmp_path: Path) -> None:
    rates = ["100"] * 10
    code, output, calls = compare(tmp_path, rates, "a=h1,h2:4000", "b=h3:6000", "--x=1", "oltp", rounds=2)
    assert code == 0, output
    ports = [re.search(r"--mysql-port=(\d+)", call) for call in calls]
    a, b = "4000", "6000"
    assert [port and port[1] for port in ports] == [a, b, a, b, b, a, a, b, b, a]
    assert calls[0] == "--x=1 oltp --mysql-host=h1,h2 --mysql-port=4000 --time=7 --percentile=95 run"


def test_prints_medians_and_ratios_without_warm_up(tmp_path: Path) -> None:
    warm_up = ["900", "900"]
    rates = [*warm_up, *("100", "200", "400", "200"), *("300", "150", "300", "300")]
    code, output, _ = compare(tmp_path, rates, "a=h:1", "b=h:2", "oltp", rounds=2)
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["round", "target", "queries/s", "mean_ms", "p95_ms", "errors", "cores"]
    assert lines[1][:3] == ["warm-up", "a", "900"]
    assert lines[3][:6] == ["1", "a", "100", "10.000", "1.50", "3"]
    # a: 100, 200, 300, 300; b: 200, 400, 150, 300; the rounds: 600 / 300 and 450 / 600.
    assert ["queries/s", "250.000", "250.000", "1.375", "0.750", "2.000"] in lines
    assert ["mean_ms", "4.167", "4.167", "1.000", "0.500", "1.500"] in lines
    assert ["p95_ms", "3.000", "3.000", "1.232", "0.714", "1.750"] in lines


def test_failing_run_ends_with_its_output(tmp_path: Path) -> None:
    code, output, calls = compare(tmp_path, ["100", "fail"], "a=h:1", "b=h:2", "oltp")
    assert code == 1
    assert len(calls) == 2
    assert "FATAL: no server" in output
    assert "sysbench has failed at b (h:2)" in output


def test_wrong_usage_runs_nothing(tmp_path: Path) -> None:
    for arguments in ([], ["a=h:1", "b=h:2"], ["a=h:1", "b=h", "oltp"], ["a=h:1", "a=h:2", "oltp"]):
        code, output, calls = compare(tmp_path, [], *arguments)
        assert (code, calls) == (2, [])
        assert output.startswith("usage: ")
