"""Logins at a node with a limit of sessions: what clients receive, directly and through Tidevoy."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import RawClient

RETRY_PERIOD_SECONDS = 8.0 if SOAK else 1.0
"""How long clients log in one after the other when the node has room again."""
_PAUSE_SECONDS = 0.1
"""Between two of them: at a steady pace, each meets the node in another moment."""
BURST_LOGINS, CONNECTION_LIMIT = 80, 50
TOO_MANY_CONNECTIONS = "1040"


@dataclass(frozen=True)
class LoginResults:
    """Results of logins: `ok` or the code of the error; and all error packets in place of a greeting."""

    burst: Counter[str]
    later: Counter[str]
    packets: frozenset[bytes]


async def _log_in(host: str, port: int, packets: set[bytes]) -> tuple[RawClient, str]:
    client = RawClient(*await asyncio.open_connection(host, port))
    try:
        async with asyncio.timeout(15):
            header = await client.reader.readexactly(4)
            first = await client.reader.readexactly(int.from_bytes(header[:3], "little"))
            if first[0] == 0xFF:
                packets.add(header + first)
                assert await client.reader.read() == b"", "nothing may follow"
                return client, str(int.from_bytes(first[1:3], "little"))
            answer = await client.send_login()
            if answer[0] == 0xFF:
                return client, str(int.from_bytes(answer[1:3], "little"))
            return client, "ok"
    except (OSError, EOFError) as error:
        return client, type(error).__name__


async def log_in_repeatedly(address: str, *, at_once: int = 1) -> LoginResults:
    """`BURST` clients, of which `at_once` log in in parallel; all leave; then one client after the other."""
    host, _, port = address.rpartition(":")
    packets: set[bytes] = set()
    gate = asyncio.Semaphore(at_once)

    async def one() -> tuple[RawClient, str]:
        async with gate:
            return await _log_in(host, int(port), packets)

    burst = await asyncio.gather(*(one() for _ in range(BURST_LOGINS)))
    for client, _ in burst:
        client.writer.close()
    later: Counter[str] = Counter()
    for _ in range(round(RETRY_PERIOD_SECONDS / _PAUSE_SECONDS)):
        await asyncio.sleep(_PAUSE_SECONDS)
        client, how = await _log_in(host, int(port), packets)
        later[how] += 1
        client.writer.close()
    return LoginResults(Counter(how for _, how in burst), later, frozenset(packets))
