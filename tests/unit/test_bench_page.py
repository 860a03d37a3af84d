"""How the side-by-side benchmark is told: on its page, in README.md, and what counts as a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import charts, readme_table, side_by_side_page
from bench.differences import chance, in_words, one_of_each_workload, peer_named
from bench.readme_table import BEGIN, END
from bench.side_by_side_page import as_markdown
from bench.targets import Target
from tests.bench_documents import PEERS, made_up, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"


def test_a_difference_within_that_of_equal_things_is_none() -> None:
    made = table()
    assert chance(made, "cpu_us") == pytest.approx(0.05)
    assert in_words(made, peer_named(made, "Tidevoy"), "cpu_us") == "none (0.97)"
    assert in_words(made, peer_named(made, "Envoy"), "cpu_us") == "1.30"
    assert in_words(made, peer_named(made, "direct"), "cpu_us") == "-"
    assert in_words(made, peer_named(made, "nobody"), "cpu_us") == "-"


def test_without_an_a_a_pair_nothing_is_a_difference() -> None:
    made = table()
    made["peers"] = [peer for peer in made["peers"] if peer["name"] != "HAProxy again"]
    assert in_words(made, peer_named(made, "Envoy"), "cpu_us") == "none (1.30)"
    assert "| A/A spread | unknown |" in as_markdown(made_up(made))


def test_the_page_has_the_figures_of_every_peer() -> None:
    page = as_markdown(made_up(table(threads=16)))
    assert "Machine: a CPU, 2 cores, 1024 MiB of memory, Linux 6.1." in page
    assert "## point select, text; 16 clients, 1 worker" in page
    assert "How it was done. 3 rounds, with runs of 6 s." in page
    assert "Measured 2026-01-01 00:00:00Z" in page
    assert "| peer | QPS | p95 ms | CPU µs | MiB |" in page
    assert "| direct MariaDB 10.1.2 | 9,000 | 1.00 | - | - |" in page
    cells = "6,500 (6,400 to 6,650) | 2.60 (2.56 to 2.66) | 65.0 (64.0 to 66.5) | 26.0 (25.6 to 26.6)"
    assert f"| Envoy 1.40.0 | {cells} |" in page


def test_the_page_has_ratios_beside_what_chance_does() -> None:
    rows = [line.split(" | ") for line in as_markdown(made_up(table())).splitlines() if " | " in line]
    ratios = {row[0].removeprefix("| "): row[3] for row in rows[rows.index(_head(rows)) :]}
    assert ratios["HAProxy again"] == "1.00 (0.95 to 1.04)"
    assert ratios["Envoy"] == "1.30 (1.28 to 1.33)"
    assert ratios["Tidevoy"] == "none (0.97; 0.96 to 1.01)"
    assert ratios["direct"] == "-"
    assert ratios["A/A spread"] == "± 0.05"


def _head(rows: list[list[str]]) -> list[str]:
    return next(row for row in rows if row[0] == "| ratio to HAProxy")


def test_what_was_missed_comes_first() -> None:
    targets = (
        Target("Tidevoy", "cpu_us", 1.0),
        Target("Envoy", "p95_ms", 1.29),
        Target("Envoy", "cpu_us", 1.0),
    )
    page = as_markdown(made_up(table(targets=targets)))
    listed = page[page.index("## Targets") : page.index("## Charts")].splitlines()
    assert [line.split(": ")[1] for line in listed if line.startswith("*")] == ["missed", "undecided", "met"]
    assert "None was set." in as_markdown(made_up(table()))


def test_a_workload_stands_in_the_readme_once() -> None:
    tables = [table(threads=4), table(threads=64), table(threads=99, workers=2), table("update index")]
    assert one_of_each_workload(tables) == [tables[1], tables[3]]
    shown = readme_table.text(made_up(*tables))
    assert (
        "| workload | clients | HAProxy, µs | Envoy | Tidevoy | p95, Tidevoy | queries/s, Tidevoy |" in shown
    )
    assert "| point select, text | 64 | 50.0 | 1.30 | none (0.97) | none (0.97) | none (0.97) |" in shown
    assert len([line for line in shown.splitlines() if line.startswith("|")]) == 4


def test_the_table_replaces_the_one_before() -> None:
    readme = f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    first = readme_table.filled(readme, made_up(table()))
    assert first.startswith(f"# Before\n\n{BEGIN}\n\n## ")
    assert first.endswith(f"|\n\n{END}\n\nafter\n")
    assert "old" not in first
    assert readme_table.filled(first, made_up(table())) == first
    assert readme_table.filled(first, None) == f"# Before\n\n{BEGIN}\n{END}\n\nafter\n"


def test_a_readme_without_a_place_is_told() -> None:
    with pytest.raises(ValueError, match="has no place"):
        readme_table.filled(f"{END} {BEGIN}", None)


def test_page_and_charts_are_kept_beside_the_document(tmp_path: Path) -> None:
    gone = tmp_path / "side-by-side-gone.svg"
    gone.write_text("a chart of an earlier document")
    document = made_up(table())
    written = side_by_side_page.keep(document, tmp_path)
    assert sorted(written) == sorted(tmp_path.iterdir())
    page = tmp_path / "side-by-side.md"
    assert page.read_text() == as_markdown(document)
    for name in PEERS:
        assert name in page.read_text()
    for chart in written:
        assert chart == page or f"]({chart.name})" in page.read_text()


def test_what_is_kept_here_is_what_the_kept_document_gives() -> None:
    """Else: python -m bench.side_by_side_page."""
    document = side_by_side_page.kept(RESULTS)
    readme = (ROOT / "README.md").read_text()
    assert readme == readme_table.filled(readme, document)
    drawn = {chart.file: chart.svg for chart in charts.draw(document)} if document else {}
    assert {path.name: path.read_text() for path in RESULTS.glob("side-by-side-*.svg")} == drawn
    page = RESULTS / "side-by-side.md"
    assert (page.read_text() if page.exists() else None) == (as_markdown(document) if document else None)
