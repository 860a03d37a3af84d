"""The page docs/reference/tidb-releases.md, made from the results of the tests in tests/tidb/releases."""

from __future__ import annotations

from collections import Counter
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
    "test_newer_release": "migration to newer releases, none to older ones",
}
"""The columns of the table: headings by test file."""


def render_page(
    results: Iterable[tuple[str, str]],
    releases: Sequence[str],
    programs: Mapping[str, str],
    today: date,
    differences: Iterable[tuple[str, str]],
) -> str:
    """Return the page. `results`: node id and outcome of each test, of all releases (`v8.5.3`).

    `programs`: the other programs and their versions; `differences`: releases, and in what the fake server of
    the tests differs from them.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    upgrade = "not tested"
    for node_id, outcome in results:
        file = node_id.partition("::")[0].rpartition("/")[2].removesuffix(".py")
        if file == "test_upgrade":
            upgrade = outcome
        for release in releases:
            if f"[{release}" in node_id:
                counts[file, release, outcome] += 1
    versions = ", ".join(f"{name} {version}" for name, version in programs.items())
    lines = [
        f"Tested on {today.isoformat()} with {versions}:",
        "",
        f"| release | {' | '.join(_COLUMNS.values())} |",
        f"|---|{'---|' * len(_COLUMNS)}",
    ]
    for release in releases:
        cells = [_describe(file, release, counts) for file in _COLUMNS]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    path = " → ".join(releases)
    lines += ["", f"Rolling upgrade {path}, of three servers under load: {upgrade}."]
    table = [f"| {release} | {text} |" for release, text in differences]
    if table:
        lines += ["", "In these points, a release differs from the fake server of the tests:", ""]
        lines += ["| release | difference |", "|---|---|", *table]
    return _HEAD + "\n".join(lines) + "\n"


def _describe(file: str, release: str, counts: Mapping[tuple[str, str, str], int]) -> str:
    passed, failed = (counts.get((file, release, outcome), 0) for outcome in ("passed", "failed"))
    if not passed + failed:
        return "not tested"
    return f"{passed} of {passed + failed} tests passed"
