"""Compressed values in PD: damaged values and decompression bombs are reported as unusable."""

from __future__ import annotations

import zlib

import pytest

from controlplane.model.intents import Intents
from controlplane.storage import etcd_store
from controlplane.storage.file_formats import INTENTS_CODEC
from controlplane.storage.versioned_codec import DecodeError

COMPRESSED = zlib.compress(INTENTS_CODEC.encode(Intents()))


async def test_compressed_value_is_read() -> None:
    assert await etcd_store._decode(INTENTS_CODEC, COMPRESSED) == Intents()


@pytest.mark.parametrize("raw", [COMPRESSED[:-1], COMPRESSED[:9], b"x" + COMPRESSED, b""])
async def test_damaged_value_is_unusable(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        await etcd_store._decode(INTENTS_CODEC, raw)


async def test_size_of_a_decompressed_value_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "_MAX_DECOMPRESSED_BYTES", 50, raising=False)
    with pytest.raises(DecodeError):
        await etcd_store._decode(INTENTS_CODEC, COMPRESSED)
