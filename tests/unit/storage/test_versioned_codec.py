"""The encoding is deterministic, and malformed data raises DecodeError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.storage.versioned_codec import DecodeError, VersionedCodec

Leaf = str | float | int | bool | None


@dataclass(frozen=True, slots=True)
class _Value:
    """Has more levels of mappings than `_CHUNK_DEPTH`, so the codec joins only the outer levels itself."""

    values: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Leaf]]]]


CODEC = VersionedCodec("thing", 1, _Value)

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values: st.SearchStrategy[object] = leaves
for _ in range(4):
    values = st.dictionaries(st.text(max_size=5), values, max_size=3)


@given(values)
def test_content_is_json_with_sorted_keys(
    value: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Leaf]]]],
) -> None:
    raw = CODEC.encode(_Value(value))
    sorted_json = json.dumps({"values": value}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert raw.endswith(b', "content": ' + sorted_json.encode("utf-8", "replace") + b"}\n")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_rejects_nan_and_infinity(number: str) -> None:
    raw = f'{{"tidevoy": "thing", "version": 1, "sha256": "", "content": {{"values": {number}}}}}'
    with pytest.raises(DecodeError, match="checksum"):
        CODEC.decode(raw.encode())
