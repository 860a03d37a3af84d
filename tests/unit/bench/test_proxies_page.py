"""The page, the chart and the README's table of `tidevoy bench proxies`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.proxies import page
from bench.proxies.comparison import Comparison
from bench.proxies.drains import DrainResult
from bench.proxies.latency_and_memory import QUANTILES, AddedLatency
from bench.proxies.results import Results
from bench.proxies.significance import LatencyDifference, Ratio

STORED_RESULTS = sorted((Path(__file__).parents[3] / "bench/results").glob("proxies-*.json"))
README = Path(__file__).parents[3] / "README.md"
MACHINE = {"cpu": "a CPU", "cores": 2, "memory_mib": 4096, "kernel": "Linux 6.1"}


def comparison(workload: str, contender: str, figure: str = "cpu", value: float = 1.04) -> Comparison:
    ratio = Ratio(value, value - 0.02, value + 0.03)
    return Comparison(workload, figure, contender, "HAProxy", 26.0, 25.0, ratio, 0.01)


def results(backend: str = "mariadb") -> Results:
    return Results(
        backend,
        "MariaDB 10.11.1",
        "2026-01-01 00:00 UTC",
        MACHINE,
        {"HAProxy": "2.6", "Envoy": "1.40.0", "Tidevoy": "0.1.0", "other": ""},
        (
            comparison("1,000 rows, 300/s", "Envoy", value=1.2),
            comparison("1,000 rows, 300/s", "Tidevoy"),
            comparison("1,000 rows, 300/s", "other", value=2.0),
            comparison("TLS to clients", "Tidevoy", value=0.9),
            comparison("point select, 64 clients", "Tidevoy"),
            comparison("point select, 4,000/s", "Tidevoy"),
            comparison("300 new connections/s", "Tidevoy"),
            comparison("1,000 rows, 300/s", "Tidevoy", "p95", value=0.97),
            comparison("TLS to clients", "Tidevoy", "p95"),
            comparison("point select, 64 clients", "Tidevoy", "p95"),
            comparison("point select, 4,000/s", "Tidevoy", "p95"),
            comparison("300 new connections/s", "Tidevoy", "p95"),
        ),
        tuple(
            AddedLatency(clients, "Tidevoy", quantile, 0.25, LatencyDifference(0.1, 0.08, 0.12), 0.05)
            for clients in (1, 9_000)
            for quantile in QUANTILES
        ),
        {"HAProxy": 3.6, "Envoy": 17.5, "Tidevoy": 21.5},
        DrainResult(6, 1_016, 812.0, 31.0, 4.0),
    )


def test_results_survive_a_json_round_trip(tmp_path: Path) -> None:
    data, page_file, chart = page.write_results(results(), tmp_path)
    assert Results.read(data) == results()
    assert results().others_busy == 0.05
    assert page_file.read_text() == page.results_as_markdown(Results.read(data), chart.name)
    short = replace(results(), latencies=(), memory=None, moves=None)
    (tmp_path / "short.json").write_text(short.as_json_text())
    assert Results.read(tmp_path / "short.json") == short
    assert replace(short, comparisons=()).others_busy == 0.0
    assert json.loads(short.as_json_text())["comparisons"][0]["verdict"] == "worse"


def test_page_has_a_table_per_figure() -> None:
    text = page.results_as_markdown(results(), "chart.svg")
    assert "Measured 2026-01-01 00:00 UTC on 2 cores (a CPU), 4 GiB of memory, Linux 6.1." in text
    assert "| workload | HAProxy, µs | Envoy / HAProxy | Tidevoy / HAProxy | other / HAProxy |" in text
    row = "1,000 rows, 300/s | 25.0 | 1.20 (1.18 to 1.23) | 1.04 (1.02 to 1.07) | 2.00 (1.98 to 2.03)"
    assert f"| {row} |" in text
    assert "| TLS to clients | 25.0 |  | 0.90 (0.88 to 0.93) |  |" in text
    assert "## 95th percentile" in text
    assert "### 99.9th percentile" in text
    assert "| 9,000 | 0.250 | 0.10 (0.08 to 0.12) |" in text
    assert "| 3.6 | 17.5 | 21.5 |" in text
    assert "| 812 | 31.0 | 4.00 |" in text
    assert "Mean time of a new connection" not in text


def test_chart_is_deterministic() -> None:
    chart = page.draw_chart(results())
    assert chart == page.draw_chart(results())
    texts = {element.text for element in ElementTree.fromstring(chart).iter() if element.tag.endswith("text")}
    assert {"1,000 rows, 300/s", "Tidevoy", "other"} <= texts


def test_readme_section_has_a_small_table(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# A\n{page.README_BEGIN}\nold\n{page.README_END}\nz\n")
    page.write_results(results(), tmp_path)
    page.write_results(results("tidb"), tmp_path)
    assert page.write_readme(readme, tmp_path)
    assert not page.write_readme(readme, tmp_path)
    text = readme.read_text()
    assert text.startswith("# A\n")
    assert text.endswith("\nz\n")
    assert "old" not in text
    assert "| 1,000 rows, 300/s | 1.04 (1.02 to 1.07) | 0.97 (0.95 to 1.00) |" in text
    assert "[proxies-tidb](bench/results/proxies-tidb.md)" in text


@pytest.mark.parametrize("results_file", STORED_RESULTS, ids=lambda path: path.stem)
def test_stored_pages_match_stored_results(results_file: Path, tmp_path: Path) -> None:
    for written in page.write_results(Results.read(results_file), tmp_path):
        assert written.read_bytes() == (results_file.parent / written.name).read_bytes()


def test_readme_matches_stored_results(tmp_path: Path) -> None:
    assert (README.parent / "bench/results/proxies-mariadb.json").exists()
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    assert not page.write_readme(copy, README.parent / "bench/results")
