"""Conversations of faulty clients: garbage, and truncated, oversized, out-of-sequence or slow packets."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sandbox.tidb_sim.packets import HEADER_SIZE, MAX_PACKET_PAYLOAD, err, frame
from tests.support.clients.record import RecordKind, decode_corpus
from tests.support.load.client_packets import QUIT, SSL_REQUEST, login, query
from tests.support.module.envoy import OK_PAYLOAD

CORPUS = Path(__file__).parents[3] / "filters" / "mysql-proto" / "corpus"
# This account must not be able to stop the server or kill sessions: a mutated command might do so.
UNPRIVILEGED_USER = "garbage"
_MAX_RECORDED_BYTES = 64 * 1024


class ConnectionEnd(Enum):
    """What a client does after sending everything."""

    FIN = "FIN"
    RST = "RST"
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class MalformedConversation:
    """The data that one client sends.

    `pause_seconds`: pause between two pieces. With `skips_greeting`, the client does not wait for the
    greeting. With `tls`, the client first does a valid TLS handshake. With `logs_in`, a valid login
    precedes `pieces`. `end` may be SILENCE only after an incomplete login: after a complete login, the
    session would stay open.
    """

    kind: str
    pieces: tuple[bytes, ...]
    end: ConnectionEnd
    pause_seconds: float = 0.0
    skips_greeting: bool = False
    tls: bool = False
    logs_in: bool = False


ConversationFactory = Callable[[random.Random], MalformedConversation]


def _recorded_conversations() -> list[tuple[bytes, ...]]:
    """Return the client's chunks of each recorded conversation (see the corpus' README).

    Skip conversations that send much data or make the server sleep: they only cost time.
    """
    conversations = (
        tuple(data for kind, data in conversation.records if kind is RecordKind.TO_SERVER)
        for file in sorted(CORPUS.glob("*.bin"))
        for conversation in decode_corpus(file.read_bytes())
    )
    return [pieces for pieces in conversations if pieces and not _is_too_long(b"".join(pieces))]


def _is_too_long(data: bytes) -> bool:
    return len(data) > _MAX_RECORDED_BYTES or b"sleep(" in data


class ConversationGenerator:
    """Generates conversations. The same seed gives the same conversations.

    The proxy disconnects a silent client after `login_timeout_seconds`. If `tls`, the proxy offers TLS, and
    some conversations use it.
    """

    def __init__(self, seed: int, *, tls: bool, login_timeout_seconds: float) -> None:
        self._rng = random.Random(seed)
        self._login_timeout_seconds = login_timeout_seconds
        self._recorded = _recorded_conversations()
        assert self._recorded, f"no recorded conversations in {CORPUS}"
        self._factories: list[tuple[ConversationFactory, int]] = [
            (self._mutated_login, 6),
            (self._mutated_commands, 8),
            (self._random_bytes, 2),
            (self._other_protocols, 3),
            (self._after_ssl_request, 4),
            (self._huge, 3),
            (self._out_of_sequence, 4),
            (self._truncated, 4),
            (self._byte_by_byte, 1),
            (self._slow, 1),
        ]
        if tls:
            self._factories.append((self._within_tls, 3))

    def __iter__(self) -> Iterator[MalformedConversation]:
        """Yield conversations forever."""
        factories, weights = zip(*self._factories, strict=True)
        while True:
            (factory,) = self._rng.choices(factories, weights)
            yield factory(self._rng)

    def _mutated_login(self, rng: random.Random) -> MalformedConversation:
        """Mutate a recorded conversation with its login. Even an unmutated login has a wrong password."""
        return MalformedConversation(
            "mutated login", mutate(rng, rng.choice(self._recorded)), _random_end(rng)
        )

    def _mutated_commands(self, rng: random.Random) -> MalformedConversation:
        """Mutate recorded commands after a valid login."""
        commands = mutate(rng, rng.choice(self._recorded)[1:] or (query("select 1"),))
        return MalformedConversation("mutated commands", commands, _random_end(rng), logs_in=True)

    def _random_bytes(self, rng: random.Random) -> MalformedConversation:
        pieces = tuple(
            rng.randbytes(rng.choice((1, 3, 4, 5, 36, 100, 5000))) for _ in range(rng.randint(1, 3))
        )
        return MalformedConversation(
            "random bytes", pieces, _random_end(rng), skips_greeting=rng.random() < 0.5
        )

    def _other_protocols(self, rng: random.Random) -> MalformedConversation:
        data = rng.choice(
            (
                _client_hello(),
                b"GET / HTTP/1.1\r\nHost: tidb\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 6000\r\n",
                b"PROXY UNKNOWN\r\n",
                b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x0a\x00\x00\x01\x0a\x00\x00\x02\x12\x67\x17\x70",
                b"SSH-2.0-OpenSSH_9.2\r\n",
                b"\x00\x00\x00\x08\x04\xd2\x16\x2f",  # PostgreSQL's SSLRequest.
            )
        )
        tail = rng.choice((b"", login(UNPRIVILEGED_USER), rng.randbytes(30)))
        return MalformedConversation(
            "other protocols", (data + tail,), _random_end(rng), skips_greeting=rng.random() < 0.7
        )

    def _after_ssl_request(self, rng: random.Random) -> MalformedConversation:
        hello = _client_hello()
        data = rng.choice(
            (
                rng.randbytes(200),
                hello[: rng.randrange(len(hello))],
                _flip_bits(rng, hello),
                hello + rng.randbytes(100),
                login(UNPRIVILEGED_USER, tls=True),
                SSL_REQUEST,
                b"\x16\x03\x01\xff\xff" + rng.randbytes(500),
                b"",
            )
        )
        request = rng.choice((SSL_REQUEST, SSL_REQUEST, _flip_bits(rng, SSL_REQUEST)))
        together = rng.random() < 0.5
        return MalformedConversation(
            "SSLRequest", (request + data,) if together else (request, data), _random_end(rng)
        )

    def _huge(self, rng: random.Random) -> MalformedConversation:
        """Announce a login or command of 70,000 bytes to 16 MiB. Send at most 100,000 random bytes."""
        is_login = rng.random() < 0.6
        header = rng.choice((MAX_PACKET_PAYLOAD, MAX_PACKET_PAYLOAD - 1, 1 << 20, 70_000)).to_bytes(
            3, "little"
        )
        body = rng.randbytes(rng.choice((0, 10, 5000, 100_000)))
        if is_login:
            return MalformedConversation("huge login", (header + b"\x01" + body,), _random_end(rng))
        return MalformedConversation(
            "huge command", (header + b"\x00\x03" + body,), _random_end(rng), logs_in=True
        )

    def _out_of_sequence(self, rng: random.Random) -> MalformedConversation:
        logged_in = rng.random() < 0.5
        first = query("select 0") if logged_in else login(UNPRIVILEGED_USER)
        pieces = [bytearray(piece) for piece in (first, query("select 1"), query("select 2"))]
        for piece in rng.sample(pieces, rng.randint(1, 3)):
            piece[3] = rng.randrange(256)
        if rng.random() < 0.3:
            rng.shuffle(pieces)
        return MalformedConversation(
            "out of sequence", tuple(map(bytes, pieces)), _random_end(rng), logs_in=logged_in
        )

    def _truncated(self, rng: random.Random) -> MalformedConversation:
        """Send part of a login or of a command. A client may fall silent only within a login."""
        whole = login(UNPRIVILEGED_USER)
        if rng.random() < 0.7:
            end = rng.choice((ConnectionEnd.FIN, ConnectionEnd.RST, ConnectionEnd.SILENCE))
            return MalformedConversation("truncated login", (whole[: rng.randrange(len(whole))],), end)
        command = query("select " + "1," * 50 + "1")
        command = command[: rng.randrange(len(command))]
        return MalformedConversation("truncated command", (command,), _random_end(rng), logs_in=True)

    def _byte_by_byte(self, rng: random.Random) -> MalformedConversation:
        """Send a login or commands, one byte per segment."""
        logged_in = rng.random() < 0.5
        data = query("select 1") + QUIT if logged_in else login(UNPRIVILEGED_USER)
        pieces = tuple(data[i : i + 1] for i in range(len(data)))
        return MalformedConversation("byte by byte", pieces, _random_end(rng), logs_in=logged_in)

    def _slow(self, rng: random.Random) -> MalformedConversation:
        """Send a login so slowly that it exceeds the login timeout."""
        whole = login(UNPRIVILEGED_USER)
        step = len(whole) // 20 + 1
        pieces = tuple(whole[i : i + step] for i in range(0, len(whole), step))
        return MalformedConversation(
            "slow login", pieces, ConnectionEnd.SILENCE, pause_seconds=self._login_timeout_seconds / 10
        )

    def _within_tls(self, rng: random.Random) -> MalformedConversation:
        logged_in = rng.random() < 0.5
        first = query("select 0") if logged_in else login(UNPRIVILEGED_USER, tls=True)
        base = (first, query("select 1"), query("select 2"))
        pieces = rng.choice((mutate(rng, base), (rng.randbytes(100),), (first, rng.randbytes(50))))
        return MalformedConversation("within TLS", pieces, _random_end(rng), tls=True, logs_in=logged_in)


def _random_end(rng: random.Random) -> ConnectionEnd:
    return rng.choice((ConnectionEnd.FIN, ConnectionEnd.RST))


def _flip_bits(rng: random.Random, data: bytes) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def mutate(rng: random.Random, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the conversation with one to three random errors."""
    mutated = [piece for piece in pieces if piece]
    for _ in range(rng.randint(1, 3)):
        if not mutated:
            break
        at = rng.randrange(len(mutated))
        piece = mutated[at]
        match rng.randrange(9):
            case 0:
                mutated[at] = _flip_bits(rng, piece)
            case 1:
                cut = rng.randrange(len(piece))
                mutated[at] = piece[:cut] + rng.randbytes(rng.randint(1, 20)) + piece[cut:]
            case 2:
                mutated[at] = piece[: rng.randrange(len(piece))]
            case 3:
                mutated.insert(at, piece)
            case 4:
                other = rng.randrange(len(mutated))
                mutated[at], mutated[other] = mutated[other], piece
            case 5:  # Change the length in the header.
                length = rng.choice(
                    (
                        0,
                        1,
                        len(piece),
                        len(piece) - HEADER_SIZE - 1,
                        MAX_PACKET_PAYLOAD,
                        rng.randrange(MAX_PACKET_PAYLOAD),
                    )
                )
                mutated[at] = max(length, 0).to_bytes(3, "little") + piece[3:]
            case 6:
                mutated[at] = piece[:3] + rng.randbytes(1) + piece[4:]
            case 7:
                del mutated[at]
            case _:  # Insert a message that only servers send.
                mutated.insert(
                    at, frame(2, rng.choice((OK_PAYLOAD, err(1045, "no", "28000"), b"\xfe\x00\x00\x02\x00")))
                )
        mutated = [piece for piece in mutated if piece]
    return tuple(mutated)


def _client_hello() -> bytes:
    """Return a valid ClientHello. Its random part is not seeded; nothing depends on it."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("the TLS handshake finished without a response")
