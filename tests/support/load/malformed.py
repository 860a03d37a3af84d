"""Conversations that no client should have: garbage, truncated, oversized, out of sequence, slow."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sandbox.tidb_sim.packets import FULL, HEADER_SIZE, err, frame
from tests.support.load.client_packets import QUIT, SSL_REQUEST, login, query
from tests.support.module.envoy import OK

CORPUS = Path(__file__).parents[3] / "filters" / "wire" / "corpus"
# An account that must not be able to end the server or sessions of others: mutated commands might.
USER = "garbage"
_CLIENT_SAID = 1
_LONGEST = 64 * 1024


class End(Enum):
    """What a client does when it has said all."""

    FIN = "FIN"
    RST = "RST"
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one client sends.

    `gap`: seconds between two pieces. `eager`: it does not await the greeting. `tls`: it makes a proper TLS
    handshake first. `logged_in`: and a proper login. Silence must only follow what is no whole login, else
    the session would stay.
    """

    kind: str
    pieces: tuple[bytes, ...]
    end: End
    gap: float = 0.0
    eager: bool = False
    tls: bool = False
    logged_in: bool = False


Maker = Callable[[random.Random], Conversation]


def recorded(corpus: Path = CORPUS) -> list[tuple[bytes, ...]]:
    """What clients said in the recorded conversations, a packet or several a piece; see the corpus' README.

    Conversations that send much, or ask the server to sleep, are left out: they would only cost time.
    """
    found: list[tuple[bytes, ...]] = []
    for file in sorted(corpus.glob("*.bin")):
        data, pieces, place = file.read_bytes(), list[bytes](), 0
        while place < len(data):
            kind, length = data[place], int.from_bytes(data[place + 1 : place + 5], "little")
            if kind == 0:
                found.append(tuple(pieces))
                pieces = []
            elif kind == _CLIENT_SAID:
                pieces.append(data[place + 5 : place + 5 + length])
            place += 5 + length
        found.append(tuple(pieces))
    return [pieces for pieces in found if pieces and not _is_long(b"".join(pieces))]


def _is_long(said: bytes) -> bool:
    return len(said) > _LONGEST or b"sleep(" in said


