"""One Envoy for many moves that fail, each on nodes of its own; nothing may be left of them."""

from __future__ import annotations

import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

from sandbox.tidb_sim.mariadb_backend import cells_of
from sandbox.tidb_sim.packets import Command, err, frame, frames
from tests.support.clients.server import Certificates
from tests.support.migration.fault_cases import Case
from tests.support.migration.scripted_node import CHECK, Actor, Gate, Link, Next
from tests.support.module.bootstrap import Host, Parts, tell
from tests.support.module.envoy import Envoy, envoy, within
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import until

HELD = ("export", "login", "states", "switch", "undo")
"""Steps in which nothing of the client is passed on."""
AT_ONCE, HELD_AT_ONCE = 64, 2
"""Most sessions of an Envoy that move, and of a worker that are held, at the same time."""
PATIENCE = 1.0
"""Seconds after which a session is tried again."""
A = "7"
AT_LAST = 1.5
"""Seconds; later some would come in place of others that have waited too long."""
LAST = "last.test:4000"
"""The node that many leave."""


@dataclass
class Play:
    """A session on `old` that is to move to `new`, or, when that fails, to `third`, if there is one."""

    arena: Arena
    old: Actor
    new: Actor
    third: Actor
    client: Raw
    alone: bool
    """There is no third."""
    rows: int = 2
    gate: Gate = field(init=False)
    _descriptors: int = 0

    # How it comes to a step.

    def drain(self, *, close: bool = False) -> None:
        """The session is to leave its node."""
        others = [] if self.alone else [Host(self.third.endpoint, self.third.name, priority=1)]
        left = Host(self.old.endpoint, self.old.name, state="draining", close=close)
        self.arena.tell(left, host(self.new), *others)

    def undrain(self) -> None:
        """It is to stay there."""
        self.arena.tell(host(self.old), Host(self.new.endpoint, self.new.name, state="draining"))

    async def reach(self, step: str, *, bytewise: bool = False) -> Gate:
        """Returns when the move is in that step, and its node waits at `gate`."""
        self._descriptors = self.arena.proxy.descriptors()
        match step:
            case "connect" | "tls" | "login":
                self.gate = self.new.hold(step, bytewise=bytewise)
            case "states" | "switch":
                self.gate = self.new.hold("states", bytewise=bytewise)
            case "export":
                self.gate = self.old.hold("export", bytewise=bytewise)
            case "wait":
                self.gate = self.old.hold("statement", bytewise=bytewise)
                self.ask("insert 2")
            case "undo":
                failing = self.new.hold("login")
                self.gate = self.old.hold("undo", bytewise=bytewise)
        if step == "wait":
            await self.gate.here()
        self.drain()
        if step == "wait":
            await until(lambda: bool(self.new.links) and self.new.links[-1].writer is not None)
            if self.arena.tls is None:
                await self.new.links[-1].taken()
        if step == "undo":
            link = await failing.here()
            link.send(DENIED)
            failing.open(Next.NOTHING)
        await self.gate.here()
        return self.gate

    async def fail_to_move(self) -> Link:
        """The session stays, with its states known from the failed move. Returns its connection to `old`."""
        (await self.reach("undo")).open()
        link = self.old.links[-1]
        await link.taken()
        return link

    # What the client does.

    def ask(self, *statements: str) -> None:
        """Send them, all at once."""
        requests = [frames(0, [bytes((Command.QUERY,)) + statement.encode()]) for statement in statements]
        self.client.writer.write(b"".join(requests))

    async def inserted(self, rows: int) -> None:
        """The answer to `insert`."""
        _, payload = await within(self.client.packet())
        assert payload[:2] == bytes((0, rows)), payload

    async def row(self) -> tuple[str, ...]:
        """An answer of one row."""
        _, head = await within(self.client.packet())
        assert head[0] < 10, head
        for _ in range(head[0] + 1):
            await within(self.client.packet())
        _, cells = await within(self.client.packet())
        await within(self.client.packet())
        return tuple((cell or b"").decode() for cell in cells_of(cells, head[0]))

    # What comes of it.

    async def is_on(self, node: Actor) -> None:
        """The session is there, with all that it had."""
        self.ask(CHECK)
        assert await self.row() == (A, str(self.rows), node.name)

    async def stays(self, reason: str) -> None:
        """It is where it was, for this reason."""
        await self.released()
        began = time.monotonic()
        self.undrain()
        await self.is_on(self.old)
        if time.monotonic() - began < PATIENCE / 2:
            self.arena.expect(self.old, reason, "stayed")
        else:  # it may have been tried again
            self.arena.expect_more(self.old, reason)

    async def moves(self, to: Actor | None = None) -> None:
        """It is on the other node."""
        there = to or self.new
        await within(there.arrived.wait())
        await self.is_on(there)
        self.arena.expect(self.old, "ok", "moved")

    async def ends(self, told: int = 0) -> None:
        """The client is told so, or nothing, and then there is no more."""
        if told:
            _, payload = await within(self.client.packet())
            assert payload[0] == 0xFF, payload
            assert int.from_bytes(payload[1:3], "little") == told, payload
        assert await within(self.client.reader.read()) == b""

    async def counted(self, reason: str) -> None:
        """Returns when a move has failed for this reason, as far as Envoy tells; it does once a second."""

        async def is_told() -> bool:
            series = await self.arena.proxy.metrics()
            return series.get(("migrations", (self.old.name, reason, "stayed")), 0) > 0

        await until(is_told)

    async def released(self) -> None:
        """Returns when Envoy has given up the target."""
        await until(lambda: self.arena.proxy.descriptors() <= self._descriptors)

    async def comes_to(self, case: Case) -> None:
        """What that case says."""
        match case.result:
            case "moves":
                await self.moves()
            case "ends":
                await self.ends()
            case "lost":
                await self.ends(1053)
                self.arena.expect(self.old, "lost", "lost")
            case told if told.startswith("ERR-"):
                await self.ends(int(told.removeprefix("ERR-")))
            case _:
                await self.stays(case.reason)

    async def leaves_nothing(self) -> None:
        """Behind the client's end: no connection, and no descriptor of Envoy's."""
        self.client.writer.transport.abort()
        actors = (self.old, self.new, self.third)
        for actor in actors:
            actor.release()
        if not self.arena.proxy.running:
            return
        await until(lambda: not any(actor.open_links for actor in actors))
        await until(lambda: self.arena.proxy.descriptors() <= self.arena.descriptors)


