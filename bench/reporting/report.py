"""Figures with targets and verdicts, and reports as JSON, Markdown and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import Machine, MachineCondition
from bench.reporting.charts import LineChart, draw_line_chart
from cli.output import print_result, show_table

_HEADERS = ("figure", "result", "target", "verdict", "range")


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
        """Summarize at least one sample. `p99`: at least 99 % of all samples do not exceed it."""
        ordered = sorted(samples)
        rank = -(-99 * len(ordered) // 100)
        return cls(len(ordered), ordered[0], median(ordered), ordered[rank - 1], ordered[-1])


@dataclass(frozen=True, slots=True)
class BenchmarkFigure:
    """One measured number. `target` is its upper limit, if it has one.

    `tolerance` is the usual difference between two measurements of the same thing. A smaller difference
    is not significant.
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

        `undecided`: the value exceeds the target by no more than the tolerance, or the tolerance exceeds the
        target.
        """
        if self.target is None:
            return ""
        if self.value > self.target + self.tolerance:
            return "missed"
        return "met" if self.value <= self.target and self.tolerance <= self.target else "undecided"


def latency_figures(
    name: str, milliseconds: Sequence[float], *, limits: Sequence[float], note: str = ""
) -> list[BenchmarkFigure]:
    """Return median, 99th percentile and, with a third limit, maximum. `note` belongs to the last figure."""
    spread = Spread.of(milliseconds)
    values = {"median": spread.median, "99th percentile": spread.p99, "maximum": spread.high}
    figures = [
        BenchmarkFigure(f"{name}, {statistic}", value, "ms", limit, spread)
        for (statistic, value), limit in zip(values.items(), limits, strict=False)
    ]
    return [*figures[:-1], replace(figures[-1], note=note)]


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table that compares items. The first cell of a row names the item."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Findings:
    figures: Sequence[BenchmarkFigure]
    tables: Sequence[ResultTable] = ()
    charts: Sequence[LineChart] = ()


@dataclass(frozen=True, slots=True)
class ReportSection:
    """The results of one benchmark, its method, and the condition of the machine."""

    benchmark: str
    method: str
    condition: MachineCondition
    findings: Findings


def report_as_json(suite: str, machine: Machine, sections: Sequence[ReportSection]) -> dict[str, Any]:
    """Return the results of one suite's run as JSON data; numbers are not rounded."""
    return {
        "suite": suite,
        "machine": asdict(machine),
        "targets_missed": [
            f"{section.benchmark}: {figure.name} is {format_number(figure.value)} {figure.unit}, "
            f"the target is at most {format_number(figure.target)} {figure.unit}"
            for section in sections
            for figure in section.findings.figures
            if figure.target is not None and figure.verdict == "missed"
        ],
        "benchmarks": [
            {
                "name": section.benchmark,
                "method": section.method,
                "condition": asdict(section.condition),
                "figures": [_figure_json(figure) for figure in section.findings.figures],
                "tables": [asdict(table) for table in section.findings.tables],
                "charts": [asdict(chart) for chart in section.findings.charts],
            }
            for section in sections
        ],
    }


def report_as_markdown(document: dict[str, Any]) -> str:
    """Return the Markdown page of a report's JSON data, so that the page and the JSON always agree."""
    machine = document["machine"]
    paragraphs = [
        f"# Benchmark: {document['suite']}",
        f"Made by `make bench` from `{document['suite']}.json`; do not edit.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_mib']} MiB of memory, "
        f"{machine['kernel']}; Python {machine['python']}, Envoy {machine['envoy']}, etcd {machine['etcd']}.",
    ]
    for section in document["benchmarks"]:
        figures = section["figures"]
        paragraphs += [
            f"## {section['name']}",
            section["method"],
            describe_condition(section["condition"]),
            markdown_table(_HEADERS, map(_figure_cells, figures), alignment="|---|---:|---:|---|---|"),
            "\n".join(f"* {figure['name']}: {figure['note']}" for figure in figures if figure["note"]),
        ]
        for table in section["tables"]:
            paragraphs += [f"### {table['title']}", markdown_table(table["headers"], table["rows"])]
        paragraphs += [f"![{chart['title']}]({chart['file']})" for chart in section["charts"]]
    missed = "\n".join(f"* {sentence}" for sentence in document["targets_missed"]) or "None."
    return join_paragraphs(*paragraphs, "## Targets missed", missed)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, alignment: str = "") -> str:
    """Return a Markdown table. By default the first column is aligned left, the others right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, *rows)]
    lines.insert(1, alignment or "|---|" + "---:|" * (len(headers) - 1))
    return "\n".join(lines)


def join_paragraphs(*paragraphs: str) -> str:
    """Return a Markdown page of the paragraphs that are not empty."""
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def print_report(document: dict[str, Any]) -> None:
    """Print the report as tables on standard output, followed by the missed targets."""
    rows = [
        (section["name"], *_figure_cells(figure))
        for section in document["benchmarks"]
        for figure in section["figures"]
    ]
    if rows:
        show_table(("benchmark", *_HEADERS), rows)
    for section in document["benchmarks"]:
        print_result(f"{section['name']}: {describe_condition(section['condition'])}")
        for table in section["tables"]:
            print_result(f"\n{table['title']}")
            show_table(table["headers"], table["rows"])
    for sentence in document["targets_missed"]:
        print_result(f"MISSED {sentence}")


def write_report(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write `<suite>.json`, `<suite>.md` and the charts to `directory`, and return their paths."""
    suite = document["suite"]
    files = {
        f"{suite}.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        f"{suite}.md": report_as_markdown(document),
    }
    for section in document["benchmarks"]:
        files |= {chart["file"]: draw_line_chart(chart) for chart in section["charts"]}
    return write_files(directory, files)


def write_files(directory: Path, files: Mapping[str, str]) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in files]


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
        low, high = format_number(spread["min"]), format_number(spread["max"])
        spread_text = f"{low} to {high} {unit} in {figure['samples']} samples"
    target = f"<= {format_number(figure['target'])} {unit}" if figure["target"] is not None else "-"
    if figure["tolerance"]:
        target += f" (± {format_number(figure['tolerance'])} {unit})"
    result = f"{format_number(figure['value'])} {unit}"
    return figure["name"], result, target, figure["verdict"] or "-", spread_text


def describe_condition(condition: dict[str, Any]) -> str:
    """Return a sentence on the time of a measurement and the machine's load from other programs."""
    busy = condition["others_busy"]
    warning = "; other programs affected these figures" if busy > MachineCondition.MAX_OTHERS_BUSY else ""
    return (
        f"Measured {condition['at']}; in the second before, {busy:.0%} of the machine was busy with other"
        f" things (load average {condition['load_average']:.2f}){warning}."
    )


def format_number(value: float) -> str:
    """Format with at least three significant digits, or with three decimals below 1."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}"
