"""The page docs/reference/tidb-releases.md, made from the results of the tests in tests/tidb/releases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date

_HEAD = """# Releases of TiDB

Made by `make test-releases`; do not edit. This page shows with which releases of TiDB Tidevoy was
tested. It is for operators who choose or upgrade a release.

Session migration needs TiDB 6.4 or newer. Without migration, Tidevoy uses only MySQL's protocol, PD's
keys and TiDB's status port, so older releases work as well, but are not tested.

"""
_COLUMNS: Mapping[str, str] = {
    "test_contract": "behaviour that Tidevoy relies on",
    "test_newer_release": "sessions move to newer releases, and never to older ones",
}
"""The columns of the table: headings by test file."""
_MAX_ERROR_CHARACTERS = 160


def render_page(
    results: Iterable[tuple[str, str]],
    releases: Sequence[str],
    programs: Mapping[str, str],
    today: date,
    differences: Iterable[tuple[str, str]],
) -> str:
    """Return the page. `results`: node id of each test, and its error or nothing; `releases`: such as v8.5.3.

    `programs`: the other programs and their versions; `differences`: releases, and in what the fake server of
    the tests differs from them.
    """
    # A test whose teardown fails has two results.
    errors: dict[str, str] = {}
    for node_id, error in results:
        errors[node_id] = error or errors.get(node_id, "")
    versions = ", ".join(f"{name} {version}".strip() for name, version in programs.items())
    lines = [
        f"Tested on {today.isoformat()} with {versions}. The table shows how many tests passed.",
        "",
        f"| release | {' | '.join(_COLUMNS.values())} |",
        f"|---|{'---|' * len(_COLUMNS)}",
    ]
    for release in releases:
        cells = [_count(errors, f"{file}.py::", f"[{release}-", f"[{release}]") for file in _COLUMNS]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    upgrades = _count(errors, "test_upgrade.py::", "")
    lines += ["", f"Rolling upgrade {' → '.join(releases)}, of three servers under load: {upgrades}."]
    lines += _table(
        "In these points, a release differs from the fake server of the tests:",
        "release | difference",
        [f"{release} | {text}" for release, text in differences],
    )
    lines += _table(
        "These tests failed:",
        "test | error",
        [f"`{node_id.rpartition('/')[2]}` | {_cell(error)}" for node_id, error in errors.items() if error],
    )
    return _HEAD + "\n".join(lines) + "\n"


def _count(errors: Mapping[str, str], file: str, *parameters: str) -> str:
    """Return how many tests of a file passed, of those with one of these texts in their ids."""
    chosen = [
        error
        for node_id, error in errors.items()
        if file in node_id and any(parameter in node_id for parameter in parameters)
    ]
    return f"{chosen.count('')} of {len(chosen)}" if chosen else "none"


def _table(title: str, heading: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a table with two columns; none without rows."""
    if not rows:
        return []
    return ["", title, "", f"| {heading} |", "|---|---|", *(f"| {row} |" for row in rows)]


def _cell(text: str) -> str:
    """Return a text as Markdown code in a table's cell, cut after _MAX_ERROR_CHARACTERS."""
    cut = text[:_MAX_ERROR_CHARACTERS] + ("..." if len(text) > _MAX_ERROR_CHARACTERS else "")
    return "`" + cut.replace("|", "\\|").replace("`", "'") + "`"
