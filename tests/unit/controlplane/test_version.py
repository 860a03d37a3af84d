"""Parsing of the TiDB release in the version text of a server."""

from __future__ import annotations

import pytest

from controlplane.version import parse_release


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("v8.5.3", "v8.5.3"),
        ("8.0.11-TiDB-v8.5.3", "v8.5.3"),
        ("8.0.11-TiDB-v8.5.3-alpha-12-gabc", "v8.5.3"),
        ("5.7.25-TiDB-v6.10.0-serverless", "v6.10.0"),
        ("8.0.11", ""),  # a MySQL version, to which `server-version` may be set
        ("8.5.3", ""),
        ("TiDB-v8.5", ""),
        ("5.5.5-10.11.6-MariaDB", ""),
        ("xv8.5.3", ""),
        ("v8.5.3" + "9" * 40, ""),
        ("", ""),
    ],
)
def test_parses_release_of_version_text(text: str, release: str) -> None:
    assert parse_release(text) == release
