"""The table of the side-by-side benchmark in README.md, between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.differences import (
    NONE,
    Table,
    compared,
    figure,
    in_words,
    number,
    one_of_each_workload,
    peer_named,
)
from bench.peers import TIDEVOY

BEGIN = "<!-- side by side: made by `tidevoy bench side_by_side`; do not edit -->"
END = "<!-- end of side by side -->"
_WIDTH = 116  # of a line of text


def text(document: Mapping[str, Any] | None) -> str:
    """What stands between the comments; empty without a document."""
    tables = one_of_each_workload(document["tables"]) if document else []
    if not document or not tables:
        return ""
    machine, reference = document["machine"], tables[0]["reference"]
    names = dict.fromkeys(
        peer["name"] for table in tables for peer in compared(table) if figure(peer, "cpu_us") is not None
    )
    heads = [
        "workload",
        "clients",
        f"{reference}, µs",
        *names,
        f"p95, {TIDEVOY}",
        f"queries/s, {TIDEVOY}",
    ]
    about = (
        f"CPU of the proxy per query: that of {reference}, and the ratio of the others to it, pair by pair"
        f" in the same rounds. Then the ratios of {TIDEVOY}'s 95th percentile and of its queries per"
        f" second. *{NONE}*: no more than {reference} differs from itself. Of each workload the run with"
        f" the fewest workers and the most clients; everything on one machine with {machine['cores']} cores"
        f" ({machine['cpu']}). How it was measured, the other runs, and what was missed:"
        " [bench/results/side-by-side.md](bench/results/side-by-side.md)."
    )
    lines = [
        "## Beside other proxies",
        "",
        fill(about, _WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join(_cells(table, names))} |" for table in tables),
    ]
    return "\n".join(lines)


def filled(readme: str, document: Mapping[str, Any] | None) -> str:
    """README.md with what the document gives. ValueError when it has not both comments, in this order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no place for the table; give it these two lines: {BEGIN} {END}")
    between = text(document)
    return f"{before}{BEGIN}\n\n{between}\n\n{END}{after}" if between else f"{before}{BEGIN}\n{END}{after}"


def keep(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the table into README.md when `directory` is the one of our own checkout; what was written.

    ValueError when README.md has no place for it.
    """
    results = Path(__file__).with_name("results")
    readme = results.parents[1] / "README.md"
    if directory.resolve() != results.resolve() or not readme.exists():
        return []
    readme.write_text(filled(readme.read_text(encoding="utf-8"), document), encoding="utf-8")
    return [readme]


def _cells(table: Table, names: Iterable[str]) -> Iterator[str]:
    yield table["workload"]
    yield f"{table['threads']:,}"
    reference = peer_named(table, table["reference"])
    cost = figure(reference, "cpu_us") if reference is not None else None
    yield "-" if cost is None else number(cost.median, "cpu_us")
    for name in names:
        yield in_words(table, peer_named(table, name), "cpu_us")
    for key in ("p95_ms", "qps"):
        yield in_words(table, peer_named(table, TIDEVOY), key)
