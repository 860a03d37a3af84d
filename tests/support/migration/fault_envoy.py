"""One Envoy for many failing migrations. Each migration has its own nodes and must leave nothing behind."""

from __future__ import annotations

import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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

CLIENT_PAUSED_STEPS = ("export", "login", "states", "switch", "undo")
"""Steps in which the module does not forward the client's data."""
MAX_MIGRATIONS, MAX_PAUSED_SESSIONS = 64, 2
"""Maximum of migrating sessions per Envoy, and of sessions in CLIENT_PAUSED_STEPS per worker."""
RETRY_SECONDS = 1.0
"""Delay before a session's migration is retried."""
VARIABLE_VALUE = "7"
PAUSE_TIMEOUT_SECONDS = 1.5
"""Timeout of `pause_many`. Later, paused migrations time out, and the module starts others instead."""
DRAINED_NODE = "last.test:4000"
"""The node that all sessions of `pause_many` leave."""


@dataclass
class MigrationScenario:
    """A session on `old` that should migrate to `new`. If that fails, the session may migrate to `third`."""

    envoy: FaultEnvoy
    old: ScriptedNode
    new: ScriptedNode
    third: ScriptedNode
    client: RawClient
    has_no_third_node: bool
    rows: int = 2
    gate: StepGate = field(init=False)
    _descriptors: int = 0

    # Reaching a step.

    def drain(self, *, terminate_sessions: bool = False) -> None:
        """Drain the session's node."""
        others = [] if self.has_no_third_node else [Host(self.third.endpoint, self.third.name, priority=1)]
        drained = Host(
            self.old.endpoint, self.old.name, state="draining", terminate_sessions=terminate_sessions
        )
        self.envoy.publish(drained, to_host(self.new), *others)

    def undrain(self) -> None:
        """Return the session's node to service."""
        self.envoy.publish(to_host(self.old), Host(self.new.endpoint, self.new.name, state="draining"))

    async def reach_step(self, step: str, *, bytewise: bool = False) -> StepGate:
        """Start a migration. Wait until it is in this step, where its old or new node waits at `gate`."""
        self._descriptors = self.envoy.proxy.descriptor_count()
        match step:
            case "connect" | "tls" | "login":
                self.gate = self.new.pause_at(step, bytewise=bytewise)
            case "states" | "switch":
                self.gate = self.new.pause_at("states", bytewise=bytewise)
            case "export":
                self.gate = self.old.pause_at("export", bytewise=bytewise)
            case "wait":
                self.gate = self.old.pause_at("statement", bytewise=bytewise)
                self.send("insert 2")
            case "undo":
                failing = self.new.pause_at("login")
                self.gate = self.old.pause_at("undo", bytewise=bytewise)
        if step == "wait":
            await self.gate.wait_reached()
        self.drain()
        if step == "wait":
            await wait_until(
                lambda: bool(self.new.connections) and self.new.connections[-1].writer is not None
            )
            if self.envoy.tls is None:
                await self.new.connections[-1].wait_until_read()
        if step == "undo":
            connection = await failing.wait_reached()
            connection.send(LOGIN_DENIED)
            failing.proceed(GateAction.SEND_NOTHING)
        await self.gate.wait_reached()
        return self.gate

    async def fail_migration(self) -> NodeConnection:
        """Let a migration fail after the export: Envoy keeps the states. Return the connection at `old`."""
        (await self.reach_step("undo")).proceed()
        connection = self.old.connections[-1]
        await connection.wait_until_read()
        return connection

    # Actions of the client.

    def send(self, *statements: str) -> None:
        """Send statements, all at once."""
        requests = [
            frames(0, [bytes((MySqlCommand.QUERY,)) + statement.encode()]) for statement in statements
        ]
        self.client.writer.write(b"".join(requests))

    async def expect_insert_ok(self, rows: int) -> None:
        """Check the response to `insert`."""
        _, payload = await with_timeout(self.client.read_packet())
        assert payload[:2] == bytes((0, rows)), payload

    async def read_row(self) -> tuple[str, ...]:
        """Read a response of one row."""
        _, head = await with_timeout(self.client.read_packet())
        assert head[0] < 10, head
        for _ in range(head[0] + 1):
            await with_timeout(self.client.read_packet())
        _, cells = await with_timeout(self.client.read_packet())
        await with_timeout(self.client.read_packet())
        return tuple((cell or b"").decode() for cell in parse_row(cells, head[0]))

    # Expected results.

    async def expect_on(self, node: ScriptedNode) -> None:
        """Check that the session is on this node and has all of its state."""
        self.send(CHECK_STATEMENT)
        assert await self.read_row() == (VARIABLE_VALUE, str(self.rows), node.name)

    async def expect_stayed(self, reason: str) -> None:
        """Check that the session stayed on `old` for this reason."""
        await self.wait_target_released()
        started_at = time.monotonic()
        self.undrain()
        await self.expect_on(self.old)
        if time.monotonic() - started_at < RETRY_SECONDS / 2:
            self.envoy.expect_migration(self.old, reason, "stayed")
        else:  # The migration may have been retried, and may have failed again.
            self.envoy.expect_failures(self.old, reason)

    async def expect_migrated(self, to: ScriptedNode | None = None) -> None:
        """Check that the session has migrated to `to`, by default to `new`."""
        target = to or self.new
        await with_timeout(target.migration_completed.wait())
        await self.expect_on(target)
        self.envoy.expect_migration(self.old, "ok", "moved")

    async def expect_ended(self, error_code: int = 0) -> None:
        """Check that the client gets this error (0: no error) and that the connection is closed."""
        if error_code:
            _, payload = await with_timeout(self.client.read_packet())
            assert payload[0] == 0xFF, payload
            assert int.from_bytes(payload[1:3], "little") == error_code, payload
        assert await with_timeout(self.client.reader.read()) == b""

    async def wait_failure_counted(self, reason: str) -> None:
        """Wait until Envoy reports a migration that failed for this reason. Envoy reports once a second."""

        async def is_reported() -> bool:
            series = await self.envoy.proxy.metrics()
            return series.get(("migrations", (self.old.name, reason, "stayed")), 0) > 0

        await wait_until(is_reported)

    async def wait_target_released(self) -> None:
        """Wait until Envoy has closed its connection to the target."""
        await wait_until(lambda: self.envoy.proxy.descriptor_count() <= self._descriptors)

    async def expect_outcome(self, case: FailureCase) -> None:
        match case.result:
            case "migrates":
                await self.expect_migrated()
            case "ends":
                await self.expect_ended()
            case "lost":
                await self.expect_ended(1053)
                self.envoy.expect_migration(self.old, "lost", "lost")
            case error if error.startswith("ERR-"):
                await self.expect_ended(int(error.removeprefix("ERR-")))
            case _:
                await self.expect_stayed(case.reason)

    async def expect_nothing_left(self) -> None:
        """Disconnect the client. Check that no connection and no additional descriptor of Envoy remains."""
        self.client.writer.transport.abort()
        nodes = (self.old, self.new, self.third)
        for node in nodes:
            node.release_all()
        if not self.envoy.proxy.is_running:
            return
        await wait_until(lambda: not any(node.open_connections for node in nodes))
        await wait_until(lambda: self.envoy.proxy.descriptor_count() <= self.envoy.descriptors)


