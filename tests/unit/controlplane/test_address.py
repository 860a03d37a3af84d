"""Addresses that only this machine can reach."""

from __future__ import annotations

import pytest

from controlplane import address as addresses


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:3080", True),
        ("127.8.9.1:0", True),
        ("[::1]:3080", True),
        ("[::ffff:127.0.0.1]:3080", True),
        ("localhost:3080", True),
        ("localhost.example.org:3080", False),
        ("[::ffff:10.0.0.1]:3080", False),
        ("0.0.0.0:3080", False),
        ("[::]:3080", False),
        ("unix:/run/socket", False),
        ("", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert addresses.is_loopback(address) is expected
