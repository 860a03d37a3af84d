"""Figures with targets and verdicts, and reports of them as JSON, Markdown and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import Machine, MachineCondition
from bench.reporting.line_chart import LineChart, render_svg

_SIGNIFICANT_DIGITS = 3
_HEADERS = ("benchmark", "figure", "result", "target", "verdict", "how spread")


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one figure's samples. All fields but `count` are in the figure's unit."""

    count: int
    low: float
    median: float
    p99: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarize at least one sample. `p99` is the smallest sample that 99 % of them do not exceed."""
        ordered = sorted(samples)
        rank = -(-99 * len(ordered) // 100)
        return cls(len(ordered), ordered[0], median(ordered), ordered[rank - 1], ordered[-1])


@dataclass(frozen=True, slots=True)
class BenchmarkFigure:
    """One measured number. `target` is its upper limit; None: no target.

    `tolerance` is the difference that the same measurement shows between two equal items: smaller differences
    are not significant.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    spread: Spread | None = None
    note: str = ""
    tolerance: float = 0.0

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `undecided`, or empty without a target.

        Undecided: the value exceeds the target by no more than the tolerance, or the tolerance exceeds it.
        """
        if self.target is None:
            return ""
        if self.value > self.target + self.tolerance:
            return "missed"
        return "met" if self.value <= self.target and self.tolerance <= self.target else "undecided"


def latency_figures(
    name: str,
    milliseconds: Sequence[float],
    *,
    limits: tuple[float, float] | tuple[float, float, float],
    note: str = "",
) -> list[BenchmarkFigure]:
    """Return median, 99th percentile and, with a third target, maximum of the samples.

    `note` belongs to the last figure.
    """
    spread = Spread.of(milliseconds)
    values = {"median": spread.median, "99th percentile": spread.p99, "maximum": spread.high}
    figures = [
        BenchmarkFigure(f"{name}, {statistic}", value, "ms", limit, spread)
        for (statistic, value), limit in zip(values.items(), limits, strict=False)
    ]
    return [*figures[:-1], replace(figures[-1], note=note)]


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table of compared items next to the figures; the first cell of a row names the item."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of a benchmark that has more than figures."""

    figures: tuple[BenchmarkFigure, ...]
    sheets: tuple[ResultTable, ...] = ()
    drawings: tuple[LineChart, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportSection:
    """The results of one benchmark, its method, and the condition of the machine."""

    benchmark: str
    method: str
    condition: MachineCondition
    figures: tuple[BenchmarkFigure, ...]
    sheets: tuple[ResultTable, ...] = ()
    drawings: tuple[LineChart, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one suite's run."""

    suite: str
    machine: Machine
    sections: tuple[ReportSection, ...]

    @property
    def missed(self) -> list[str]:
        """One sentence per missed target."""
        return [
            f"{section.benchmark}: {figure.name} is {_format_number(figure.value)} {figure.unit}, "
            f"the target is at most {_format_number(figure.target)} {figure.unit}"
            for section in self.sections
            for figure in section.figures
            if figure.target is not None and figure.verdict == "missed"
        ]


def report_as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON data; numbers are not rounded."""
    return {
        "suite": report.suite,
        "machine": report.machine.as_json(),
        "targets_missed": report.missed,
        "benchmarks": [
            {
                "name": section.benchmark,
                "method": section.method,
                "condition": section.condition.as_json(),
                "figures": [_figure_json(figure) for figure in section.figures],
                **({"sheets": [asdict(sheet) for sheet in section.sheets]} if section.sheets else {}),
                **({"drawings": [chart.as_json() for chart in section.drawings]} if section.drawings else {}),
            }
            for section in report.sections
        ],
    }


def report_as_markdown(document: dict[str, Any]) -> str:
    """Return the Markdown page of a report's JSON data, so that page and JSON always agree."""
    machine = document["machine"]
    lines = [
        f"# Benchmark: {document['suite']}",
        "",
        f"Made by `make bench` from `{document['suite']}.json`; do not edit.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_mib']} MiB of memory, "
        f"{machine['kernel']}; Python {machine['python']}, Envoy {machine['envoy']}, etcd {machine['etcd']}.",
    ]
    for section in document["benchmarks"]:
        condition = describe_condition(section["condition"])
        lines += ["", f"## {section['name']}", "", section["method"], "", condition, ""]
        lines += ["| figure | result | target | verdict | how spread |", "|---|---:|---:|---|---|"]
        lines += [f"| {' | '.join(_figure_cells(figure))} |" for figure in section["figures"]]
        lines += ["", *(f"* {f['name']}: {f['note']}" for f in section["figures"] if f["note"])]
        for sheet in section.get("sheets", ()):
            lines += ["", f"### {sheet['title']}", "", f"| {' | '.join(sheet['heads'])} |"]
            lines += ["|---|" + "---:|" * (len(sheet["heads"]) - 1)]
            lines += [f"| {' | '.join(row)} |" for row in sheet["rows"]]
        for drawing in section.get("drawings", ()):
            lines += ["", f"![{drawing['title']}]({drawing['file']})"]
    lines += ["", "## Targets missed", ""]
    lines += [f"* {sentence}" for sentence in document["targets_missed"]] or ["None."]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def print_report(document: dict[str, Any]) -> None:
    """Print the report as tables on standard output, followed by the missed targets."""
    unfolded_console = Console(highlight=False, markup=False, emoji=False)
    # A pipe or a log gets full lines, not lines folded at 80 columns.
    console = (
        unfolded_console
        if unfolded_console.is_terminal
        else Console(highlight=False, markup=False, emoji=False, width=180)
    )
    table = Table(*_HEADERS, box=None, pad_edge=False)
    for section in document["benchmarks"]:
        for figure in section["figures"]:
            style = {"missed": "red", "undecided": "yellow", "met": "green"}.get(figure["verdict"], "")
            table.add_row(section["name"], *_figure_cells(figure), style=style)
    console.print(table)
    for section in document["benchmarks"]:
        console.print(f"{section['name']}: {describe_condition(section['condition'])}")
        for sheet in section.get("sheets", ()):
            table_view = Table(
                *sheet["heads"], title=sheet["title"], title_justify="left", box=None, pad_edge=False
            )
            for row in sheet["rows"]:
                table_view.add_row(*row)
            console.print(table_view)
    for sentence in document["targets_missed"]:
        console.print(f"MISSED {sentence}", style="red")


def write_report(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write `<suite>.json`, `<suite>.md` and the charts to `directory`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data, page = (directory / f"{document['suite']}.{ending}" for ending in ("json", "md"))
    data.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(report_as_markdown(document), encoding="utf-8")
    written = [data, page]
    for section in document["benchmarks"]:
        for chart in section.get("drawings", ()):
            svg_path = directory / chart["file"]
            svg_path.write_text(render_svg(chart), encoding="utf-8")
            written.append(svg_path)
    return written


def _figure_json(figure: BenchmarkFigure) -> dict[str, Any]:
    spread = figure.spread
    return {
        "name": figure.name,
        "value": figure.value,
        "unit": figure.unit,
        "target": figure.target,
        "tolerance": figure.tolerance,
        "verdict": figure.verdict or None,
        "samples": spread.count if spread else 1,
        "spread": spread
        and {"min": spread.low, "median": spread.median, "p99": spread.p99, "max": spread.high},
        "note": figure.note,
    }


def _figure_cells(figure: dict[str, Any]) -> tuple[str, ...]:
    unit, spread = figure["unit"], figure["spread"]
    spread_text = ""
    if spread is not None:
        low, high = _format_number(spread["min"]), _format_number(spread["max"])
        spread_text = f"{low} to {high} {unit} in {figure['samples']} samples"
    target = f"<= {_format_number(figure['target'])} {unit}" if figure["target"] is not None else "-"
    if figure["tolerance"]:
        target += f" (± {_format_number(figure['tolerance'])} {unit})"
    return (
        figure["name"],
        f"{_format_number(figure['value'])} {unit}",
        target,
        figure["verdict"] or "-",
        spread_text,
    )


def describe_condition(condition: dict[str, Any]) -> str:
    """Return a sentence on the time of a measurement and the machine's load from other programs."""
    busy = condition["others_busy"]
    warning = "; others had a share in these figures" if busy > MachineCondition.MAX_OTHERS_BUSY else ""
    return (
        f"Measured {condition['at']}; in the second before, {busy:.0%} of the machine was busy with other"
        f" things (load average {condition['load_average']:.2f}){warning}."
    )


def _format_number(value: float) -> str:
    """Format with three significant digits, never in scientific notation."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, _SIGNIFICANT_DIGITS - whole)}f}"
