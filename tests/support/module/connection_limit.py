"""Logins at a node with a session limit, directly and through Tidevoy, and their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import RawClient

RETRY_PERIOD_SECONDS = 8.0 if SOAK else 1.0
"""How long clients log in one after the other after the burst."""
_PAUSE_SECONDS = 0.1
"""Pause between two logins, so that they reach the node at different moments."""
BURST_LOGINS, CONNECTION_LIMIT = 80, 50
TOO_MANY_CONNECTIONS = "1040"


@dataclass(frozen=True)
class LoginResults:
    """Counts of results (`ok`, error code or exception), and error packets received instead of greetings."""

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
                assert await client.reader.read() == b"", "data after the error packet"
                return client, str(int.from_bytes(first[1:3], "little"))
            response = await client.send_login()
            if response[0] == 0xFF:
                return client, str(int.from_bytes(response[1:3], "little"))
            return client, "ok"
    except (OSError, EOFError) as error:
        return client, type(error).__name__


async def log_in_repeatedly(address: str, *, at_once: int = 1) -> LoginResults:
    """Log in `BURST_LOGINS` clients, `at_once` in parallel, close them, then log in one after the other."""
    host, _, port = address.rpartition(":")
    packets: set[bytes] = set()
    slots = asyncio.Semaphore(at_once)

    async def log_in() -> tuple[RawClient, str]:
        async with slots:
            return await _log_in(host, int(port), packets)

    burst = await asyncio.gather(*(log_in() for _ in range(BURST_LOGINS)))
    for client, _ in burst:
        client.writer.close()
    later: Counter[str] = Counter()
    for _ in range(round(RETRY_PERIOD_SECONDS / _PAUSE_SECONDS)):
        await asyncio.sleep(_PAUSE_SECONDS)
        client, result = await _log_in(host, int(port), packets)
        later[result] += 1
        client.writer.close()
    return LoginResults(Counter(result for _, result in burst), later, frozenset(packets))
