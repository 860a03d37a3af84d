"""Logins at a node that takes only so many: what the clients read, direct and through Tidevoy."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass

from tests.tidb_sim_rig import Raw

IS_SOAK = os.environ.get("TIDEVOY_SOAK") == "1"
SECONDS = 8.0 if IS_SOAK else 1.0
"""For so long clients log in one by one after the node has room again."""
BURST, ROOM = 80, 50
FULL = "1040"


@dataclass(frozen=True)
class Answers:
    """How logins ended: `ok`, or the code of the error; and every error packet that was read."""

    burst: Counter[str]
    later: Counter[str]
    packets: frozenset[bytes]


async def _log_in(host: str, port: int, packets: set[bytes]) -> tuple[Raw, str]:
    client = Raw(*await asyncio.open_connection(host, port))
    try:
        async with asyncio.timeout(15):
            header = await client.reader.readexactly(4)
            first = await client.reader.readexactly(int.from_bytes(header[:3], "little"))
            if first[0] == 0xFF:
                packets.add(header + first)
                assert await client.reader.read() == b"", "nothing may follow"
                return client, str(int.from_bytes(first[1:3], "little"))
            answer = await client.respond()
            if answer[0] == 0xFF:
                return client, str(int.from_bytes(answer[1:3], "little"))
            return client, "ok"
    except (OSError, EOFError) as error:
        return client, type(error).__name__


async def log_in_much(
    address: str, *, burst: int = BURST, at_once: int = 1, seconds: float = SECONDS, pause: float = 0.1
) -> Answers:
    """A burst of clients, `at_once` at a time; when all have come they leave; then one every `pause`."""
    host, _, port = address.rpartition(":")
    packets: set[bytes] = set()
    gate = asyncio.Semaphore(at_once)

    async def one() -> tuple[Raw, str]:
        async with gate:
            return await _log_in(host, int(port), packets)

    came = await asyncio.gather(*(one() for _ in range(burst)))
    for client, _ in came:
        client.writer.close()
    later: Counter[str] = Counter()
    for _ in range(round(seconds / pause)):
        await asyncio.sleep(pause)
        client, how = await _log_in(host, int(port), packets)
        later[how] += 1
        client.writer.close()
    return Answers(Counter(how for _, how in came), later, frozenset(packets))
