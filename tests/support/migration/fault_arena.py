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

from sandbox.tidb_sim.mariadb_backend import parse_row
from sandbox.tidb_sim.packets import MySqlCommand, err, frame, frames
from tests.support.clients.server import PemFiles
from tests.support.migration.fault_cases import FailureCase
from tests.support.migration.scripted_node import (
    CHECK_STATEMENT,
    GateAction,
    NodeConnection,
    ScriptedNode,
    StepGate,
)
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import ModuleEnvoy, run_envoy, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import wait_until

HELD_STEPS = ("export", "login", "states", "switch", "undo")
"""Steps in which nothing of the client is passed on."""
MAX_MIGRATIONS, MAX_HELD_SESSIONS = 64, 2
"""Most sessions of an Envoy that move, and of a worker that are held, at the same time."""
RETRY_SECONDS = 1.0
"""Seconds after which a session is tried again."""
VARIABLE_VALUE = "7"
HOLD_TIMEOUT_SECONDS = 1.5
"""Seconds; later some would come in place of others that have waited too long."""
DRAINED_NODE = "last.test:4000"
"""The node that many leave."""


@dataclass
class MigrationScenario:
    """A session on `old` that is to move to `new`, or, when that fails, to `third`, if there is one."""

    arena: FaultArena
    old: ScriptedNode
    new: ScriptedNode
    third: ScriptedNode
    client: RawClient
    has_no_third_node: bool
    """There is no third."""
    rows: int = 2
    gate: StepGate = field(init=False)
    _descriptors: int = 0

    # How it comes to a step.

    def drain(self, *, close: bool = False) -> None:
        """The session is to leave its node."""
        others = [] if self.has_no_third_node else [Host(self.third.endpoint, self.third.name, priority=1)]
        left = Host(self.old.endpoint, self.old.name, state="draining", terminate_sessions=close)
        self.arena.publish(left, to_host(self.new), *others)

    def undrain(self) -> None:
        """It is to stay there."""
        self.arena.publish(to_host(self.old), Host(self.new.endpoint, self.new.name, state="draining"))

    async def reach_step(self, step: str, *, bytewise: bool = False) -> StepGate:
        """Returns when the move is in that step, and its node waits at `gate`."""
        self._descriptors = self.arena.proxy.descriptor_count()
        match step:
            case "connect" | "tls" | "login":
                self.gate = self.new.hold_at(step, bytewise=bytewise)
            case "states" | "switch":
                self.gate = self.new.hold_at("states", bytewise=bytewise)
            case "export":
                self.gate = self.old.hold_at("export", bytewise=bytewise)
            case "wait":
                self.gate = self.old.hold_at("statement", bytewise=bytewise)
                self.send("insert 2")
            case "undo":
                failing = self.new.hold_at("login")
                self.gate = self.old.hold_at("undo", bytewise=bytewise)
        if step == "wait":
            await self.gate.wait_reached()
        self.drain()
        if step == "wait":
            await wait_until(
                lambda: bool(self.new.connections) and self.new.connections[-1].writer is not None
            )
            if self.arena.tls is None:
                await self.new.connections[-1].wait_until_read()
        if step == "undo":
            link = await failing.wait_reached()
            link.send(LOGIN_DENIED)
            failing.proceed(GateAction.STAY_SILENT)
        await self.gate.wait_reached()
        return self.gate

    async def fail_migration(self) -> NodeConnection:
        """The session stays, with its states known from the failed move. Returns its connection to `old`."""
        (await self.reach_step("undo")).proceed()
        link = self.old.connections[-1]
        await link.wait_until_read()
        return link

    # What the client does.

    def send(self, *statements: str) -> None:
        """Send them, all at once."""
        requests = [
            frames(0, [bytes((MySqlCommand.QUERY,)) + statement.encode()]) for statement in statements
        ]
        self.client.writer.write(b"".join(requests))

    async def expect_insert_ok(self, rows: int) -> None:
        """The answer to `insert`."""
        _, payload = await with_timeout(self.client.read_packet())
        assert payload[:2] == bytes((0, rows)), payload

    async def read_row(self) -> tuple[str, ...]:
        """An answer of one row."""
        _, head = await with_timeout(self.client.read_packet())
        assert head[0] < 10, head
        for _ in range(head[0] + 1):
            await with_timeout(self.client.read_packet())
        _, cells = await with_timeout(self.client.read_packet())
        await with_timeout(self.client.read_packet())
        return tuple((cell or b"").decode() for cell in parse_row(cells, head[0]))

    # What comes of it.

    async def expect_on(self, node: ScriptedNode) -> None:
        """The session is there, with all that it had."""
        self.send(CHECK_STATEMENT)
        assert await self.read_row() == (VARIABLE_VALUE, str(self.rows), node.name)

    async def expect_stayed(self, reason: str) -> None:
        """It is where it was, for this reason."""
        await self.wait_target_released()
        began = time.monotonic()
        self.undrain()
        await self.expect_on(self.old)
        if time.monotonic() - began < RETRY_SECONDS / 2:
            self.arena.expect_migration(self.old, reason, "stayed")
        else:  # it may have been tried again
            self.arena.expect_failures(self.old, reason)

    async def expect_migrated(self, to: ScriptedNode | None = None) -> None:
        """It is on the other node."""
        target = to or self.new
        await with_timeout(target.migration_completed.wait())
        await self.expect_on(target)
        self.arena.expect_migration(self.old, "ok", "moved")

    async def expect_ended(self, error_code: int = 0) -> None:
        """The client is told so, or nothing, and then there is no more."""
        if error_code:
            _, payload = await with_timeout(self.client.read_packet())
            assert payload[0] == 0xFF, payload
            assert int.from_bytes(payload[1:3], "little") == error_code, payload
        assert await with_timeout(self.client.reader.read()) == b""

    async def wait_failure_counted(self, reason: str) -> None:
        """Returns when a move has failed for this reason, as far as Envoy tells; it does once a second."""

        async def is_told() -> bool:
            series = await self.arena.proxy.metrics()
            return series.get(("migrations", (self.old.name, reason, "stayed")), 0) > 0

        await wait_until(is_told)

    async def wait_target_released(self) -> None:
        """Returns when Envoy has given up the target."""
        await wait_until(lambda: self.arena.proxy.descriptor_count() <= self._descriptors)

    async def expect_outcome(self, case: FailureCase) -> None:
        """What that case says."""
        match case.result:
            case "moves":
                await self.expect_migrated()
            case "ends":
                await self.expect_ended()
            case "lost":
                await self.expect_ended(1053)
                self.arena.expect_migration(self.old, "lost", "lost")
            case told if told.startswith("ERR-"):
                await self.expect_ended(int(told.removeprefix("ERR-")))
            case _:
                await self.expect_stayed(case.reason)

    async def expect_nothing_left(self) -> None:
        """Behind the client's end: no connection, and no descriptor of Envoy's."""
        self.client.writer.transport.abort()
        actors = (self.old, self.new, self.third)
        for actor in actors:
            actor.release_all()
        if not self.arena.proxy.is_running:
            return
        await wait_until(lambda: not any(actor.open_connections for actor in actors))
        await wait_until(lambda: self.arena.proxy.descriptor_count() <= self.arena.descriptors)


