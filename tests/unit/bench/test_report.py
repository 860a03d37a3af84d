import json
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Machine, MachineCondition
from bench.reporting.report import (
    BenchmarkFigure,
    Findings,
    ReportSection,
    Spread,
    latency_figures,
    print_report,
    report_as_json,
    report_as_markdown,
    write_report,
)

MACHINE = Machine("a CPU", 2, 1024, "Linux 6.1", "3.11.7", "1.40.0", "3.4.23")
QUIET = MachineCondition("2026-01-01 00:00:00Z", 0.5, 0.02)


def report(*figures: BenchmarkFigure, condition: MachineCondition = QUIET) -> dict[str, Any]:
    section = ReportSection("a-bench", "How it was done.", condition, Findings(figures))
    return report_as_json("a-suite", MACHINE, [section])


@pytest.mark.parametrize(
    ("value", "target", "verdict"), [(50.0, 50.0, "met"), (50.01, 50.0, "missed"), (7.0, None, "")]
)
def test_target_is_an_upper_limit(value: float, target: float | None, verdict: str) -> None:
    assert BenchmarkFigure("x", value, "ms", target).verdict == verdict


@pytest.mark.parametrize(("count", "p99"), [(1, 1), (50, 50), (100, 99), (101, 100), (200, 198)])
def test_p99_is_not_exceeded_by_99_percent_of_samples(count: int, p99: int) -> None:
    spread = Spread.of([float(value) for value in range(count, 0, -1)])
    assert (spread.count, spread.low, spread.p99, spread.high) == (count, 1.0, p99, count)


def test_tolerance_is_shown_with_the_target() -> None:
    figure = BenchmarkFigure("x", 3.25, "%", 3.0, tolerance=0.5)
    document = report(figure)
    assert document["benchmarks"][0]["figures"][0]["verdict"] == "undecided"
    assert document["targets_missed"] == []
    assert "| x | 3.25 % | <= 3.00 % (± 0.500 %) | undecided |" in report_as_markdown(document)


def test_latency_figures_are_median_and_p99() -> None:
    median, tail = latency_figures("x", [1.0] * 97 + [200.0] * 3, limits=(15.0, 100.0))
    assert (median.value, median.verdict) == (1.0, "met")
    assert (tail.value, tail.verdict) == (200.0, "missed")


def test_latency_figures_may_include_the_maximum() -> None:
    figures = latency_figures("x", [1.0] * 999 + [200.0], limits=(15.0, 100.0, 150.0), note="one of many")
    assert [figure.name for figure in figures] == ["x, median", "x, 99th percentile", "x, maximum"]
    assert [figure.verdict for figure in figures] == ["met", "met", "missed"]
    assert [figure.note for figure in figures] == ["", "", "one of many"]


def test_json_lists_missed_targets_unrounded() -> None:
    document = report(BenchmarkFigure("slow", 1.23456, "s", 1.0), BenchmarkFigure("fast", 0.5, "s", 1.0))
    assert document["targets_missed"] == ["a-bench: slow is 1.23 s, the target is at most 1.00 s"]
    assert [figure["verdict"] for figure in document["benchmarks"][0]["figures"]] == ["missed", "met"]
    assert document["benchmarks"][0]["figures"][0]["value"] == 1.23456
    assert document["machine"]["cpu"] == "a CPU"


def test_page_is_rendered_from_the_json() -> None:
    slow = BenchmarkFigure("slow", 1234.5, "ms", 1000.0, Spread.of([900.0, 1234.5]), note="it was late")
    page = report_as_markdown(report(slow))
    assert "| slow | 1,234 ms | <= 1,000 ms | missed | 900 to 1,234 ms in 2 samples |" in page
    assert "* slow: it was late" in page
    assert "Machine: a CPU, 2 cores" in page
    assert "* a-bench: slow is 1,234 ms" in page


def test_busy_machine_gets_a_warning() -> None:
    busy = MachineCondition("2026-01-01 00:00:00Z", 4.0, 0.6)
    figure = BenchmarkFigure("x", 1.0, "s")
    assert "other programs affected" in report_as_markdown(report(figure, condition=busy))
    assert "other programs affected" not in report_as_markdown(report(figure))


def test_writes_and_prints_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = report(BenchmarkFigure("slow", 2.0, "s", 1.0))
    data, page = write_report(document, tmp_path / "new")
    assert json.loads(data.read_text()) == document
    assert page.read_text() == report_as_markdown(document)
    print_report(document)
    assert "MISSED a-bench: slow is 2.00 s" in capsys.readouterr().out