class Garbage:
    """Makes conversations, the same for the same seed.

    `silence`: seconds after which a client that says nothing is sent away. `tls`: whether the proxy offers
    TLS, so that some conversations go on within it.
    """

    def __init__(self, seed: int, *, tls: bool, silence: float) -> None:
        self._rng = random.Random(seed)
        self._silence = silence
        self._recorded = recorded()
        assert self._recorded, f"no recorded conversations in {CORPUS}"
        self._makers: list[tuple[Maker, int]] = [
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
            self._makers.append((self._within_tls, 3))

    def __iter__(self) -> Iterator[Conversation]:
        """Without end."""
        makers, weights = zip(*self._makers, strict=True)
        while True:
            (make,) = self._rng.choices(makers, weights)
            yield make(self._rng)

    def _mutated_login(self, rng: random.Random) -> Conversation:
        """A recorded conversation from its login on; the password is wrong even where the bytes are not."""
        return Conversation("mutated login", mutate(rng, rng.choice(self._recorded)), _end(rng))

    def _mutated_commands(self, rng: random.Random) -> Conversation:
        """Recorded commands, mutated, behind a proper login."""
        commands = mutate(rng, rng.choice(self._recorded)[1:] or (query("select 1"),))
        return Conversation("mutated commands", commands, _end(rng), logged_in=True)

    def _random_bytes(self, rng: random.Random) -> Conversation:
        pieces = tuple(
            rng.randbytes(rng.choice((1, 3, 4, 5, 36, 100, 5000))) for _ in range(rng.randint(1, 3))
        )
        return Conversation("random bytes", pieces, _end(rng), eager=rng.random() < 0.5)

    def _other_protocols(self, rng: random.Random) -> Conversation:
        said = rng.choice(
            (
                _client_hello(),
                b"GET / HTTP/1.1\r\nHost: tidb\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 6000\r\n",
                b"PROXY UNKNOWN\r\n",
                b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x0a\x00\x00\x01\x0a\x00\x00\x02\x12\x67\x17\x70",
                b"SSH-2.0-OpenSSH_9.2\r\n",
                b"\x00\x00\x00\x08\x04\xd2\x16\x2f",  # PostgreSQL's SSLRequest
            )
        )
        tail = rng.choice((b"", login(USER), rng.randbytes(30)))
        return Conversation("other protocols", (said + tail,), _end(rng), eager=rng.random() < 0.7)

    def _after_ssl_request(self, rng: random.Random) -> Conversation:
        hello = _client_hello()
        said = rng.choice(
            (
                rng.randbytes(200),
                hello[: rng.randrange(len(hello))],
                _flipped(rng, hello),
                hello + rng.randbytes(100),
                login(USER, tls=True),
                SSL_REQUEST,
                b"\x16\x03\x01\xff\xff" + rng.randbytes(500),
                b"",
            )
        )
        request = rng.choice((SSL_REQUEST, SSL_REQUEST, _flipped(rng, SSL_REQUEST)))
        together = rng.random() < 0.5
        return Conversation("SSLRequest", (request + said,) if together else (request, said), _end(rng))

    def _huge(self, rng: random.Random) -> Conversation:
        """Lengths that no login has, and packets of 16 MiB of which little comes."""
        of_login = rng.random() < 0.6
        header = rng.choice((FULL, FULL - 1, 1 << 20, 70_000)).to_bytes(3, "little")
        body = rng.randbytes(rng.choice((0, 10, 5000, 100_000)))
        if of_login:
            return Conversation("huge login", (header + b"\x01" + body,), _end(rng))
        return Conversation("huge command", (header + b"\x00\x03" + body,), _end(rng), logged_in=True)

    def _out_of_sequence(self, rng: random.Random) -> Conversation:
        logged_in = rng.random() < 0.5
        first = query("select 0") if logged_in else login(USER)
        pieces = [bytearray(piece) for piece in (first, query("select 1"), query("select 2"))]
        for piece in rng.sample(pieces, rng.randint(1, 3)):
            piece[3] = rng.randrange(256)
        if rng.random() < 0.3:
            rng.shuffle(pieces)
        return Conversation("out of sequence", tuple(map(bytes, pieces)), _end(rng), logged_in=logged_in)

    def _truncated(self, rng: random.Random) -> Conversation:
        """Part of a login or of a command; only the first may be followed by silence."""
        whole = login(USER)
        if rng.random() < 0.7:
            end = rng.choice((End.FIN, End.RST, End.SILENCE))
            return Conversation("truncated login", (whole[: rng.randrange(len(whole))],), end)
        command = query("select " + "1," * 50 + "1")
        command = command[: rng.randrange(len(command))]
        return Conversation("truncated command", (command,), _end(rng), logged_in=True)

    def _byte_by_byte(self, rng: random.Random) -> Conversation:
        """A login, or what follows it, one byte a segment."""
        logged_in = rng.random() < 0.5
        said = query("select 1") + QUIT if logged_in else login(USER)
        pieces = tuple(said[i : i + 1] for i in range(len(said)))
        return Conversation("byte by byte", pieces, _end(rng), logged_in=logged_in)

    def _slow(self, rng: random.Random) -> Conversation:
        """A login so slow that it is not over in time."""
        whole = login(USER)
        step = len(whole) // 20 + 1
        pieces = tuple(whole[i : i + step] for i in range(0, len(whole), step))
        return Conversation("slow login", pieces, End.SILENCE, gap=self._silence / 10)

    def _within_tls(self, rng: random.Random) -> Conversation:
        logged_in = rng.random() < 0.5
        first = query("select 0") if logged_in else login(USER, tls=True)
        base = (first, query("select 1"), query("select 2"))
        pieces = rng.choice((mutate(rng, base), (rng.randbytes(100),), (first, rng.randbytes(50))))
        return Conversation("within TLS", pieces, _end(rng), tls=True, logged_in=logged_in)


def _end(rng: random.Random) -> End:
    return rng.choice((End.FIN, End.RST))


def _flipped(rng: random.Random, data: bytes) -> bytes:
    """One to four bits of it turned."""
    turned = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
    return bytes(turned)


def mutate(rng: random.Random, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
    """The same conversation with one to three things wrong."""
    changed = [piece for piece in pieces if piece]
    for _ in range(rng.randint(1, 3)):
        if not changed:
            break
        at = rng.randrange(len(changed))
        piece = changed[at]
        match rng.randrange(9):
            case 0:
                changed[at] = _flipped(rng, piece)
            case 1:
                cut = rng.randrange(len(piece))
                changed[at] = piece[:cut] + rng.randbytes(rng.randint(1, 20)) + piece[cut:]
            case 2:
                changed[at] = piece[: rng.randrange(len(piece))]
            case 3:
                changed.insert(at, piece)
            case 4:
                other = rng.randrange(len(changed))
                changed[at], changed[other] = changed[other], piece
            case 5:  # another length in the header
                length = rng.choice(
                    (0, 1, len(piece), len(piece) - HEADER_SIZE - 1, FULL, rng.randrange(FULL))
                )
                changed[at] = max(length, 0).to_bytes(3, "little") + piece[3:]
            case 6:
                changed[at] = piece[:3] + rng.randbytes(1) + piece[4:]
            case 7:
                del changed[at]
            case _:  # a message of the server from the client
                changed.insert(
                    at, frame(2, rng.choice((OK, err(1045, "no", "28000"), b"\xfe\x00\x00\x02\x00")))
                )
        changed = [piece for piece in changed if piece]
    return tuple(changed)


def _client_hello() -> bytes:
    """A genuine one. Its random part is not seeded; nothing depends on it."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake that needs no answer")
