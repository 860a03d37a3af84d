"""The page of the side-by-side benchmark; `python -m bench.side_by_side_page` makes it and charts anew."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import charts, readme_table
from bench.comparison import HEADS, SUITE
from bench.differences import NONE, Peer, Table, chance, counts, figure, number, present, ratio, title
from bench.report import condition_sentence
from bench.targets import told
from controlplane.errors import TidevoyError

_CELLS = (
    "A cell has the median of the rounds and, in brackets, the least and the most. CPU, user and system"
    " are those of the proxy per query, in µs; the machine's are those of everything that ran. The second"
    " table of each workload has the ratios of the peers to {reference} within the same round. What"
    " {reference} differs by from itself, at most, is the A/A spread; a difference that is not greater is"
    f" shown as *{NONE}*."
)
_VERDICTS = ("missed", "undecided", "met")


class NoDocument(TidevoyError):
    """There is no kept document of the side-by-side benchmark."""


def as_markdown(document: Mapping[str, Any]) -> str:
    """The page that is made of a document, so that the page can say nothing else."""
    machine, tables = document["machine"], document["tables"]
    references = dict.fromkeys(table["reference"] for table in tables)
    paragraphs = [
        "# Benchmark: side by side",
        f"Made by `tidevoy bench side_by_side` from `{SUITE}.json`; do not edit.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_mib']} MiB of memory, "
        f"{machine['kernel']}.",
        document.get("method", ""),
        *(_CELLS.format(reference=name) for name in references),
        "## Targets",
        "\n".join(_targets(tables)) or "None was set.",
    ]
    if drawn := charts.draw(document):
        paragraphs += ["## Charts", *(f"![{chart.title}]({chart.file})" for chart in drawn)]
    for table in tables:
        paragraphs += [f"## {title(table)}", *_section(table)]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def keep(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write what is made of the document that `directory` keeps, and what was written.

    That is the page, the charts, and in a checkout the table of README.md. Charts of an earlier document are
    removed. ValueError when README.md has no place for the table.
    """
    page = directory / f"{SUITE}.md"
    page.write_text(as_markdown(document), encoding="utf-8")
    return [page, *charts.keep(document, directory), *readme_table.keep(document, directory)]


def kept(directory: Path) -> dict[str, Any] | None:
    """The document that `directory` keeps; None when there is none."""
    data = directory / f"{SUITE}.json"
    if not data.exists():
        return None
    document: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return document


def _targets(tables: Sequence[Table]) -> list[str]:
    """What was missed comes first."""
    judged = [(table, target) for table in tables for target in table["targets"]]
    judged.sort(key=lambda each: _VERDICTS.index(each[1]["verdict"]))
    return [f"* {title(table)}: {_told(target, table)}" for table, target in judged]


def _told(target: Mapping[str, Any], table: Table) -> str:
    return told(target, HEADS[target["figure"]], table["reference"])


def _section(table: Table) -> Iterator[str]:
    peers, reference = table["peers"], table["reference"]
    yield f"{table['method']} {table['rounds']} rounds, with runs of {table['seconds']:g} s."
    yield condition_sentence(table["condition"])
    shown = present(peers, "figures")
    yield _grid(
        ["peer", *(head for _, head in shown)],
        ([_named(peer), *(_figure_cell(peer, name) for name, _ in shown)] for peer in peers),
    )
    shown = present(peers, "ratios")
    yield _grid(
        [f"ratio to {reference}", *(head for _, head in shown)],
        [
            *(
                [peer["name"], *(_ratio_cell(table, peer, name) for name, _ in shown)]
                for peer in peers
                if peer["name"] != reference
            ),
            ["A/A spread", *(_chance_cell(table, name) for name, _ in shown)],
        ],
    )
    yield "\n".join(f"* {_told(target, table)}" for target in table["targets"])


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = f"|---|{'---:|' * (len(heads) - 1)}"
    return "\n".join([f"| {' | '.join(heads)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)])


def _named(peer: Peer) -> str:
    return " ".join(filter(None, (peer["name"], peer["version"])))


def _figure_cell(peer: Peer, name: str) -> str:
    found = figure(peer, name)
    if found is None:
        return "-"
    median, low, high = (number(value, name) for value in (found.median, found.low, found.high))
    return median if low == high else f"{median} ({low} to {high})"


def _ratio_cell(table: Table, peer: Peer, name: str) -> str:
    found = ratio(peer, name)
    if found is None:
        return "-"
    spread = f"{found.low:.2f} to {found.high:.2f}"
    # The second run of the reference is the yardstick itself, and no peer that could differ.
    if peer["name"] == table["again"] or counts(table, peer, name):
        return f"{found.median:.2f} ({spread})"
    return f"{NONE} ({found.median:.2f}; {spread})"


def _chance_cell(table: Table, name: str) -> str:
    spread = chance(table, name)
    return "unknown" if math.isinf(spread) else f"± {spread:.2f}"


def main() -> None:
    """Make page, charts and README's table from the kept document. NoDocument when there is none."""
    directory = Path(__file__).with_name("results")
    document = kept(directory)
    if document is None:
        raise NoDocument(f"there is no {SUITE}.json in {directory}; make it with: tidevoy bench side_by_side")
    for path in keep(document, directory):
        print(path)


if __name__ == "__main__":
    main()
