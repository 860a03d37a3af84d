"""Records the traffic between each client and MariaDB, for tests that replay it.

`python -m tests.support.clients.record [CLIENT ...]` writes `filters/mysql-proto/corpus/<client>.bin`.

A TCP proxy between client and server records each chunk that it reads, so order and sizes of the chunks are
realistic. Each step runs alone, without TLS, with little data, and may have several conversations
(TCP connections). The corpus' README describes the format.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import struct
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from tests.support.clients.client_builds import CLIENTS, ROOT, MatrixClient
from tests.support.clients.runner import SMALL_SIZE, MatrixTarget, run_client
from tests.support.clients.server import MatrixMariaDb
from tests.support.clients.steps import STEPS

CORPUS = ROOT / "filters" / "mysql-proto" / "corpus"
_RECORD_HEAD = struct.Struct("<BI")
_CHUNK_BYTES = 64 * 1024
_SKIPPED_STEP = "cut"  # Its big result would enlarge the corpus.


class RecordKind(IntEnum):
    """The first byte of a record."""

    BEGIN = 0
    TO_SERVER = 1
    TO_CLIENT = 2
    CLIENT_CLOSED = 3
    SERVER_CLOSED = 4


@dataclass(slots=True)
class RecordedConversation:
    """One TCP connection: the step that opens it, and its chunks and ends in order."""

    step: str
    records: list[tuple[RecordKind, bytes]] = field(default_factory=list)

    def bytes_of(self, kind: RecordKind) -> bytes:
        """Return all bytes of one direction."""
        return b"".join(data for record_kind, data in self.records if record_kind is kind)


def encode_corpus(conversations: Iterable[RecordedConversation]) -> bytes:
    parts = []
    for conversation in conversations:
        for kind, data in [(RecordKind.BEGIN, conversation.step.encode()), *conversation.records]:
            parts += [_RECORD_HEAD.pack(kind, len(data)), data]
    return b"".join(parts)


def decode_corpus(file: bytes) -> Iterator[RecordedConversation]:
    """Yield the conversations of a corpus file. Raises ValueError or struct.error if it is damaged."""
    conversation = None
    at = 0
    while at < len(file):
        number, length = _RECORD_HEAD.unpack_from(file, at)
        kind, at = RecordKind(number), at + _RECORD_HEAD.size
        data, at = file[at : at + length], at + length
        if at > len(file):
            raise ValueError("the file ends in the middle of a record")
        if kind is RecordKind.BEGIN:
            if conversation is not None:
                yield conversation
            conversation = RecordedConversation(data.decode())
        elif conversation is None:
            raise ValueError("the file starts in the middle of a conversation")
        else:
            conversation.records.append((kind, data))
    if conversation is not None:
        yield conversation


class ConversationRecorder:
    """The recording proxy. Each new conversation is recorded with the current `step`."""

    def __init__(self, server_port: int) -> None:
        self.step = ""
        self.conversations: list[RecordedConversation] = []
        self._server_port = server_port
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Listen during the block; yield the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def wait_idle(self) -> None:
        """Wait until all conversations have ended."""
        while self._open:
            await asyncio.wait(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        conversation = RecordedConversation(self.step)
        self.conversations.append(conversation)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        both = (
            _pump(reader, to_server, conversation, RecordKind.TO_SERVER, RecordKind.CLIENT_CLOSED),
            _pump(from_server, writer, conversation, RecordKind.TO_CLIENT, RecordKind.SERVER_CLOSED),
        )
        await asyncio.gather(*both)
        for end in (to_server, writer):
            end.close()


async def _pump(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    conversation: RecordedConversation,
    kind: RecordKind,
    closed: RecordKind,
) -> None:
    """Forward one direction until `source` ends, then close `target`."""
    try:
        while chunk := await source.read(_CHUNK_BYTES):
            conversation.records.append((kind, chunk))
            target.write(chunk)
            await target.drain()
    except ConnectionError:
        pass  # A reset is recorded like a FIN.
    conversation.records.append((closed, b""))
    target.close()


async def record_client(
    client: MatrixClient, mariadb: MatrixMariaDb, directory: Path
) -> list[RecordedConversation]:
    """Record all conversations of one client. Raises AssertionError if a step failed."""
    recorder = ConversationRecorder(mariadb.port)
    async with recorder.listening() as port:
        for step in STEPS:
            if step == _SKIPPED_STEP:
                continue
            recorder.step = step
            (outcome,) = await run_client(
                client, MatrixTarget("the recorder", port), directory, size=SMALL_SIZE, steps=[step]
            )
            await recorder.wait_idle()
            assert outcome.is_ok is not False, f"{client.name}, {step}: {outcome.detail}"
    return recorder.conversations


def corpus_file(client: MatrixClient) -> Path:
    """Return the path of a client's corpus file."""
    return CORPUS / (re.sub(r"[^a-z0-9]+", "-", client.name.lower()).strip("-") + ".bin")


async def _main(names: list[str]) -> None:
    CORPUS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tidevoy-record-") as name:
        async with MatrixMariaDb.start(Path(name) / "mariadb") as mariadb:
            mariadb.fill()
            for client in CLIENTS:
                if names and client.name not in names:
                    continue
                conversations = await record_client(client, mariadb, Path(name))
                size = corpus_file(client).write_bytes(encode_corpus(conversations))
                print(
                    f"{corpus_file(client).name}: {len(conversations)} conversations, {size} bytes",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("client", nargs="*", metavar="CLIENT", help="default: all")
    asyncio.run(_main(parser.parse_args().client))
