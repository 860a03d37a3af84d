"""Logins at a steady rate. The clients disconnect at every stage of the handshake, by FIN or by RST."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from sandbox.tidb_sim.packets import frame
from tests.support.load.always_ok_node import AUTH_SWITCH_USER
from tests.support.load.client_packets import QUIT, SSL_REQUEST, login, query

_MAX_PARALLEL_ATTEMPTS = 500
# An attempt is one client's connection. A longer attempt counts as a failure.
_ATTEMPT_TIMEOUT_SECONDS = 60.0
_LINGER_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 s


class LoginStage(StrEnum):
    """The stage of the login at which a client disconnects."""

    ACCEPTED = "at once"
    CONNECTING = "before the greeting"
    GREETING = "within the greeting"
    HALF_RESPONSE = "within the HandshakeResponse"
    SSL_REQUEST = "after the SSLRequest"
    HALF_HELLO = "within the ClientHello"
    HELLO = "after the first bytes of the ServerHello"
    TLS = "after the TLS handshake"
    RESPONSE = "after the HandshakeResponse"
    SWITCH = "at the AuthSwitchRequest"
    SWITCHED = "after the AuthSwitchResponse"
    OK = "after OK"
    TLS_OK = "after OK, with TLS"
    QUERY = "with a query unanswered"
    ANSWERED = "after a query"
    QUIT = "with COM_QUIT"


TLS_STAGES = frozenset(
    {LoginStage.SSL_REQUEST, LoginStage.HALF_HELLO, LoginStage.HELLO, LoginStage.TLS, LoginStage.TLS_OK}
)
# Stages after a full TLS handshake are expensive, so they are chosen less often.
_EXPENSIVE_STAGES = frozenset({LoginStage.TLS, LoginStage.TLS_OK})
_WEIGHTED_EXITS = [
    (stage, reset)
    for stage, reset in product(LoginStage, (False, True))
    for _ in range(1 if stage in _EXPENSIVE_STAGES else 3)
]


@dataclass(slots=True)
class StormResult:
    rate: float = 0.0
    seconds: float = 0.0
    completed: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


class _ClosedByProxy(Exception):
    """The proxy closed the connection before the client disconnected."""


class _LoginAttempt:
    """One client, on a raw socket."""

    def __init__(self, tls: ssl.SSLContext, rng: random.Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._wait = rng.random() * 0.01
        self.socket = socket.socket()
        self.socket.setblocking(False)
        # Every loopback address has its own ephemeral ports.
        self.socket.bind((f"127.0.0.{rng.randrange(2, 10)}", 0))
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl_object: ssl.SSLObject | None = None

    async def advance_to(self, stage: LoginStage, port: int) -> None:
        """Log in up to `stage`."""
        await self._loop.sock_connect(self.socket, ("127.0.0.1", port))
        match stage:
            case LoginStage.ACCEPTED:
                return
            case LoginStage.CONNECTING:
                await asyncio.sleep(self._wait)
                return
            case LoginStage.GREETING:
                await self._receive(7)
                return
        await self._receive()
        if stage in TLS_STAGES:
            await self._with_tls(stage)
        elif stage in {LoginStage.SWITCH, LoginStage.SWITCHED}:
            await self._send(login(AUTH_SWITCH_USER))
            await self._receive()
            if stage is LoginStage.SWITCHED:
                await self._send(frame(3, b""))
        else:
            await self._plain(stage)

    async def _plain(self, stage: LoginStage) -> None:
        response = login("root")
        await self._send(response[:20] if stage is LoginStage.HALF_RESPONSE else response)
        if stage in {LoginStage.HALF_RESPONSE, LoginStage.RESPONSE}:
            return
        await self._receive()
        if stage is LoginStage.OK:
            return
        if stage is LoginStage.QUIT:
            await self._send(QUIT)
            return
        await self._send(query("select 1"))
        if stage is LoginStage.ANSWERED:
            await self._receive()

    async def _with_tls(self, stage: LoginStage) -> None:
        if stage is LoginStage.SSL_REQUEST:
            await self._send(SSL_REQUEST)
            return
        tls_object = self._ssl_object = self._tls.wrap_bio(self._incoming, self._outgoing)
        self._try_handshake()
        hello = self._outgoing.read()
        if stage is LoginStage.HALF_HELLO:
            await self._send(SSL_REQUEST + hello[: len(hello) // 2])
            return
        await self._send(SSL_REQUEST + hello)
        if stage is LoginStage.HELLO:
            await self._receive(7)
            return
        while True:
            self._incoming.write(await self._receive())
            if self._try_handshake():
                break
        await self._send(self._outgoing.read())
        if stage is LoginStage.TLS:
            return
        tls_object.write(login("root", tls=True))
        await self._send(self._outgoing.read())
        while True:
            try:
                tls_object.read(4096)
                return
            except ssl.SSLWantReadError:
                self._incoming.write(await self._receive())

    def _try_handshake(self) -> bool:
        assert self._ssl_object is not None
        try:
            self._ssl_object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def _receive(self, max_bytes: int = 4096) -> bytes:
        data = await self._loop.sock_recv(self.socket, max_bytes)
        if not data:
            raise _ClosedByProxy
        return data

    async def disconnect(self, *, reset: bool) -> None:
        """Send FIN and wait until the proxy closes. With `reset`, only make a later close() send RST."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            return
        self.socket.shutdown(socket.SHUT_WR)
        while await self._loop.sock_recv(self.socket, 4096):
            pass


async def login_storm(port: int, *, rate: float, count: int, seed: int) -> StormResult:
    """Run `count` attempts at `rate` per second, or more slowly if this machine is too slow."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    rng = random.Random(seed)
    storm = StormResult()
    slots = asyncio.Semaphore(_MAX_PARALLEL_ATTEMPTS)

    async def run_attempt(stage: LoginStage, reset: bool) -> None:
        label = f"{stage} ({'RST' if reset else 'FIN'})"
        attempt = _LoginAttempt(tls, rng)
        try:
            async with asyncio.timeout(_ATTEMPT_TIMEOUT_SECONDS):
                await attempt.advance_to(stage, port)
                await attempt.disconnect(reset=reset)
            storm.completed[label] += 1
        except (_ClosedByProxy, OSError) as error:  # TimeoutError is an OSError too.
            storm.failures[f"{label}: {type(error).__name__} {error}"] += 1
        finally:
            attempt.socket.close()
            slots.release()

    started_at = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            delay = started_at + number / rate - time.monotonic()
            if delay > 0.001:
                await asyncio.sleep(delay)
            await slots.acquire()
            tasks.create_task(run_attempt(*rng.choice(_WEIGHTED_EXITS)))
        storm.seconds = time.monotonic() - started_at
    storm.rate = count / storm.seconds
    return storm
