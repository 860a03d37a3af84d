"""The recorded conversations that the Rust tests replay: complete, small, with all clients and steps."""

from __future__ import annotations

import pytest

from tests.support.clients.client_builds import CLIENTS, MatrixClient
from tests.support.clients.record import (
    CORPUS,
    RecordedConversation,
    RecordKind,
    corpus_file,
    decode_corpus,
    encode_corpus,
)
from tests.support.clients.steps import STEPS


def test_corpus_round_trips() -> None:
    conversations = [
        RecordedConversation(
            "login",
            [(RecordKind.TO_CLIENT, b"hello"), (RecordKind.TO_SERVER, b""), (RecordKind.CLIENT_CLOSED, b"")],
        ),
        RecordedConversation("ping"),
    ]
    assert list(decode_corpus(encode_corpus(conversations))) == conversations
    with pytest.raises(ValueError, match="middle of a record"):
        list(decode_corpus(encode_corpus(conversations)[:-1]))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_corpus_of_client_is_complete(client: MatrixClient) -> None:
    conversations = list(decode_corpus(corpus_file(client).read_bytes()))
    assert {conversation.step for conversation in conversations} >= set(STEPS) - client.unsupported_steps - {
        "cut"
    }
    for conversation in conversations:
        assert conversation.bytes_of(RecordKind.TO_CLIENT)[4] == 10  # The greeting's protocol version.
        assert conversation.bytes_of(RecordKind.TO_SERVER)[3] == 1  # The login's sequence number.


def test_corpus_is_small() -> None:
    assert sum(file.stat().st_size for file in CORPUS.iterdir()) < len(CLIENTS) * 80_000
