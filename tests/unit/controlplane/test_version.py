"""Which release a server's texts name."""

from __future__ import annotations

import pytest

from controlplane.release import parse_release


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("v8.5.3", "v8.5.3"),
        ("8.0.11-TiDB-v8.5.3", "v8.5.3"),
        ("8.0.11-TiDB-v8.5.3-alpha-12-gabc", "v8.5.3"),
        ("5.7.25-TiDB-v6.10.0-serverless", "v6.10.0"),
        ("8.0.11", ""),  # MySQL's, by `server-version`
        ("8.5.3", ""),
        ("TiDB-v8.5", ""),
        ("5.5.5-10.11.6-MariaDB", ""),
        ("xv8.5.3", ""),
        ("v8.5.3" + "9" * 40, ""),
        ("", ""),
    ],
)
def test_a_release_is_found_where_there_is_one(text: str, named: str) -> None:
    assert parse_release(text) == named
