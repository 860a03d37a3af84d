"""Well-behaved clients: each queries repeatedly, and checks every answer."""

from __future__ import annotations

import asyncio
import random
import ssl
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncmy
from asyncmy.errors import MySQLError

# Pause between two queries of one session, which leaves CPU time for the hostile clients.
_PAUSE_SECONDS = 0.05
_TIMEOUT_SECONDS = 60.0


@dataclass(slots=True)
class WellBehavedClients:
    """Results of the clients. A failed session is not restarted."""

    sessions: int
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    is_stopping: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _logged_in_count: int = 0

    def count_login(self) -> None:
        """Count a login. Set `ready` when all sessions have logged in."""
        self._logged_in_count += 1
        if self._logged_in_count == self.sessions:
            self.ready.set()


@asynccontextmanager
async def run_well_behaved_clients(
    port: int, sessions: int, *, tls: Sequence[ssl.SSLContext | None] = (None,), one_query: bool = False
) -> AsyncIterator[WellBehavedClients]:
    """Run this many sessions in parallel during the block. They use the TLS contexts in `tls` in turn.

    With `one_query`, sessions end after one query and are replaced. The block starts when this many sessions
    have logged in, or when a session has failed.
    """
    clients = WellBehavedClients(sessions)
    tasks = [
        asyncio.create_task(_run_session_loop(clients, port, number, tls[number % len(tls)], one_query))
        for number in range(sessions)
    ]
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            ready_task = asyncio.create_task(clients.ready.wait())
            await asyncio.wait([ready_task, *tasks], return_when=asyncio.FIRST_COMPLETED)
            ready_task.cancel()
        yield clients
    finally:
        clients.is_stopping = True
        await asyncio.gather(*tasks)


async def _run_session_loop(
    clients: WellBehavedClients, port: int, number: int, tls: ssl.SSLContext | None, one_query: bool
) -> None:
    rng = random.Random(number)
    first = True
    while not clients.is_stopping:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                connection = await asyncmy.connect(
                    host="127.0.0.1", port=port, user="root", ssl=tls, connect_timeout=_TIMEOUT_SECONDS
                )
            try:
                if first:
                    clients.count_login()
                    first = False
                await _query_repeatedly(clients, connection, rng, one_query)
            finally:
                connection.close()
        except (MySQLError, OSError, _WrongAnswer) as failure:  # TimeoutError is an OSError too.
            clients.failures.append(f"{type(failure).__name__}: {failure}")
            return
        await asyncio.sleep(_PAUSE_SECONDS)


class _WrongAnswer(Exception):
    """An answer that does not match its query."""


async def _query_repeatedly(
    clients: WellBehavedClients, connection: asyncmy.Connection, rng: random.Random, one_query: bool
) -> None:
    """Query until the clients stop, or only once with `one_query`. Each answer identifies the session."""
    session_value = rng.randbytes(8).hex()
    async with connection.cursor() as cursor:
        await cursor.execute("set @mine = %s", (session_value,))
        while not clients.is_stopping:
            text = rng.randbytes(rng.choice((4, 100, 4000, 40_000))).hex()
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await cursor.execute("select @mine, %s, crc32(%s)", (text, text))
                answer = await cursor.fetchone()
            if answer != (session_value, text, zlib.crc32(text.encode())):
                raise _WrongAnswer(
                    f"session {session_value} asked for {text[:20]}... and got {str(answer)[:60]}..."
                )
            clients.answers += 1
            if one_query:
                return
            await asyncio.sleep(_PAUSE_SECONDS)
