"""Render stored results as a page, a chart and README's table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.proxies.comparison import Comparison
from bench.proxies.contenders import ENVOY, HAPROXY, TIDEVOY
from bench.proxies.interleaving import BLOCKS, FIGURES, SLICES_PER_BLOCK
from bench.proxies.results import Results, machine_sentence
from bench.reporting.svg import as_svg

METHOD = f"""\
All proxies stand before the same server, on one machine and on loopback, with one worker each. All
connections stay open, and one proxy works at a time, in slices of 30 to 100 ms: A, B, C, C, B, A, and so
on. {SLICES_PER_BLOCK} slices of each proxy are a block, {BLOCKS} blocks are a\
 measurement. A ratio compares two
proxies within each block. The tables show the geometric mean of these ratios, without the highest and the
lowest fifth, and its 99 % confidence interval, bootstrapped over blocks. Added latencies have 20 blocks.
CPU is what the kernel's scheduler accounts to the proxy's processes, with the soft interrupts that it
causes on loopback. The clients are `bench/client`; they read every byte. On machines with four cores or
more, proxies, clients and servers have cores of their own. A ratio is not judged if other programs use more
than 10 % of the machine.

* CPU per query, mean latency, 95th percentile: less is better, as for all figures.
* With a rate, such as 300/s: statements begin at that rate, spread over 16 connections. Without one, each
  connection sends its next statement at once.
* N new connections/s: each logs in and sends one statement, beside 2,000 statements/s on 16 other
  connections, whose figures these are. The CPU per query includes that of the logins.
* TLS to clients: the proxy ends TLS. HAProxy cannot do that within MySQL's handshake, so its clients begin
  with TLS.
* TLS to clients and server: the proxy also starts TLS to the server. For HAProxy, which begins with TLS there
  as well, another HAProxy before the server ends it. That one's CPU is not counted. It adds to latency, so
  only CPU is compared.
"""
_COLOURS = {HAPROXY: "#8a8f98", ENVOY: "#e08f2c", TIDEVOY: "#2c6fbb"}
_OTHER_COLOURS = ("#5b9a5b", "#9a5b8f", "#7a6a4f")
README_BEGIN = "<!-- proxies: made by `tidevoy bench proxies`; do not edit -->"
README_END = "<!-- end of proxies -->"
_README_WORKLOADS = (
    "point select, 64 clients",
    "point select, 4,000/s",
    "1,000 rows, 300/s",
    "300 new connections/s",
    "TLS to clients",
)


def format_number(value: float) -> str:
    """Format with at least three significant digits, or with three decimals below 1."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}"