def to_host(node: ScriptedNode) -> Host:
    return Host(node.endpoint, node.name)


LOGIN_DENIED = frame(2, err(1045, "Access denied for user 'root'@'%' (using password: YES)", "28000"))


class EnvoyStarter(Protocol):
    def __call__(
        self, directory: Path, hosts: Sequence[Host | str], config: ModuleConfig
    ) -> AbstractAsyncContextManager[ModuleEnvoy]: ...


@dataclass
class FaultEnvoy:
    """An Envoy, and its expected counters."""

    proxy: ModuleEnvoy
    endpoints: Path
    tls: ssl.SSLContext | None
    descriptors: int = 0
    """Number of Envoy's descriptors while there are no sessions."""
    scenario_count: int = 0
    target_pair_count: int = 0
    """Number of target pairs that `pause_many` has created."""
    expected_migrations: Counter[tuple[str, ...]] = field(default_factory=Counter)
    expected_failures: set[tuple[str, ...]] = field(default_factory=set)
    ignored_nodes: set[str] = field(default_factory=set)
    """Names of the old nodes of failed scenarios. Their migration counters are not checked."""
    scenario_by_node: dict[str, str] = field(default_factory=dict)
    """Description of each scenario by the name of its old node."""

    def publish(self, *hosts: Host) -> None:
        publish_nodes(self.endpoints, hosts)

    def expect_migration(self, node: ScriptedNode, reason: str, result: str, times: int = 1) -> None:
        """Expect this many migrations from this node with this result."""
        self.expected_migrations[node.name, reason, result] += times

    def expect_failures(self, node: ScriptedNode, reason: str) -> None:
        """Expect one or more failed migrations from this node."""
        self.expected_failures.add((node.name, reason, "stayed"))

    @asynccontextmanager
    async def scenario(
        self, description: object = "", *, third: bool = False, tls: Sequence[ssl.SSLContext | None] = ()
    ) -> AsyncIterator[MigrationScenario]:
        """Open a session with state, which the test migrates. At the end, check that nothing of it remains.

        `tls`: contexts of the old, the new and the third node, if they differ.
        """
        self.scenario_count += 1
        names = (f"old-{self.scenario_count}", "new", "third")
        old, new, other = (
            ScriptedNode(f"{name}.test:4000", context)
            for name, context in zip(names, tls or [self.tls] * 3, strict=True)
        )
        self.scenario_by_node[old.name] = str(description)
        async with old.listening(), new.listening(), other.listening():
            targets = [new, other] if third else [new]
            self.publish(
                to_host(old), *(Host(node.endpoint, node.name, state="draining") for node in targets)
            )
            scenario = MigrationScenario(
                self, old, new, other, await self.connect_on(old), has_no_third_node=not third
            )
            try:
                scenario.send(f"set @a = {VARIABLE_VALUE}", f"insert {scenario.rows}")
                await scenario.expect_insert_ok(0)
                await scenario.expect_insert_ok(scenario.rows)
                yield scenario
                await scenario.expect_nothing_left()
            except BaseException:
                self.ignored_nodes.add(old.name)  # The scenario has already failed.
                scenario.client.writer.transport.abort()
                raise

    async def connect_on(self, node: ScriptedNode) -> RawClient:
        """Connect a client to this node. Retry until Envoy knows the node."""
        while True:
            client = await self.proxy.connect()
            try:
                if (await with_timeout(client.login()))[0] == 0 and node.connections:
                    return client
            except (OSError, EOFError):
                pass
            client.writer.transport.abort()

    async def warm_up(self) -> None:
        """Run one successful migration. Afterwards Envoy has opened all descriptors that it keeps."""
        self.descriptors = 1 << 30
        async with self.scenario("warming up") as scenario:
            scenario.drain()
            await scenario.expect_migrated()
        before = 0
        while before != (before := self.proxy.descriptor_count()):
            await self.proxy.get("/ready")
        self.descriptors = before

    @asynccontextmanager
    async def pause_many(
        self, step: str, count: int = MAX_MIGRATIONS
    ) -> AsyncIterator[tuple[list[RawClient], Callable[[], None]]]:
        """Pause `count` sessions in a step. Yield their clients and a function that releases the sessions.

        Raises TimeoutError if Envoy does not start all migrations. Each target gets half of the sessions.
        """
        # The module counts sessions by node name. If targets of an earlier call had the same names, the ends
        # of that call's sessions would lower the counts of the new targets.
        self.target_pair_count += 1
        names = ("last", f"new-{self.target_pair_count}", f"third-{self.target_pair_count}")
        old, new, third = (ScriptedNode(f"{name}.test:4000", self.tls) for name in names)
        async with old.listening(), new.listening(), third.listening():
            targets = (new, third)
            self.publish(
                to_host(old), *(Host(target.endpoint, target.name, state="draining") for target in targets)
            )
            clients = [await self.connect_on(old) for _ in range(count)]
            for target in targets:
                target.pause_at(step, pauses_all=True)
            self.publish(Host(old.endpoint, old.name, state="draining"), *map(to_host, targets))
            await wait_until(lambda: new.waiting_count + third.waiting_count == count, PAUSE_TIMEOUT_SECONDS)
            assert new.waiting_count == third.waiting_count, "the policy counts sessions that never arrived"

            def release_all() -> None:
                for target in targets:
                    target.release_all()

            yield clients, release_all
            release_all()
            for client in clients:
                client.writer.transport.abort()
            await wait_until(lambda: not any(node.open_connections for node in (old, *targets)))

    async def expect_full_capacity(self) -> None:
        """Check that the full capacity is available after all failures."""
        for step, count in (("connect", MAX_MIGRATIONS), ("login", MAX_PAUSED_SESSIONS)):
            async with self.pause_many(step, count) as (clients, release_all):
                release_all()
                for client in clients:
                    client.writer.write(frames(0, [bytes((MySqlCommand.QUERY,)) + b"still here"]))
                    _, first = await with_timeout(client.read_packet())
                    assert first[0] == 2, first
            self.expected_migrations[DRAINED_NODE, "ok", "moved"] += count

    async def expect_counters(self) -> None:
        """Check that each migration was counted correctly, and that no session remains in any gauge."""
        mismatches: list[dict[str, str]] = [{}]

        async def matches() -> bool:
            mismatches.append(self._counter_mismatches(await self.proxy.metrics()))
            return not mismatches[-1]

        try:
            await wait_until(matches, 5.0)
        except TimeoutError:
            pytest.fail("\n".join(f"{name}: {what}" for name, what in sorted(mismatches[-1].items())))

    def _counter_mismatches(self, series: Mapping[tuple[str, tuple[str, ...]], int]) -> dict[str, str]:
        """Return descriptions of wrong counters."""
        mismatches: dict[str, str] = {}
        counts = {labels: value for (name, labels), value in series.items() if name == "migrations" and value}
        for labels in counts.keys() | self.expected_migrations.keys() | self.expected_failures:
            # Between two scenarios, a session may find no node, or migrate away from the earlier target.
            if labels not in self.expected_migrations and (
                labels[1] == "no_node" or labels[0].startswith("new")
            ):
                continue
            count, expected = counts.get(labels, 0), self.expected_migrations[labels]
            is_correct = count > 0 if labels in self.expected_failures else count == expected
            if labels[0] not in self.ignored_nodes and not is_correct:
                mismatches[f"{self.scenario_by_node.get(labels[0])} {labels}"] = (
                    f"{count} times, not {expected}"
                )
        for (name, labels), value in series.items():
            if name in ("sessions", "sessions_pinned") and value:
                mismatches[f"{self.scenario_by_node.get(labels[0])} {name} {labels}"] = str(value)
        return mismatches


