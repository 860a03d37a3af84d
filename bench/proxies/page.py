"""Render stored results as a page, a chart and the table in the main README."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.proxies.contenders import ENVOY, HAPROXY, TIDEVOY
from bench.proxies.interleaving import BLOCKS, FIGURES, SLICES_PER_BLOCK
from bench.proxies.results import Results
from bench.reporting.charts import as_svg
from bench.reporting.report import format_number, join_paragraphs, markdown_table, write_files

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
* N new connections/s: each logs in and sends one statement. The latencies are those of 2,000 other
  statements/s, on 16 permanent connections. The CPU per query includes the CPU of the logins.
* TLS to clients: the proxy terminates TLS. HAProxy cannot do that within MySQL's handshake, so its clients
  begin with TLS.
* TLS to clients and server: the proxy also starts TLS to the server. For HAProxy, which begins with TLS there
  as well, a second HAProxy before the server terminates it. The CPU of this second HAProxy is not counted.
  It adds latency, so only the CPU of the proxies is compared.
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


def write_results(results: Results, directory: Path) -> list[Path]:
    """Write the results, the page and the chart, and return their paths."""
    name = f"proxies-{results.backend}"
    files = {
        f"{name}.json": results.as_json_text(),
        f"{name}.md": results_as_markdown(results, f"{name}.svg"),
        f"{name}.svg": draw_chart(results),
    }
    return write_files(directory, files)


def results_as_markdown(results: Results, chart: str) -> str:
    machine = results.machine
    versions = [(name, version or "as started by its command") for name, version in results.versions.items()]
    return join_paragraphs(
        f"# {', '.join(results.versions)} in front of {results.backend_version}",
        f"Made by `tidevoy bench proxies` from `proxies-{results.backend}.json`; do not edit.\n"
        f"Measured {results.at} on {machine['cores']} cores ({machine['cpu']}),"
        f" {machine['memory_mib'] / 1024:.0f} GiB of memory, {machine['kernel']}.",
        METHOD,
        markdown_table(["proxy", "version"], versions, alignment="|---|---|"),
        f"![CPU per query in proportion to {results.reference}]({chart})",
        *_ratio_tables(results),
        *_latency_tables(results),
        *_single_figures(results),
    )


def _ratio_tables(results: Results) -> Iterator[str]:
    reference = results.reference
    others = [contender for contender in results.versions if contender != reference]
    for name, figure in FIGURES.items():
        comparisons = [comparison for comparison in results.comparisons if comparison.figure == name]
        rows = []
        for workload in dict.fromkeys(comparison.workload for comparison in comparisons):
            by_contender = {each.contender: each for each in comparisons if each.workload == workload}
            reference_value = format_number(next(iter(by_contender.values())).reference_value)
            ratios = [str(by_contender[other].ratio) if other in by_contender else "" for other in others]
            rows.append([workload, reference_value, *ratios])
        if rows:
            ratio_headers = [f"{other} / {reference}" for other in others]
            yield f"## {figure.title}"
            yield markdown_table(["workload", f"{reference}, {figure.unit}", *ratio_headers], rows)


def _latency_tables(results: Results) -> Iterator[str]:
    if not results.latencies:
        return
    yield "## Latency that is added to the server's own"
    yield "Milliseconds, with 99 % intervals; 1,000 point selects/s, spread over all clients."
    names = list(dict.fromkeys(latency.contender for latency in results.latencies))
    for quantile in dict.fromkeys(latency.quantile for latency in results.latencies):
        latencies = [latency for latency in results.latencies if latency.quantile == quantile]
        rows = []
        for clients in dict.fromkeys(latency.clients for latency in latencies):
            cells = {latency.contender: latency for latency in latencies if latency.clients == clients}
            direct = format_number(next(iter(cells.values())).direct)
            rows.append([f"{clients:,}", direct, *(str(cells[name].added) for name in names)])
        yield f"### {quantile * 100:g}th percentile"
        yield markdown_table(["clients", "server itself", *names], rows)


def _single_figures(results: Results) -> Iterator[str]:
    if results.memory is not None:
        yield "## Memory for each idle session"
        yield "Resident memory, in 1,000 bytes, for each of the first 1,000 sessions."
        yield markdown_table(list(results.memory), [[f"{value:.1f}" for value in results.memory.values()]])
    if results.moves is not None:
        moves = results.moves
        yield "## Drains of a TiDB server"
        yield f"{moves.drains} drains of {moves.sessions:,} sessions each, under 500 statements/s."
        yield markdown_table(
            ["sessions moved per second (median)", "slowest statement, ms", "slowest without drains, ms"],
            [[format_number(value) for value in (moves.per_second, moves.slowest, moves.slowest_at_rest)]],
        )


def draw_chart(results: Results) -> str:
    """Return the chart of CPU per query as SVG: per workload and contender, a point with its interval."""
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
    """Return the README's section with its markers: a table and the chart. `pages`: names of all pages."""
    rows = []
    for workload in _README_WORKLOADS:
        ratios = {
            comparison.figure: str(comparison.ratio)
            for comparison in results.comparisons
            if comparison.workload == workload and comparison.contender == TIDEVOY
        }
        rows.append([workload, ratios["cpu"], ratios["p95"]])
    links = " and ".join(f"[{page}](bench/results/{page}.md)" for page in pages)
    return join_paragraphs(
        README_BEGIN,
        "## Compared with other proxies",
        f"Tidevoy in proportion to {results.reference}, with 99 % confidence intervals, in front of"
        f" {results.backend_version},\n"
        f"on {results.machine['cores']} cores. Less is better. All workloads and proxies: {links}.",
        markdown_table(["workload", "CPU per query", "95th percentile of latency"], rows),
        f"![CPU per query of all proxies](bench/results/proxies-{results.backend}.svg)",
        README_END,
    ).rstrip()


def write_readme(readme_file: Path, directory: Path) -> bool:
    """Update the main README's section from the stored MariaDB results; return whether the file has changed.

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
