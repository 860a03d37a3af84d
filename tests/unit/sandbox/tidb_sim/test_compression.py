"""The compressed protocol: compressed packets that contain MySQL packets."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.tidb_sim.compression import Compression
from sandbox.tidb_sim.packets import BadSequence, MalformedPacket


def decompress_chunked(end: Compression, data: bytes, step: int) -> bytes:
    """Feed `data` in chunks of `step` bytes and return the decompressed content."""
    content = b""
    for at in range(0, len(data), step):
        end.feed(data[at : at + step])
        while (part := end.next_content()) is not None:
            content += part
    return content


@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from([0, 2_500_000]), st.integers(1, 100))
def test_compressed_data_round_trips_in_any_chunks(writes: list[bytes], more: int, step: int) -> None:
    sender, receiver = Compression(), Compression()
    written = [*writes, b"x" * more]
    packed = b"".join(sender.compress(data) for data in written)
    assert decompress_chunked(receiver, packed, step) == b"".join(written)
    assert (receiver.sequence, len(receiver)) == (sender.sequence, 0)


def test_packet_layout_matches_protocol() -> None:
    end = Compression()
    assert end.compress(b"x" * 50) == b"\x32\0\0\0\0\0\0" + b"x" * 50  # Too short to be compressed.
    packed = end.compress(b"x" * 51)
    assert packed[3:7] == b"\x01\x33\0\0"
    assert int.from_bytes(packed[:3], "little") == len(packed) - 7
    assert zlib.decompress(packed[7:]) == b"x" * 51
    end.sequence = 255
    end.compress(b"x")
    assert end.sequence == 0


def test_only_last_packet_of_response_is_short() -> None:
    end = Compression()
    assert end.compress(b"x" * 1000, more_follows=True) == b""
    first = end.compress(bytes(1 << 20), more_follows=True)
    assert first[3:7] == b"\0\0\0\x10"
    rest = end.compress(b"", more_follows=False)
    assert rest[3:7] == b"\x01" + (1000).to_bytes(3, "little")
    assert decompress_chunked(Compression(), first + rest, 100) == b"x" * 1000 + bytes(1 << 20)


def test_rejects_wrong_sequence_number() -> None:
    end = Compression()
    end.feed(b"\x01\0\0\x02\0\0\0x")
    with pytest.raises(BadSequence, match="invalid compressed sequence 2 != 0"):
        end.next_content()


@pytest.mark.parametrize("size", [50, 52])
def test_rejects_wrong_uncompressed_size(size: int) -> None:
    body = zlib.compress(b"x" * 51)
    end = Compression()
    end.feed(len(body).to_bytes(3, "little") + b"\0" + size.to_bytes(3, "little") + body)
    with pytest.raises(MalformedPacket, match=f"the {size} bytes"):
        end.next_content()


def test_rejects_invalid_zlib_data() -> None:
    end = Compression()
    end.feed(b"\x03\0\0\0\x09\0\0abc")
    with pytest.raises(MalformedPacket, match="cannot be decompressed"):
        end.next_content()