def node_tls_context(certificates: PemFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


@asynccontextmanager
async def run_fault_envoy(
    directory: Path, *, tls: bool = False, start_envoy: EnvoyStarter | None = None
) -> AsyncIterator[FaultEnvoy]:
    """Run a warmed-up Envoy; check its capacity and counters at the end."""
    async with run_fresh_envoy(directory, tls=tls, start_envoy=start_envoy) as envoy:
        await envoy.warm_up()
        yield envoy
        await envoy.expect_full_capacity()
        await envoy.expect_counters()


@asynccontextmanager
async def run_fresh_envoy(
    directory: Path,
    *,
    tls: bool = False,
    start_envoy: EnvoyStarter | None = None,
    policy: Mapping[str, Any] | None = None,
) -> AsyncIterator[FaultEnvoy]:
    """Run an Envoy in which no session has migrated yet. Check nothing at the end.

    `policy`: settings of the load-balancing policy that differ from the defaults.
    """
    endpoints = directory / "endpoints.json"
    certificates = PemFiles.create(directory / "certificates")
    tls_settings = {"tls": "required", "ca": str(certificates.ca), "verify": "ca"}
    config = ModuleConfig(node=tls_settings if tls else {}, policy=policy or {}, endpoints=endpoints)
    context = node_tls_context(certificates) if tls else None
    async with (start_envoy or run_envoy)(directory, [Host("127.0.0.1:1")], config) as proxy:
        yield FaultEnvoy(proxy, endpoints, context)


class FaultEnvoys:
    """The Envoys of a test module: one with TLS to nodes and one without, each started when needed."""

    def __init__(
        self, directory: Path, exit_stack: AsyncExitStack, start_envoy: EnvoyStarter | None = None
    ) -> None:
        self._directory, self._exit_stack, self._start_envoy = directory, exit_stack, start_envoy
        self._by_tls: dict[bool, FaultEnvoy] = {}

    async def envoy_for(self, step: str) -> FaultEnvoy:
        """Return the Envoy in which a session reaches this step."""
        tls = step == "tls"
        if tls not in self._by_tls:
            directory = self._directory / ("tls" if tls else "plain")
            self._by_tls[tls] = await self._exit_stack.enter_async_context(
                run_fault_envoy(directory, tls=tls, start_envoy=self._start_envoy)
            )
        return self._by_tls[tls]

    @asynccontextmanager
    async def scenario(self, case: FailureCase, *, third: bool = False) -> AsyncIterator[MigrationScenario]:
        """Run the scenario of a case."""
        async with (await self.envoy_for(case.step)).scenario(case, third=third) as scenario:
            yield scenario