def host(actor: Actor) -> Host:
    return Host(actor.endpoint, actor.name)


DENIED = frame(2, err(1045, "Access denied for user 'root'@'%' (using password: YES)", "28000"))


class Start(Protocol):
    """How an Envoy is started."""

    def __call__(
        self, directory: Path, hosts: Sequence[Host | str], parts: Parts
    ) -> AbstractAsyncContextManager[Envoy]: ...


@dataclass
class Arena:
    """An Envoy, and what it has to have counted in the end."""

    proxy: Envoy
    endpoints: Path
    tls: ssl.SSLContext | None
    descriptors: int = 0
    """That it has with no session."""
    plays: int = 0
    expected: Counter[tuple[str, ...]] = field(default_factory=Counter)
    more: set[tuple[str, ...]] = field(default_factory=set)
    unjudged: set[str] = field(default_factory=set)
    """Nodes of which it does not matter how moves from there are counted."""
    tried: dict[str, str] = field(default_factory=dict)
    """What was tried with a node."""

    def tell(self, *hosts: Host) -> None:
        tell(self.endpoints, hosts)

    def expect(self, node: Actor, reason: str, result: str, times: int = 1) -> None:
        """So many moves from there have ended so."""
        self.expected[node.name, reason, result] += times

    def expect_more(self, node: Actor, reason: str) -> None:
        """A move from there has failed so once or more."""
        self.more.add((node.name, reason, "stayed"))

    @asynccontextmanager
    async def play(
        self, what: object = "", *, third: bool = False, tls: Sequence[ssl.SSLContext | None] = ()
    ) -> AsyncIterator[Play]:
        """A session with something to take along. At the end nothing may be left of it.

        `tls`: of the old, the new and the third node, where they differ.
        """
        self.plays += 1
        names = (f"old-{self.plays}", "new", "third")
        old, new, other = (
            Actor(f"{name}.test:4000", each) for name, each in zip(names, tls or [self.tls] * 3, strict=True)
        )
        self.tried[old.name] = str(what)
        async with old.listening(), new.listening(), other.listening():
            targets = [new, other] if third else [new]
            self.tell(host(old), *(Host(each.endpoint, each.name, state="draining") for each in targets))
            play = Play(self, old, new, other, await self._client(old), alone=not third)
            try:
                play.ask(f"set @a = {A}", f"insert {play.rows}")
                await play.inserted(0)
                await play.inserted(play.rows)
                yield play
                await play.leaves_nothing()
            except BaseException:
                self.unjudged.add(old.name)  # that has failed already
                play.client.writer.transport.abort()
                raise

    async def _client(self, on: Actor) -> Raw:
        """A client on that node, of which Envoy may not know yet."""
        while True:
            client = await self.proxy.client()
            try:
                if (await within(client.login()))[0] == 0 and on.links:
                    return client
            except (OSError, EOFError):
                pass
            client.writer.transport.abort()

    async def warm(self) -> None:
        """One move that goes well, after which Envoy has the descriptors that it keeps."""
        self.descriptors = 1 << 30
        async with self.play("warming up") as play:
            play.drain()
            await play.moves()
        before = 0
        while before != (before := self.proxy.descriptors()):
            await self.proxy.get("/ready")
        self.descriptors = before

    @asynccontextmanager
    async def many(
        self, step: str, count: int = AT_ONCE
    ) -> AsyncIterator[tuple[list[Raw], Callable[[], None]]]:
        """So many sessions, all in that step; what has them go on.

        If there is room for fewer, TimeoutError. Two targets get as many of them each.
        """
        old, new, third = (Actor(f"{name}.test:4000", self.tls) for name in ("last", "new", "third"))
        async with old.listening(), new.listening(), third.listening():
            targets = (new, third)
            self.tell(host(old), *(Host(each.endpoint, each.name, state="draining") for each in targets))
            clients = [await self._client(old) for _ in range(count)]
            for each in targets:
                each.hold(step, lasting=True)
            self.tell(Host(old.endpoint, old.name, state="draining"), *map(host, targets))
            await until(lambda: new.waiting + third.waiting == count, AT_LAST)
            assert new.waiting == third.waiting, "sessions are counted that never came"

            def go_on() -> None:
                for each in targets:
                    each.release()

            yield clients, go_on
            go_on()
            for client in clients:
                client.writer.transport.abort()
            await until(lambda: not any(each.open_links for each in (old, *targets)))

    async def as_many_may_move_as_ever(self) -> None:
        """Whatever has failed."""
        for step, count in (("connect", AT_ONCE), ("login", HELD_AT_ONCE)):
            async with self.many(step, count) as (clients, go_on):
                go_on()
                for client in clients:
                    client.writer.write(frames(0, [bytes((Command.QUERY,)) + b"still here"]))
                    _, first = await within(client.packet())
                    assert first[0] == 2, first
            self.expected[LAST, "ok", "moved"] += count

    async def has_counted_all(self) -> None:
        """Each move was counted as it ended, and no session is left in any gauge."""
        last: list[dict[str, str]] = [{}]

        async def is_right() -> bool:
            last.append(self._wrong(await self.proxy.metrics()))
            return not last[-1]

        try:
            await until(is_right, 5.0)
        except TimeoutError:
            pytest.fail("\n".join(f"{name}: {what}" for name, what in sorted(last[-1].items())))

    def _wrong(self, series: Mapping[tuple[str, tuple[str, ...]], int]) -> dict[str, str]:
        """What is not as it has to be, and how."""
        wrong: dict[str, str] = {}
        counted = {
            labels: value for (name, labels), value in series.items() if name == "migrations" and value
        }
        for labels in counted.keys() | self.expected.keys() | self.more:
            # Between two cases a session may find no node, or leave the last target before its end is known.
            if labels not in self.expected and (labels[1] == "no_node" or labels[0] == "new.test:4000"):
                continue
            is_counted, due = counted.get(labels, 0), self.expected[labels]
            right = is_counted > 0 if labels in self.more else is_counted == due
            if labels[0] not in self.unjudged and not right:
                wrong[f"{self.tried.get(labels[0])} {labels}"] = f"{is_counted} times, not {due}"
        for (name, labels), value in series.items():
            if name in ("sessions", "sessions_pinned") and value:
                wrong[f"{self.tried.get(labels[0])} {name} {labels}"] = str(value)
        return wrong