def to_host(actor: ScriptedNode) -> Host:
    return Host(actor.endpoint, actor.name)


LOGIN_DENIED = frame(2, err(1045, "Access denied for user 'root'@'%' (using password: YES)", "28000"))


class EnvoyStarter(Protocol):
    """How an Envoy is started."""

    def __call__(
        self, directory: Path, hosts: Sequence[Host | str], parts: ModuleConfig
    ) -> AbstractAsyncContextManager[ModuleEnvoy]: ...


@dataclass
class FaultArena:
    """An Envoy, and what it has to have counted in the end."""

    proxy: ModuleEnvoy
    endpoints: Path
    tls: ssl.SSLContext | None
    descriptors: int = 0
    """That it has with no session."""
    scenario_count: int = 0
    expected_migrations: Counter[tuple[str, ...]] = field(default_factory=Counter)
    expected_failures: set[tuple[str, ...]] = field(default_factory=set)
    ignored_nodes: set[str] = field(default_factory=set)
    """Nodes of which it does not matter how moves from there are counted."""
    scenario_by_node: dict[str, str] = field(default_factory=dict)
    """What was tried with a node."""

    def publish(self, *hosts: Host) -> None:
        publish_nodes(self.endpoints, hosts)

    def expect_migration(self, node: ScriptedNode, reason: str, result: str, times: int = 1) -> None:
        """So many moves from there have ended so."""
        self.expected_migrations[node.name, reason, result] += times

    def expect_failures(self, node: ScriptedNode, reason: str) -> None:
        """A move from there has failed so once or more."""
        self.expected_failures.add((node.name, reason, "stayed"))

    @asynccontextmanager
    async def scenario(
        self, description: object = "", *, third: bool = False, tls: Sequence[ssl.SSLContext | None] = ()
    ) -> AsyncIterator[MigrationScenario]:
        """A session with something to take along. At the end nothing may be left of it.

        `tls`: of the old, the new and the third node, where they differ.
        """
        self.scenario_count += 1
        names = (f"old-{self.scenario_count}", "new", "third")
        old, new, other = (
            ScriptedNode(f"{name}.test:4000", each)
            for name, each in zip(names, tls or [self.tls] * 3, strict=True)
        )
        self.scenario_by_node[old.name] = str(description)
        async with old.listening(), new.listening(), other.listening():
            targets = [new, other] if third else [new]
            self.publish(
                to_host(old), *(Host(each.endpoint, each.name, state="draining") for each in targets)
            )
            play = MigrationScenario(
                self, old, new, other, await self._connect_on(old), has_no_third_node=not third
            )
            try:
                play.send(f"set @a = {VARIABLE_VALUE}", f"insert {play.rows}")
                await play.expect_insert_ok(0)
                await play.expect_insert_ok(play.rows)
                yield play
                await play.expect_nothing_left()
            except BaseException:
                self.ignored_nodes.add(old.name)  # that has failed already
                play.client.writer.transport.abort()
                raise

    async def _connect_on(self, on: ScriptedNode) -> RawClient:
        """A client on that node, of which Envoy may not know yet."""
        while True:
            client = await self.proxy.connect()
            try:
                if (await with_timeout(client.login()))[0] == 0 and on.connections:
                    return client
            except (OSError, EOFError):
                pass
            client.writer.transport.abort()

    async def warm_up(self) -> None:
        """One move that goes well, after which Envoy has the descriptors that it keeps."""
        self.descriptors = 1 << 30
        async with self.scenario("warming up") as play:
            play.drain()
            await play.expect_migrated()
        before = 0
        while before != (before := self.proxy.descriptor_count()):
            await self.proxy.get("/ready")
        self.descriptors = before

    @asynccontextmanager
    async def hold_many(
        self, step: str, count: int = MAX_MIGRATIONS
    ) -> AsyncIterator[tuple[list[RawClient], Callable[[], None]]]:
        """So many sessions, all in that step; what has them go on.

        If there is room for fewer, TimeoutError. Two targets get as many of them each.
        """
        old, new, third = (ScriptedNode(f"{name}.test:4000", self.tls) for name in ("last", "new", "third"))
        async with old.listening(), new.listening(), third.listening():
            targets = (new, third)
            self.publish(
                to_host(old), *(Host(each.endpoint, each.name, state="draining") for each in targets)
            )
            clients = [await self._connect_on(old) for _ in range(count)]
            for each in targets:
                each.hold_at(step, stays_closed=True)
            self.publish(Host(old.endpoint, old.name, state="draining"), *map(to_host, targets))
            await wait_until(lambda: new.waiting_count + third.waiting_count == count, HOLD_TIMEOUT_SECONDS)
            assert new.waiting_count == third.waiting_count, "sessions are counted that never came"

            def release_all() -> None:
                for each in targets:
                    each.release_all()

            yield clients, release_all
            release_all()
            for client in clients:
                client.writer.transport.abort()
            await wait_until(lambda: not any(each.open_connections for each in (old, *targets)))

    async def expect_full_capacity(self) -> None:
        """Whatever has failed."""
        for step, count in (("connect", MAX_MIGRATIONS), ("login", MAX_HELD_SESSIONS)):
            async with self.hold_many(step, count) as (clients, go_on):
                go_on()
                for client in clients:
                    client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + b"still here"]))
                    _, first = await with_timeout(client.read_packet())
                    assert first[0] == 2, first
            self.expected_migrations[DRAINED_NODE, "ok", "moved"] += count

    async def expect_counters(self) -> None:
        """Each move was counted as it ended, and no session is left in any gauge."""
        mismatches: list[dict[str, str]] = [{}]

        async def is_right() -> bool:
            mismatches.append(self._counter_mismatches(await self.proxy.metrics()))
            return not mismatches[-1]

        try:
            await wait_until(is_right, 5.0)
        except TimeoutError:
            pytest.fail("\n".join(f"{name}: {what}" for name, what in sorted(mismatches[-1].items())))

    def _counter_mismatches(self, series: Mapping[tuple[str, tuple[str, ...]], int]) -> dict[str, str]:
        """What is not as it has to be, and how."""
        wrong: dict[str, str] = {}
        counted = {
            labels: value for (name, labels), value in series.items() if name == "migrations" and value
        }
        for labels in counted.keys() | self.expected_migrations.keys() | self.expected_failures:
            # Between two cases a session may find no node, or leave the last target before its end is known.
            if labels not in self.expected_migrations and (
                labels[1] == "no_node" or labels[0] == "new.test:4000"
            ):
                continue
            is_counted, expected = counted.get(labels, 0), self.expected_migrations[labels]
            right = is_counted > 0 if labels in self.expected_failures else is_counted == expected
            if labels[0] not in self.ignored_nodes and not right:
                wrong[f"{self.scenario_by_node.get(labels[0])} {labels}"] = (
                    f"{is_counted} times, not {expected}"
                )
        for (name, labels), value in series.items():
            if name in ("sessions", "sessions_pinned") and value:
                wrong[f"{self.scenario_by_node.get(labels[0])} {name} {labels}"] = str(value)
        return wrong


