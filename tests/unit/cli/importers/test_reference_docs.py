"""The pages on the migration: they are up to date, and name only settings and pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.importers import reference_docs
from cli.importers.haproxy import keys as haproxy_keys
from cli.importers.haproxy import options as haproxy_options
from cli.importers.key_rules import KeyRule
from cli.importers.report import Outcome
from cli.importers.tiproxy import defaults as tiproxy_defaults
from cli.importers.tiproxy import keys as tiproxy_keys
from controlplane.config import schema
from controlplane.config.settings import Settings

ROOT = Path(__file__).resolve().parents[4]
PAGES = (reference_docs.TIPROXY_PAGE, reference_docs.HAPROXY_PAGE)
RULES: tuple[KeyRule, ...] = (
    *(rule for rules in tiproxy_keys.SECTIONS.values() for rule in rules),
    *(*haproxy_keys.GLOBAL_TABLE, *haproxy_keys.PROXY_TABLE),
    *(*haproxy_options.BIND_TABLE, *haproxy_options.SERVER_TABLE),
)
DIFFERENCES = (*tiproxy_defaults.DIFFERENCES, *haproxy_keys.DIFFERENCES)


def is_setting(name: str) -> bool:
    return schema.find_field(Settings, tuple(name.split("."))) is not None


def test_pages_are_up_to_date() -> None:
    command = "run python -m cli.importers.reference_docs"
    tiproxy, haproxy = ((ROOT / page).read_text() for page in PAGES)
    assert tiproxy == reference_docs.render_tiproxy(tiproxy), command
    assert haproxy == reference_docs.render_haproxy(haproxy), command


def test_pages_contain_every_key() -> None:
    tiproxy, haproxy = ((ROOT / page).read_text() for page in PAGES)
    for key in tiproxy_keys.RULES:
        assert f"`{key}`" in tiproxy
    for key in (*haproxy_keys.GLOBAL_RULES, *haproxy_keys.PROXY_RULES):
        assert f"`{key}`" in haproxy


def test_rules_name_existing_settings() -> None:
    for rule in RULES:
        for name in filter(None, rule.setting.split(", ")):
            assert is_setting(name) or name == "tidevoy bootstrap --zone", rule.keys
        assert rule.setting or rule.outcome is not Outcome.MAPPED, rule.keys
        assert rule.note or rule.outcome is Outcome.MAPPED, rule.keys
    for difference in DIFFERENCES:
        for name in filter(None, difference.setting.split(", ")):
            assert is_setting(name), difference.key


def test_notes_name_existing_settings() -> None:
    sections = "|".join(Settings.model_fields)
    foreign = {"balance.routing-rule", "balance.label-name", "security.cluster-tls"}  # of TiProxy
    notes = [rule.note for rule in RULES] + [difference.note for difference in DIFFERENCES]
    names = {name for note in notes for name in re.findall(rf"`((?:{sections})\.[\w.-]+)", note)}
    assert len(names) > 20
    for name in names:
        assert is_setting(name) or name in foreign or name == "balance.routing-policy", name


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_existing_places(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([\w-]+))?\)", (ROOT / page).read_text())
    assert links
    for path, anchor in links:
        target = (ROOT / page.parent / path).resolve()
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{path}#{anchor}"


def test_the_index_lists_the_pages() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        assert f"({page.relative_to('docs')})" in index