def node_context(certificates: Certificates) -> ssl.SSLContext:
    """Of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


@asynccontextmanager
async def arena(directory: Path, *, tls: bool = False, starts: Start | None = None) -> AsyncIterator[Arena]:
    """An Envoy that was warmed up, and is looked at in the end."""
    async with cold_arena(directory, tls=tls, starts=starts) as one:
        await one.warm()
        yield one
        await one.as_many_may_move_as_ever()
        await one.has_counted_all()


@asynccontextmanager
async def cold_arena(
    directory: Path, *, tls: bool = False, starts: Start | None = None
) -> AsyncIterator[Arena]:
    """One in which no session has moved yet, and at which nobody looks in the end."""
    endpoints = directory / "endpoints.json"
    certificates = Certificates.make(directory / "certificates")
    secured = {"tls": "required", "ca": str(certificates.ca), "verify": "ca"}
    parts = Parts(node=secured if tls else {}, endpoints=endpoints)
    context = node_context(certificates) if tls else None
    async with (starts or envoy)(directory, [Host("127.0.0.1:1")], parts) as proxy:
        yield Arena(proxy, endpoints, context)


class Arenas:
    """Those of a module of tests: one without TLS to nodes, and one with, each from when it is needed."""

    def __init__(self, directory: Path, running: AsyncExitStack, starts: Start | None = None) -> None:
        self._directory, self._running, self._starts = directory, running, starts
        self._known: dict[bool, Arena] = {}

    async def of(self, step: str) -> Arena:
        """That in which a session comes to this step."""
        tls = step == "tls"
        if tls not in self._known:
            directory = self._directory / ("tls" if tls else "plain")
            self._known[tls] = await self._running.enter_async_context(
                arena(directory, tls=tls, starts=self._starts)
            )
        return self._known[tls]

    @asynccontextmanager
    async def play(self, case: Case, *, third: bool = False) -> AsyncIterator[Play]:
        """A session for what is tried."""
        async with (await self.of(case.step)).play(case, third=third) as play:
            yield play
