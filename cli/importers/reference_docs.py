"""Update the tables in `docs/migrate`: `python -m cli.importers.reference_docs`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from cli.importers.haproxy import keys as haproxy_keys
from cli.importers.haproxy import options as haproxy_options
from cli.importers.key_rules import KeyRule
from cli.importers.report import DefaultDifference, Outcome
from cli.importers.tiproxy import defaults as tiproxy_defaults
from cli.importers.tiproxy import keys as tiproxy_keys
from cli.importers.tiproxy import metrics as tiproxy_metrics

TIPROXY_PAGE = Path("docs/migrate/from-tiproxy.md")
HAPROXY_PAGE = Path("docs/migrate/from-haproxy.md")
_FIRST_HEADING = "## Keys\n"
_PAGE_PATH = re.compile(r"\bdocs/([\w/-]+?)([\w-]+)\.md\b")
_WIDTH = 120
_GUIDE = "../operate/observability.md"


def render_tiproxy(page: str) -> str:
    """Return the page on TiProxy with new tables below its introduction."""
    sections = [
        line
        for title, rules in tiproxy_keys.SECTIONS.items()
        for line in (f"\n### {title}\n\n", *_keys(rules))
    ]
    return "".join(
        (
            _introduction(page),
            *sections,
            "\n## Defaults that differ\n\nOf keys that the file does not set:\n\n",
            *_differences(tiproxy_defaults.DIFFERENCES, "TiProxy's default"),
            *_metrics(),
            *_alerts(),
        )
    )


def render_haproxy(page: str) -> str:
    """Return the page on HAProxy with new tables below its introduction."""
    return "".join(
        (
            _introduction(page),
            "\nA `*` stands for the rest of a keyword.\n",
            "\n### `global`\n\n",
            *_keys(haproxy_keys.GLOBAL_TABLE),
            "\n### `defaults`, `frontend`, `listen` and `backend`\n\n",
            *_keys(haproxy_keys.PROXY_TABLE),
            "\n### Options of `bind`\n\n",
            *_keys(haproxy_options.BIND_TABLE),
            "\n### Options of `server` and `default-server`\n\n",
            *_keys(haproxy_options.SERVER_TABLE),
            "\n### Other sections\n\nThey have no equivalent:\n\n",
            *_table(
                ("section", "instead"),
                ((_code(kind), note) for kind, note in haproxy_keys.SECTION_NOTES.items()),
            ),
            "\n## Defaults that differ\n\nOf keywords that the configuration does not contain:\n\n",
            *_differences(haproxy_keys.DIFFERENCES, "HAProxy's default"),
        )
    )


def _introduction(page: str) -> str:
    return f"{page.partition(_FIRST_HEADING)[0]}{_FIRST_HEADING}"


def _keys(rules: Iterable[KeyRule]) -> Iterator[str]:
    """Return a table with one row for all adjacent keys that are converted alike."""
    rows = []
    for (outcome, setting, note), group in groupby(
        rules, key=lambda each: (each.outcome, each.setting, each.note)
    ):
        keys = ", ".join(key for rule in group for key in rule.keys)
        target = _code(setting) if outcome is Outcome.MAPPED else str(outcome)
        rows.append((_code(keys), target, note))
    return _table(("key", "Tidevoy", "note"), rows)


def _differences(differences: Iterable[DefaultDifference], default: str) -> Iterator[str]:
    rows = (
        (
            each.key if each.key.startswith("(") else _code(each.key),
            each.default,
            _code(each.setting),
            each.tidevoy_default,
            each.note,
        )
        for each in differences
    )
    return _table(("key", default, "Tidevoy", "its default", "note"), rows)


def _metrics() -> Iterator[str]:
    text = (
        "[tiproxy-names.yml](../../deploy/prometheus/rules/tiproxy-names.yml) has recording rules for the"
        " metrics with *yes*: they give them the names of TiProxy, which its dashboard and alerts use."
        " `instance` is then the id of an Envoy, and `backend` the address of a node. A metric that means"
        " something else has no rule."
    )
    yield f"\n## Metrics\n\n{textwrap.fill(text, _WIDTH)}\n\n"
    rows = (
        (
            _code(each.name),
            _code(each.tidevoy, separator=", ") or "none",
            "yes" if each.has_rule else "no",
            each.remark,
        )
        for each in tiproxy_metrics.METRICS
    )
    yield from _table(("TiProxy", "Tidevoy", "recorded", "remark"), rows)


def _alerts() -> Iterator[str]:
    yield "\n## Alerts\n\n"
    rows = (
        (
            _code(each.name),
            ", ".join(f"[{alert}]({_GUIDE}#{alert.lower()})" for alert in each.tidevoy) or "none",
            each.remark,
        )
        for each in tiproxy_metrics.ALERTS
    )
    yield from _table(("TiProxy", "Tidevoy", "remark"), rows)


def _code(text: str, separator: str = ", ") -> str:
    return separator.join(f"`{part}`" for part in text.split(separator) if part)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |\n|{'---|' * len(headers)}\n"
    for row in rows:
        cells = (_PAGE_PATH.sub(_link, cell).replace("|", "&#124;") for cell in row)
        yield f"| {' | '.join(cells)} |\n"


def _link(match: re.Match[str]) -> str:
    return f"[{match[2].replace('-', ' ')}](../{match[1]}{match[2]}.md)"


if __name__ == "__main__":
    for path, render in ((TIPROXY_PAGE, render_tiproxy), (HAPROXY_PAGE, render_haproxy)):
        path.write_text(render(path.read_text()))