def write_results(results: Results, directory: Path) -> list[Path]:
    """Write the results, their page and their chart, and return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"proxies-{results.backend}"
    data, page, chart = (directory / f"{name}.{ending}" for ending in ("json", "md", "svg"))
    results.write(data)
    page.write_text(results_as_markdown(results, chart.name), encoding="utf-8")
    chart.write_text(draw_chart(results), encoding="utf-8")
    return [data, page, chart]


def results_as_markdown(results: Results, chart: str) -> str:
    """Return the page of the results."""
    lines = [
        *_introduction(results),
        "",
        f"![CPU per query in proportion to {results.reference}]({chart})",
        *_ratio_tables(results),
        *_latency_tables(results),
        *_single_figures(results),
    ]
    return "\n".join(lines) + "\n"


def _introduction(results: Results) -> Iterator[str]:
    yield f"# {', '.join(results.versions)} in front of {results.backend_version}"
    yield ""
    yield f"Made by `tidevoy bench proxies` from `proxies-{results.backend}.json`; do not edit."
    yield f"Measured {results.at} on {machine_sentence(results.machine)}."
    yield ""
    yield METHOD
    yield ""
    yield "| proxy | version |"
    yield "|---|---|"
    for name, version in results.versions.items():
        yield f"| {name} | {version or 'as started by its command'} |"


def _ratio_tables(results: Results) -> Iterator[str]:
    reference = results.reference
    for name, figure in FIGURES.items():
        comparisons = [comparison for comparison in results.comparisons if comparison.figure == name]
        if not comparisons:
            continue
        others = [contender for contender in results.versions if contender != reference]
        yield ""
        yield f"## {figure.title}"
        yield ""
        yield from _table(
            ["workload", f"{reference}, {figure.unit}", *(f"{other} / {reference}" for other in others)],
            (_row(workload, group, others) for workload, group in _group_by_workload(comparisons)),
        )


def _row(workload: str, comparisons: Sequence[Comparison], others: Sequence[str]) -> list[str]:
    by_name = {comparison.contender: comparison for comparison in comparisons}
    cells = [str(by_name[other].ratio) if other in by_name else "" for other in others]
    return [workload, format_number(comparisons[0].reference_value), *cells]


def _group_by_workload(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, list[Comparison]]]:
    for workload in dict.fromkeys(comparison.workload for comparison in comparisons):
        yield workload, [comparison for comparison in comparisons if comparison.workload == workload]


def _latency_tables(results: Results) -> Iterator[str]:
    if not results.latencies:
        return
    yield ""
    yield "## Latency that is added to the server's own"
    yield ""
    yield "Milliseconds, with 99 % intervals; 1,000 point selects/s, spread over all clients."
    names = list(dict.fromkeys(latency.contender for latency in results.latencies))
    for quantile in dict.fromkeys(latency.quantile for latency in results.latencies):
        latencies = [latency for latency in results.latencies if latency.quantile == quantile]
        yield ""
        yield f"### {quantile * 100:g}th percentile"
        yield ""
        rows = []
        for clients in dict.fromkeys(latency.clients for latency in latencies):
            cells = {latency.contender: latency for latency in latencies if latency.clients == clients}
            direct = format_number(next(iter(cells.values())).direct)
            added = [str(cells[name].added) for name in names]
            rows.append([f"{clients:,}", direct, *added])
        yield from _table(["clients", "server itself", *names], rows)


def _single_figures(results: Results) -> Iterator[str]:
    if results.memory is not None:
        yield ""
        yield "## Memory for each idle session"
        yield ""
        yield "Resident memory, in 1,000 bytes, for each of the first 1,000 sessions."
        yield ""
        yield from _table(list(results.memory), [[f"{value:.1f}" for value in results.memory.values()]])
    if results.moves is not None:
        moves = results.moves
        yield ""
        yield "## Drains of a TiDB server"
        yield ""
        yield f"{moves.drains} drains of {moves.sessions:,} sessions each, beside 500 statements/s."
        yield ""
        yield from _table(
            ["sessions moved per second (median)", "slowest statement, ms", "slowest without drains, ms"],
            [
                [
                    format_number(moves.per_second),
                    format_number(moves.slowest),
                    format_number(moves.slowest_at_rest),
                ]
            ],
        )


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield "|---|" + "---:|" * (len(headers) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def draw_chart(results: Results) -> str:
    """Return the SVG of CPU per query: a point with its interval per workload and contender."""
    from matplotlib.figure import Figure as Canvas

    comparisons = [comparison for comparison in results.comparisons if comparison.figure == "cpu"]
    workloads = list(dict.fromkeys(comparison.workload for comparison in comparisons))
    names = [name for name in results.versions if name != results.reference]
    others = [name for name in names if name not in _COLOURS]
    colours = dict(zip(others, itertools.cycle(_OTHER_COLOURS), strict=False)) | _COLOURS
    canvas = Canvas(figsize=(8.0, 1.2 + 0.36 * len(workloads)), layout="constrained")
    axes = canvas.subplots()
    axes.axvline(1.0, color=_COLOURS[HAPROXY], linewidth=1.2, label=results.reference)
    for index, name in enumerate(names):
        shift = (index - (len(names) - 1) / 2) * 0.22
        own = [comparison for comparison in comparisons if comparison.contender == name]
        ratios = [comparison.ratio for comparison in own]
        axes.errorbar(
            [ratio.value for ratio in ratios],
            [workloads.index(comparison.workload) + shift for comparison in own],
            xerr=[
                [ratio.value - ratio.low for ratio in ratios],
                [ratio.high - ratio.value for ratio in ratios],
            ],
            fmt="o",
            markersize=4.5,
            capsize=2.5,
            color=colours[name],
            label=name,
        )
    axes.set_yticks(range(len(workloads)), workloads)
    axes.invert_yaxis()
    axes.set_xlabel(f"CPU per query / {results.reference}'s (less is better; bars are 99 % intervals)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(loc="outside upper right", ncols=len(names) + 1, frameon=False, fontsize=9)
    return as_svg(canvas, f"CPU per query in proportion to {results.reference}")


def readme_section(results: Results, pages: Sequence[str]) -> str:
    """Return README's section with its two markers: five rows and the chart. `pages`: names of all pages."""
    rows = []
    for workload in _README_WORKLOADS:
        ratios = {
            comparison.figure: str(comparison.ratio)
            for comparison in results.comparisons
            if comparison.workload == workload and comparison.contender == TIDEVOY
        }
        rows.append([workload, ratios["cpu"], ratios["p95"]])
    links = " and ".join(f"[{page}](bench/results/{page}.md)" for page in pages)
    return "\n".join(
        [
            README_BEGIN,
            "",
            "## Compared with other proxies",
            "",
            f"Tidevoy in proportion to {results.reference}, with 99 % confidence intervals, in front of"
            f" {results.backend_version},",
            f"on {results.machine['cores']} cores. Less is better. All workloads and proxies: {links}.",
            "",
            *_table(["workload", "CPU per query", "95th percentile of latency"], rows),
            "",
            f"![CPU per query of all proxies](bench/results/proxies-{results.backend}.svg)",
            "",
            README_END,
        ]
    )


def write_readme(readme_file: Path, directory: Path) -> bool:
    """Update README's section from the stored results with MariaDB; return whether it has changed.

    Raises ValueError if README has no section markers.
    """
    pages = [path.stem for path in sorted(directory.glob("proxies-*.json"))]
    mariadb_results = directory / "proxies-mariadb.json"
    if not mariadb_results.exists():
        return False
    old = readme_file.read_text(encoding="utf-8")
    before, begin, rest = old.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"{readme_file} lacks the markers {README_BEGIN} and {README_END}")
    new = before + readme_section(Results.read(mariadb_results), pages) + after
    readme_file.write_text(new, encoding="utf-8")
    return new != old
