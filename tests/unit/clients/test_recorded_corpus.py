"""The recorded conversations that the Rust tests replay: whole, small, and of all clients and steps."""

from __future__ import annotations

import pytest

from tests.support.clients.client_builds import CLIENTS, Client
from tests.support.clients.record import CORPUS, Conversation, Kind, file_of, read, write
from tests.support.clients.steps import STEPS


def test_what_is_written_is_read() -> None:
    conversations = [
        Conversation("login", [(Kind.TO_CLIENT, b"hello"), (Kind.TO_SERVER, b""), (Kind.CLIENT_CLOSED, b"")]),
        Conversation("ping"),
    ]
    assert list(read(write(conversations))) == conversations
    with pytest.raises(ValueError, match="middle of a record"):
        list(read(write(conversations)[:-1]))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_clients_corpus_is_complete(client: Client) -> None:
    conversations = list(read(file_of(client).read_bytes()))
    assert {conversation.step for conversation in conversations} >= set(STEPS) - client.lacks - {"cut"}
    for conversation in conversations:
        assert conversation.sent(Kind.TO_CLIENT)[4] == 10  # the greeting's protocol version
        assert conversation.sent(Kind.TO_SERVER)[3] == 1  # the login's sequence number


def test_the_corpus_is_small() -> None:
    assert sum(file.stat().st_size for file in CORPUS.iterdir()) < len(CLIENTS) * 80_000
