"""Sessions whose node is scripted by the test, to check how bytes are forwarded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.tidb_sim.packets import AUTOCOMMIT, eof, frame, single_row_result
from tests.support.module.envoy import OK_PAYLOAD, accept_login, with_timeout
from tests.support.tidb_sim_clients import RawClient

QUERY = frame(0, b"\x03select 1")

DIRECT_AFTER_STATEMENTS = 8
"""After this many statements the module, instead of Envoy, handles the connection's socket events."""


@dataclass
class ScriptedPeer:
    """A handler that accepts every login and queues the node's side of the session for the test."""

    nodes: asyncio.Queue[RawClient] = field(default_factory=asyncio.Queue)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.nodes.put_nowait(await accept_login(reader, writer))
        await self.finished.wait()


async def exchange(client: RawClient, node: RawClient, answer: bytes = frame(1, OK_PAYLOAD)) -> None:
    """Send a statement from the client and its answer from the node."""
    client.writer.write(QUERY)
    assert await with_timeout(node.reader.readexactly(len(QUERY))) == QUERY
    node.writer.write(answer)
    assert await with_timeout(client.reader.readexactly(len(answer))) == answer


def result(size: int, seed: int) -> bytes:
    """Return a text result set of about `size` bytes, in which all rows differ."""
    rng = random.Random(seed)
    head = single_row_result([("c", "")], AUTOCOMMIT, deprecate_eof=False)[:3]
    packets, sequence, length = bytearray(), 1, 0
    for payload in head:
        packets += frame(sequence, payload)
        sequence += 1
    while length < size:
        row = rng.randbytes(rng.choice((1, 40, 200, 250)))
        packets += frame(sequence & 0xFF, bytes((len(row),)) + row)
        length += len(row) + 5
        sequence += 1
    return bytes(packets + frame(sequence & 0xFF, eof(AUTOCOMMIT)))


def count_awaiting_writable(pid: int, peers: set[int]) -> int:
    """Return how many connections of a process to the ports `peers` are registered in epoll for EPOLLOUT.

    Source: `fdinfo`, `fd` and `net/tcp` (hexadecimal ports, and inodes) in /proc/PID, see proc(5).
    """
    process, watched = Path(f"/proc/{pid}"), set()
    for fdinfo in process.joinpath("fdinfo").iterdir():
        # Only descriptors of other connections can be closed while this loop runs.
        with contextlib.suppress(FileNotFoundError):
            for fields in map(str.split, fdinfo.read_text().splitlines()):
                if fields[:1] == ["tfd:"] and int(fields[3], 16) & select.EPOLLOUT:
                    with contextlib.suppress(FileNotFoundError):
                        watched.add(os.readlink(process / "fd" / fields[1]))
    sockets = [line.split() for line in process.joinpath("net/tcp").read_text().splitlines()[1:]]
    matching = {
        f"socket:[{fields[9]}]" for fields in sockets if int(fields[2].rpartition(":")[2], 16) in peers
    }
    return len(watched & matching)
