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


def render_page(
    results: Iterable[tuple[str, bool]],
    releases: Sequence[str],
    programs: Mapping[str, str],
    today: date,
    differences: Iterable[tuple[str, str]],
) -> str:
    """Return the page. `results`: node id of each test, and whether it passed; `releases`: such as `v8.5.3`.

    `programs`: the other programs and their versions; `differences`: releases, and in what the fake server of
    the tests differs from them.
    """
    # A test whose teardown fails has two results.
    outcomes: dict[str, bool] = {}
    for node_id, has_passed in results:
        outcomes[node_id] = has_passed and outcomes.get(node_id, True)
    versions = ", ".join(f"{name} {version}".strip() for name, version in programs.items())
    lines = [
        f"Tested on {today.isoformat()} with {versions}. The table shows how many tests passed.",
        "",
        f"| release | {' | '.join(_COLUMNS.values())} |",
        f"|---|{'---|' * len(_COLUMNS)}",
    ]
    for release in releases:
        cells = [_count(outcomes, f"{file}.py::", f"[{release}-", f"[{release}]") for file in _COLUMNS]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    upgrades = _count(outcomes, "test_upgrade.py::", "")
    lines += ["", f"Rolling upgrade {' → '.join(releases)}, of three servers under load: {upgrades}."]
    table = [f"| {release} | {text} |" for release, text in differences]
    if table:
        lines += ["", "In these points, a release differs from the fake server of the tests:", ""]
        lines += ["| release | difference |", "|---|---|", *table]
    return _HEAD + "\n".join(lines) + "\n"


def _count(outcomes: Mapping[str, bool], file: str, *parameters: str) -> str:
    """Return how many tests of a file passed, of those with one of these texts in their ids."""
    chosen = [
        has_passed
        for node_id, has_passed in outcomes.items()
        if file in node_id and any(parameter in node_id for parameter in parameters)
    ]
    return f"{sum(chosen)} of {len(chosen)}" if chosen else "none"
