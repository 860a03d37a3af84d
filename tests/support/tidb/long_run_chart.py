"""The chart of a long run. It can be drawn again from the CSV files:

python -m tests.support.tidb.long_run_chart DIRECTORY
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.reporting.charts import as_svg
from tests.support.tidb.long_run_judgement import MIB, MIN_SECONDS, warm_up_seconds

CHART_FILE = "long-run.svg"
_WIDTH_INCHES, _PANEL_HEIGHT_INCHES, _HEADER_HEIGHT_INCHES = 12, 2.1, 0.9
_COLUMNS = 2
_COLORS = {
    "Envoy": "C0",
    "control plane": "C1",
    "Envoy, allocated": "C2",
    "Envoy, about removed servers": "C3",
}
_PANELS: Sequence[tuple[str, float, dict[str, str]]] = (
    (
        "memory of Envoy (resident, allocated), MiB",
        MIB,
        {"Envoy": "envoy_memory", "Envoy, allocated": "envoy_allocated"},
    ),
    ("resident memory of the control plane, MiB", MIB, {"control plane": "control_plane_memory"}),
    ("open descriptors", 1, {"Envoy": "envoy_descriptors", "control plane": "control_plane_descriptors"}),
    ("threads", 1, {"Envoy": "envoy_threads", "control plane": "control_plane_threads"}),
    (
        "Prometheus series",
        1,
        {
            "Envoy": "envoy_series",
            "Envoy, about removed servers": "envoy_removed_series",
            "control plane": "control_plane_series",
        },
    ),
    ("written to logs, KiB", 1024, {"Envoy": "envoy_log", "control plane": "control_plane_log"}),
    ("state directory of the control plane, KiB", 1024, {"control plane": "state"}),
    ("client sessions of Envoy", 1, {"Envoy": "envoy_sessions"}),
)
"""Title, divisor, and the columns of the CSV file by the name of the line."""


def write_chart(directory: Path) -> Path:
    """Draw `samples.csv` and `operations.csv`. Return the SVG's path."""
    samples = _read(directory / "samples.csv")
    operations = _read(directory / "operations.csv")
    file = directory / CHART_FILE
    file.write_text(_draw(samples, operations))
    return file


def _draw(samples: Sequence[dict[str, str]], operations: Sequence[dict[str, str]]) -> str:
    from matplotlib.figure import Figure

    end = float(samples[-1]["seconds"])
    unit, unit_seconds = ("hours", 3600) if end >= 2 * 3600 else ("minutes", 60)
    rows = -(-len(_PANELS) // _COLUMNS)
    figure = Figure(
        figsize=(_WIDTH_INCHES, rows * _PANEL_HEIGHT_INCHES + _HEADER_HEIGHT_INCHES), layout="constrained"
    )
    title = f"Long run of {end / unit_seconds:.1f} {unit} on real TiDB servers"
    statements, short_sessions = int(samples[-1]["statements"]), int(samples[-1]["short_sessions"])
    figure.suptitle(
        f"{title}\n{statements:,} statements and {short_sessions:,} short sessions,"
        f" {samples[-1]['errors']} errors, {len(operations)} operations (ticks at the bottom)"
    )
    ticks = [float(operation["started_at"]) / unit_seconds for operation in operations]
    lines: dict[str, Any] = {}
    for number, (panel_title, divisor, columns) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(rows, _COLUMNS, number)
        axes.set_title(panel_title, fontsize="medium")
        for name, column in columns.items():
            points = [(float(s["seconds"]) / unit_seconds, s[column]) for s in samples]
            values = [float(value) / divisor if value else float("nan") for _, value in points]
            color = _COLORS[name]
            (lines[name],) = axes.plot([at for at, _ in points], values, color=color, linewidth=1)
        axes.margins(x=0, y=0.1)
        axes.set_ylim(bottom=0)
        # The y coordinates of the ticks are fractions of the height.
        axes.vlines(ticks, 0, 0.04, color="black", linewidth=0.4, transform=axes.get_xaxis_transform())
        if end >= MIN_SECONDS:
            warm = axes.axvline(warm_up_seconds(end) / unit_seconds, color="black", ls="--", linewidth=1)
            lines["end of the warm-up"] = warm
        axes.grid(alpha=0.4)
        if number > len(_PANELS) - _COLUMNS:
            axes.set_xlabel(f"time, {unit}")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    return as_svg(figure, title)


def _read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


if __name__ == "__main__":
    print(write_chart(Path(sys.argv[1])))
