"""The importer knows every keyword of HAProxy, and its YAML loads for any of them with any value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.importers.haproxy.conversion import import_haproxy
from cli.importers.haproxy.keys import GLOBAL_RULES, PROXY_RULES, find_rule
from cli.importers.haproxy.options import BIND_RULES, SERVER_RULES
from cli.importers.haproxy.parser import SECTION_KINDS
from controlplane.errors import ConfigError
from tests.support.haproxy_keywords import BIND_OPTIONS, GLOBAL_KEYWORDS, PROXY_KEYWORDS, SERVER_OPTIONS
from tests.support.imports import load_settings


@pytest.mark.parametrize("keyword", GLOBAL_KEYWORDS)
def test_knows_every_keyword_of_global(keyword: str) -> None:
    assert find_rule(GLOBAL_RULES, (keyword,))[1] is not None


@pytest.mark.parametrize("keyword", PROXY_KEYWORDS)
def test_knows_every_keyword_of_proxies(keyword: str) -> None:
    assert find_rule(PROXY_RULES, tuple(keyword.split()))[1] is not None


def test_knows_every_option() -> None:
    assert set(BIND_OPTIONS) <= set(BIND_RULES)
    assert set(SERVER_OPTIONS) <= set(SERVER_RULES)


def test_knows_every_kind_of_section() -> None:
    """The sections that HAProxy 3.5 registers in its source (`REGISTER_CONFIG_SECTION`)."""
    assert set(SECTION_KINDS) >= {
        *("listen", "frontend", "backend", "defaults", "global", "userlist", "mailers", "namespace_list"),
        *("traces", "acme", "cache", "peers", "fcgi-app", "http-errors", "log-forward", "log-profile"),
        *("resolvers", "ring", "crt-store", "healthcheck"),
    }


_VALUES = st.sampled_from(
    [
        *("", "0", "1", "10", "256", "99999", "2s", "5000", "30000s", "1d", "-1", "abc", "10.0.0.1:4000"),
        *("/x.pem", "x.pem", "required", "none", "optional", "TLSv1.2", "TLSv1.0", ":3306", "[::1]:6000"),
        *("unix@/x", "a:+5", "10.0.0.1", "user", "connection", "expect-proxy", "layer4", "if", "{", "src"),
        *("10.0.0.0/8", "}", "connect", "port", "10080", "leastconn", "source", "sessions", "tcp", "http"),
        *('"${A}"', "a\\ b", "\u2028", "\x07", "é"),
    ]
)


def _statements(rules: Any) -> st.SearchStrategy[str]:
    keywords = st.sampled_from([key.rstrip("*") or "x" for key in rules])
    prefixes = st.sampled_from(["", "", "", "no ", "default "])
    return st.builds(
        lambda prefix, keyword, values: f" {prefix}{keyword} {' '.join(values)}",
        prefixes,
        keywords,
        st.lists(_VALUES, max_size=4),
    )


def _options(rules: Any) -> st.SearchStrategy[str]:
    option = st.builds(lambda name, value: f"{name} {value}", st.sampled_from(list(rules)), _VALUES)
    return st.lists(option, max_size=6).map(" ".join)


_LINES = st.one_of(
    _statements(PROXY_RULES),
    st.builds(lambda address, options: f" bind {address} {options}", _VALUES, _options(BIND_RULES)),
    st.builds(lambda address, options: f" server b {address} {options}", _VALUES, _options(SERVER_RULES)),
    _options(SERVER_RULES).map(lambda options: f" default-server {options}"),
)


@given(
    st.lists(_statements(GLOBAL_RULES), max_size=4),
    st.lists(_statements(PROXY_RULES), max_size=4),
    st.lists(_LINES, max_size=10),
)
def test_yaml_always_loads(globals_: list[str], defaults: list[str], lines: list[str]) -> None:
    text = "\n".join(
        (
            *("global", *globals_, "defaults", " mode tcp", *defaults, "listen tidb", " bind :3306"),
            *(*lines, " server z 10.0.0.9:4000 check"),
        )
    )
    try:
        result = import_haproxy(text, "haproxy.cfg", {"A": "x"})
    except ConfigError:
        return
    load_settings(result)
