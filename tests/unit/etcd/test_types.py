"""Decoding of keys, and the end of the key range of a prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.etcd.types import decode_key, prefix_end


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/topology/tidb/", b"/topology/tidb0"), (b"a\xff", b"b"), (b"a\xff\xff", b"b"), (b"\x00", b"\x01")],
)
def test_prefix_end(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


@given(st.binary(min_size=1).filter(lambda prefix: prefix.strip(b"\xff")), st.binary())
def test_prefix_end_follows_all_keys_with_prefix(prefix: bytes, other: bytes) -> None:
    assert prefix <= prefix + other < prefix_end(prefix)
    assert other.startswith(prefix) == (prefix <= other < prefix_end(prefix))


@given(st.text())
def test_text_keys_round_trip(key: str) -> None:
    assert decode_key(key.encode()) == key


def test_invalid_utf8_keys_stay_readable() -> None:
    assert decode_key(b"/topology/tidb/\xff\xfe:4000/info") == "/topology/tidb/\\xff\\xfe:4000/info"
