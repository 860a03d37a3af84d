"""The charts of comparisons: positions, and the page that needs no other file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from api.console.comparison_charts import IntervalBar, LogScale, comparison_values
from api.console.pages import render_file
from controlplane.model.comparison import Comparison, LatencySummary
from controlplane.verification.verdict import judge
from tests.support.controlplane.comparisons import (
    FAST,
    SAME,
    SLOW,
    comparison_with,
    digest_comparison,
    upgrade_with_problems,
)

HOSTILE = "<script>alert(1)</script>\"'"


def page_of(comparison: Comparison) -> str:
    values = comparison_values(comparison, judge(comparison), 1.5)
    return render_file("comparison_file.html", title="a & b", **values)


def test_logarithmic_scale_has_one_in_the_middle_and_cuts_at_its_ends() -> None:
    scale = LogScale(0.25, 4.0, 0, 100)
    assert [scale.position(value) for value in (0.01, 0.25, 0.5, 1.0, 4.0, 99.0)] == [0, 0, 25, 50, 100, 100]


def test_bars_show_direction_and_interval() -> None:
    values = comparison_values(upgrade_with_problems(), (), 1.5)
    changes = {row.entry.digest: row.change for row in values["rows"]}
    assert (changes[SLOW], changes[FAST], changes[SAME]) == ("slower", "faster", "same")
    by_digest = {row.entry.digest: row.bar for row in values["rows"]}
    slow, fast = by_digest[SLOW], by_digest[FAST]
    assert fast.low < fast.middle < fast.high < values["one"] == 50.0
    assert values["one"] < values["limit"] < slow.low < slow.middle < slow.high
    assert sum(bar is None for bar in by_digest.values()) == 1
    lone = comparison_with(digest_comparison(SAME, 0.0001, 0.0), digest_comparison(SLOW, 9_000.0))
    bars = [row.bar for row in comparison_values(lone, (), 1.5)["rows"]]
    assert [bar for bar in bars if bar is not None] == [IntervalBar(98, 98, 98), IntervalBar(2, 2, 2)]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.1])
def test_points_above_the_diagonal_have_become_slower(ratio: float) -> None:
    scatter = comparison_values(comparison_with(digest_comparison(SLOW, ratio)), (), 1.5)["scatter"]
    (point,) = scatter.points
    share_x = (point.x - scatter.left) / (scatter.right - scatter.left)
    share_y = (scatter.bottom - point.y) / (scatter.bottom - scatter.top)
    assert round(share_y - share_x, 2) == pytest.approx({0.5: -0.3, 1.0: 0.0, 2.1: 0.32}[ratio], abs=0.02)


def test_page_is_complete_and_escapes_foreign_texts() -> None:
    hostile = digest_comparison(SLOW, 2.1, text=HOSTILE)
    page = page_of(comparison_with(hostile, digest_comparison(FAST, 0.5)))
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="', page)
    assert "a &amp; b" in page
    assert "prefers-reduced-motion" in page  # the style sheet is within
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert page.count("<svg") == 3
    assert page.count("<circle") == 2


def test_page_of_a_comparison_without_pairs() -> None:
    nothing = page_of(Comparison())
    assert "No statement ran on both sides." in nothing
    assert "No new errors" in nothing
    only_errors = replace(digest_comparison(SAME, None), old=LatencySummary(), new=LatencySummary(errors=1))
    assert "<circle" not in page_of(comparison_with(only_errors))
