"""Records what each client and MariaDB say to each other, for tests that replay it:
`python -m tests.support.clients.record [CLIENT ...]` writes `filters/wire/corpus/<client>.bin`.

Between client and server stands a TCP proxy that notes each chunk as it came from a socket, so the order of
both directions and the places where the network split them are real. Each step is a run of its own, plain,
with little data, and may have several conversations. The format is described in the corpus' README.
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

from tests.support.clients.client_builds import CLIENTS, ROOT, Client
from tests.support.clients.runner import SMALL, Target, run
from tests.support.clients.server import MatrixMariaDb
from tests.support.clients.steps import STEPS

CORPUS = ROOT / "filters" / "wire" / "corpus"
_HEAD = struct.Struct("<BI")
_CHUNK = 64 * 1024  # bytes
_LEFT_OUT = "cut"  # reads a big result


class Kind(IntEnum):
    """What a record is."""

    BEGIN = 0
    TO_SERVER = 1
    TO_CLIENT = 2
    CLIENT_CLOSED = 3
    SERVER_CLOSED = 4


@dataclass(slots=True)
class Conversation:
    """One TCP connection: the step it belongs to, and chunks and ends in their order."""

    step: str
    records: list[tuple[Kind, bytes]] = field(default_factory=list)

    def sent(self, kind: Kind) -> bytes:
        """All bytes of one direction."""
        return b"".join(data for this, data in self.records if this is kind)


def write(conversations: Iterable[Conversation]) -> bytes:
    """A corpus file."""
    parts = []
    for conversation in conversations:
        for kind, data in [(Kind.BEGIN, conversation.step.encode()), *conversation.records]:
            parts += [_HEAD.pack(kind, len(data)), data]
    return b"".join(parts)


def read(file: bytes) -> Iterator[Conversation]:
    """The conversations of a corpus file. ValueError or struct.error when it is damaged."""
    conversation = None
    at = 0
    while at < len(file):
        number, length = _HEAD.unpack_from(file, at)
        kind, at = Kind(number), at + _HEAD.size
        data, at = file[at : at + length], at + length
        if at > len(file):
            raise ValueError("the file ends in the middle of a record")
        if kind is Kind.BEGIN:
            if conversation is not None:
                yield conversation
            conversation = Conversation(data.decode())
        elif conversation is None:
            raise ValueError("the file begins in the middle of a conversation")
        else:
            conversation.records.append((kind, data))
    if conversation is not None:
        yield conversation


class Recorder:
    """The proxy. `step` is what new conversations are noted under."""

    def __init__(self, server_port: int) -> None:
        self.step = ""
        self.conversations: list[Conversation] = []
        self._server_port = server_port
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Its port, for as long as the block lasts."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def quiet(self) -> None:
        """Wait until all conversations have ended."""
        while self._open:
            await asyncio.wait(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        conversation = Conversation(self.step)
        self.conversations.append(conversation)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        both = (
            _pump(reader, to_server, conversation, Kind.TO_SERVER, Kind.CLIENT_CLOSED),
            _pump(from_server, writer, conversation, Kind.TO_CLIENT, Kind.SERVER_CLOSED),
        )
        await asyncio.gather(*both)
        for end in (to_server, writer):
            end.close()


async def _pump(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    conversation: Conversation,
    kind: Kind,
    closed: Kind,
) -> None:
    """Pass on one direction to its end; whichever end closes first closes the other."""
    try:
        while chunk := await source.read(_CHUNK):
            conversation.records.append((kind, chunk))
            target.write(chunk)
            await target.drain()
    except ConnectionError:
        pass  # an end like any other
    conversation.records.append((closed, b""))
    target.close()


async def record(client: Client, mariadb: MatrixMariaDb, directory: Path) -> list[Conversation]:
    """All conversations of one client. AssertionError when a step failed."""
    recorder = Recorder(mariadb.port)
    async with recorder.listening() as port:
        for step in STEPS:
            if step == _LEFT_OUT:
                continue
            recorder.step = step
            (outcome,) = await run(client, Target("the recorder", port), directory, size=SMALL, steps=[step])
            await recorder.quiet()
            assert outcome.ok is not False, f"{client.name}, {step}: {outcome.detail}"
    return recorder.conversations


def file_of(client: Client) -> Path:
    """Where a client's conversations are kept."""
    return CORPUS / (re.sub(r"[^a-z0-9]+", "-", client.name.lower()).strip("-") + ".bin")


async def _main(names: list[str]) -> None:
    CORPUS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tidevoy-record-") as name:
        async with MatrixMariaDb.start(Path(name) / "mariadb") as mariadb:
            mariadb.fill()
            for client in CLIENTS:
                if names and client.name not in names:
                    continue
                conversations = await record(client, mariadb, Path(name))
                written = file_of(client).write_bytes(write(conversations))
                print(
                    f"{file_of(client).name}: {len(conversations)} conversations, {written} bytes", flush=True
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":\n")[0])
    parser.add_argument("client", nargs="*", metavar="CLIENT", help="default: all")
    asyncio.run(_main(parser.parse_args().client))