def node_tls_context(certificates: PemFiles) -> ssl.SSLContext:
    """Of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


@asynccontextmanager
async def run_arena(
    directory: Path, *, tls: bool = False, start_envoy: EnvoyStarter | None = None
) -> AsyncIterator[FaultArena]:
    """An Envoy that was warmed up, and is looked at in the end."""
    async with run_cold_arena(directory, tls=tls, start_envoy=start_envoy) as one:
        await one.warm_up()
        yield one
        await one.expect_full_capacity()
        await one.expect_counters()


@asynccontextmanager
async def run_cold_arena(
    directory: Path, *, tls: bool = False, start_envoy: EnvoyStarter | None = None
) -> AsyncIterator[FaultArena]:
    """One in which no session has moved yet, and at which nobody looks in the end."""
    endpoints = directory / "endpoints.json"
    certificates = PemFiles.create(directory / "certificates")
    secured = {"tls": "required", "ca": str(certificates.ca), "verify": "ca"}
    parts = ModuleConfig(node=secured if tls else {}, endpoints=endpoints)
    context = node_tls_context(certificates) if tls else None
    async with (start_envoy or run_envoy)(directory, [Host("127.0.0.1:1")], parts) as proxy:
        yield FaultArena(proxy, endpoints, context)


class FaultArenas:
    """Those of a module of tests: one without TLS to nodes, and one with, each from when it is needed."""

    def __init__(
        self, directory: Path, running: AsyncExitStack, start_envoy: EnvoyStarter | None = None
    ) -> None:
        self._directory, self._running, self._start_envoy = directory, running, start_envoy
        self._by_tls: dict[bool, FaultArena] = {}

    async def arena_for(self, step: str) -> FaultArena:
        """That in which a session comes to this step."""
        tls = step == "tls"
        if tls not in self._by_tls:
            directory = self._directory / ("tls" if tls else "plain")
            self._by_tls[tls] = await self._running.enter_async_context(
                run_arena(directory, tls=tls, start_envoy=self._start_envoy)
            )
        return self._by_tls[tls]

    @asynccontextmanager
    async def scenario(self, case: FailureCase, *, third: bool = False) -> AsyncIterator[MigrationScenario]:
        """A session for what is tried."""
        async with (await self.arena_for(case.step)).scenario(case, third=third) as play:
            yield play
