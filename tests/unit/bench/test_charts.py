"""Line charts as SVG."""

from __future__ import annotations

import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from bench.reporting.charts import LineChart, Panel, draw_line_chart

SVG = "{http://www.w3.org/2000/svg}"
CHART = LineChart(
    file="load.svg",
    title="Load of <nodes> & Envoys",
    about="Made up for a test",
    values="sessions, max/mean",
    unit="min",
    low=1.0,
    high=2.0,
    limit=1.25,
    panels=(
        Panel("first", {"even": (1.0, 1.5, 1.0), "uneven": (1.5, 2.0, 3.0)}),
        Panel("second", {"even": (1.0,), "uneven": (2.0,)}),
        Panel("third", {"even": (), "uneven": (0.0, 1.0)}),
    ),
)


def test_chart_contains_its_texts() -> None:
    root = ElementTree.fromstring(draw_line_chart(asdict(CHART)))
    assert root.findtext(f"{SVG}title") == CHART.title
    texts = [text for element in root.iter(f"{SVG}text") for text in element.itertext()]
    assert {CHART.title, CHART.about, CHART.values, "time, min"} <= set(texts)
    assert [text for text in texts if text in ("first", "second", "third")] == ["first", "second", "third"]
    assert [text for text in texts if text in ("even", "uneven", "limit, 1.25")] == [
        *("even", "uneven", "limit, 1.25"),
    ]


def test_same_chart_gives_the_same_bytes() -> None:
    assert draw_line_chart(asdict(CHART)) == draw_line_chart(asdict(CHART))


def test_lines_are_steps_clipped_to_the_frame() -> None:
    root = ElementTree.fromstring(draw_line_chart(asdict(CHART)))
    axes = next(group for group in root.iter(f"{SVG}g") if group.get("id") == "axes_1")
    frame, *_, even, uneven = [corners(path.attrib["d"]) for path in axes.iter(f"{SVG}path")]
    (left, bottom), (right, top) = frame[0], frame[2]
    ends = [left + (right - left) * part / 3 for part in range(4)]
    middle = (top + bottom) / 2
    assert [x for x, _ in even] == pytest.approx([ends[i] for i in (0, 1, 1, 2, 2, 3)])
    assert [y for _, y in even] == pytest.approx([bottom, bottom, middle, middle, bottom, bottom])
    assert [x for x, _ in uneven] == pytest.approx([ends[i] for i in (0, 1, 1, 2, 3)])
    assert [y for _, y in uneven] == pytest.approx([middle, middle, top, top, top])


def corners(path: str) -> list[tuple[float, float]]:
    """Return each distinct point of a path."""
    return list(dict.fromkeys((float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)))
