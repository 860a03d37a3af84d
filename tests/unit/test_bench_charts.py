"""The charts of the side-by-side benchmark: SVG that says what the document says."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.charts import Chart, draw
from bench.drawing import fitted
from tests.bench_documents import PEERS, made_up, table

SVG = "{http://www.w3.org/2000/svg}"
WORKLOADS = ("point select, text", "result of 10 rows", "result of 10,000 rows", "update index", "read write")


def charts(*workloads: str) -> dict[str, Chart]:
    return {chart.file: chart for chart in draw(made_up(*(table(name) for name in workloads)))}


def texts(chart: Chart) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}text")]


def test_each_group_of_workloads_has_its_charts() -> None:
    assert list(charts(*WORKLOADS)) == [
        "side-by-side-results-qps.svg",
        "side-by-side-results-cpu.svg",
        "side-by-side-results-p95.svg",
        "side-by-side-point-select-cpu.svg",
        "side-by-side-point-select-p95.svg",
        "side-by-side-statements-cpu.svg",
        "side-by-side-statements-p95.svg",
    ]
    assert charts() == {}
    assert "side-by-side-connections-memory.svg" in charts("5,000 idle connections")


def test_every_chart_is_xml_with_the_peers_as_text() -> None:
    for file, chart in charts(*WORKLOADS).items():
        expected = [name for name in PEERS if name != "direct" or "cpu" not in file]
        assert [name for name in PEERS if name in texts(chart)] == expected
        assert chart.title in texts(chart)
        assert chart.svg.startswith("<svg ")
        assert len(chart.svg) < 10_000


def test_a_panel_is_a_table() -> None:
    shown = texts(charts(*WORKLOADS)["side-by-side-results-qps.svg"])
    assert "result of 10 rows; 4 clients, 1 worker" in shown
    assert "result of 10,000 rows; 4 clients, 1 worker" in shown
    assert "update index; 4 clients, 1 worker" not in shown


def test_a_bar_has_its_figure_and_its_ratio() -> None:
    shown = texts(charts("update index")["side-by-side-statements-cpu.svg"])
    assert shown[-8:] == [
        *("HAProxy", "50.0 µs"),
        *("HAProxy again", "50.0 µs, A/A ± 0.05"),
        *("Envoy", "65.0 µs, ratio 1.30"),
        *("Tidevoy", "48.5 µs, none (0.97)"),
    ]


def test_bars_and_whiskers_are_to_scale() -> None:
    chart = ElementTree.fromstring(charts("update index")["side-by-side-statements-cpu.svg"].svg)
    bars = [bar for bar in chart.iter(f"{SVG}rect") if bar.get("class") in ("bar", "ours")]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1.0, 1.0, 1.3, 0.97], abs=0.01)
    assert [bar.get("class") for bar in bars] == ["bar", "bar", "bar", "ours"]
    whiskers = [path.attrib["d"] for path in chart.iter(f"{SVG}path")]
    low, high = (
        float(part) for part in (whiskers[2][1:].split()[0], whiskers[2].split("H")[1].split("m")[0])
    )
    assert (low / lengths[2], high / lengths[2]) == pytest.approx((1.28 / 1.3, 1.33 / 1.3), abs=0.01)


def test_foreign_names_do_no_harm() -> None:
    made = table()
    made["peers"].append({**made["peers"][-1], "name": "<b> & a name that is far too long"})
    for chart in draw(made_up(made)):
        assert any(text.startswith("<b> & a") and text.endswith("…") for text in texts(chart))
        titles = [element.text for element in ElementTree.fromstring(chart.svg).iter(f"{SVG}title")]
        assert any("far too long" in (title or "") for title in titles)


def test_the_same_document_gives_the_same_bytes() -> None:
    assert charts(*WORKLOADS) == charts(*WORKLOADS)


@pytest.mark.parametrize(("width", "text"), [(40, "abcd"), (39, "ab…"), (20, "a…"), (19, ""), (0, "")])
def test_text_is_cut_to_its_room(width: float, text: str) -> None:
    assert fitted("abcd", width, 10) == text
