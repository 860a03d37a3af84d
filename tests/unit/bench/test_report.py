import json
from pathlib import Path

import pytest

from bench.control_plane.xds_tap import GrpcMessageReader
from bench.machine import Machine, MachineCondition
from bench.reporting.report import (
    BenchmarkFigure,
    Report,
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


def report(*figures: BenchmarkFigure, condition: MachineCondition = QUIET) -> Report:
    return Report("a-suite", MACHINE, (ReportSection("a-bench", "How it was done.", condition, figures),))


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
    document = report_as_json(report(figure))
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
    document = report_as_json(
        report(BenchmarkFigure("slow", 1.23456, "s", 1.0), BenchmarkFigure("fast", 0.5, "s", 1.0))
    )
    assert document["targets_missed"] == ["a-bench: slow is 1.23 s, the target is at most 1.00 s"]
    assert [figure["verdict"] for figure in document["benchmarks"][0]["figures"]] == ["missed", "met"]
    assert document["benchmarks"][0]["figures"][0]["value"] == 1.23456
    assert document["machine"]["cpu"] == "a CPU"


def test_page_is_rendered_from_the_json() -> None:
    slow = BenchmarkFigure("slow", 1234.5, "ms", 1000.0, Spread.of([900.0, 1234.5]), note="it was late")
    page = report_as_markdown(report_as_json(report(slow)))
    assert "| slow | 1,234 ms | <= 1,000 ms | missed | 900 to 1,234 ms in 2 samples |" in page
    assert "* slow: it was late" in page
    assert "Machine: a CPU, 2 cores" in page
    assert "* a-bench: slow is 1,234 ms" in page


def test_busy_machine_gets_a_warning() -> None:
    busy = MachineCondition("2026-01-01 00:00:00Z", 4.0, 0.6)
    figure = BenchmarkFigure("x", 1.0, "s")
    assert "others had a share" in report_as_markdown(report_as_json(report(figure, condition=busy)))
    assert "others had a share" not in report_as_markdown(report_as_json(report(figure)))


def test_writes_and_prints_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = report_as_json(report(BenchmarkFigure("slow", 2.0, "s", 1.0)))
    data, page = write_report(document, tmp_path / "new")
    assert json.loads(data.read_text()) == document
    assert page.read_text() == report_as_markdown(document)
    print_report(document)
    assert "MISSED a-bench: slow is 2.00 s" in capsys.readouterr().out


def frame(payload: bytes, *, kind: int = 0, flags: int = 0, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_tap_finds_messages_in_any_fragmentation(step: int) -> None:
    first, second, third = message(b"first" * 9), message(b"second"), message(b"other")
    wire = (
        b"P" * 24
        + frame(b"settings", kind=4, stream=0)
        + frame(first[:3])
        + frame(third, stream=3)
        + frame(first[3:] + second[:8])
        + frame(b"\x02" + second[8:] + b"..", flags=0x8)
    )
    messages = GrpcMessageReader(skip=24)
    received = [
        payload for at in range(0, len(wire), step) for payload in messages.feed(wire[at : at + step])
    ]
    assert received == [b"other", b"first" * 9, b"second"]
