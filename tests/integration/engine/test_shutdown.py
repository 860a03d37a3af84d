"""When an engine ends, no task, lock or port remains, and the engine raises the error that ended it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.clock import monotonic_unix_clock
from controlplane.engine.engine import Engine
from controlplane.errors import ConfigError
from controlplane.observe.fact_store import FactStore
from controlplane.storage.file_store import FileStore
from controlplane.xds.server_certificates import ServerCertificates
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from tests.support.controlplane.engine import (
    UNREACHABLE_PD_URL,
    EventRecorder,
    FakeEnvoy,
    healthy_node,
    run_engine,
    settings,
    wait_for_state,
)
from tests.support.controlplane.xds_certificates import XdsPki
from tests.support.waiting import wait_until

Tasks = set[asyncio.Task[Any]]


async def assert_nothing_left(tmp_path: Path, port: int, before: Tasks) -> None:
    """Assert that no task, no directory lock and no listening port remains."""
    await wait_until(lambda: asyncio.all_tasks() <= before)
    async with FileStore(tmp_path / "state").lock():
        pass

    def port_is_free() -> bool:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
                sock.listen()
            except OSError:
                return False
        return True

    await wait_until(port_is_free)


async def test_engine_cancelled_at_any_time_leaves_nothing_behind(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    before = asyncio.all_tasks()
    async with healthy_node() as (sql, _):
        config = settings(
            tmp_path,
            pd={"urls": [UNREACHABLE_PD_URL]},
            xds={"listen": f"127.0.0.1:{port}"},
            nodes=[{"address": sql}, {"address": "localhost:4999"}],
        )
        tasks_before = asyncio.all_tasks()
        # Cancel it after some turns of the event loop, then after some milliseconds, then after its start.
        for steps in (*range(40), *range(40, 200, 8), None):
            engine = Engine(config)
            run = asyncio.create_task(engine.run())
            for _ in range(steps or 0):
                await asyncio.sleep(0 if steps is not None and steps < 40 else 0.0005)
            if steps is None:
                await engine.wait_started()
            run.cancel()
            await asyncio.wait({run}, timeout=30)
            assert run.cancelled(), steps
            await assert_nothing_left(tmp_path, port, tasks_before)
    await wait_until(lambda: asyncio.all_tasks() <= before)


async def test_engine_with_envoys_stops_fast_and_restarts(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    config = settings(tmp_path, xds={"listen": f"127.0.0.1:{port}"})
    for _ in range(2):
        before = asyncio.all_tasks()
        engine = Engine(config)
        run = asyncio.create_task(engine.run())
        await engine.wait_started()
        assert engine.xds_port == port
        async with FakeEnvoy(port) as envoy:
            await envoy.wait_for_endpoints(lambda endpoints: True)
            start = time.monotonic()
            run.cancel()
            await asyncio.wait({run})
            assert time.monotonic() - start < 5.0
        await assert_nothing_left(tmp_path, port, before)


async def test_second_engine_on_the_same_directory_or_port_is_rejected(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    config = settings(tmp_path, xds={"listen": f"127.0.0.1:{port}"})
    async with run_engine(config):
        with pytest.raises(ConfigError, match="state_dir"):
            await Engine(config).run()
        other_config = settings(tmp_path / "other", xds={"listen": f"127.0.0.1:{port}"})
        with pytest.raises(ConfigError, match=r"xds\.listen"):
            await Engine(other_config).run()
    async with run_engine(other_config):  # the failed engines left no lock
        pass


class UnexpectedError(Exception):
    """An exception that no code expects."""


async def fail(*_: object) -> None:
    raise UnexpectedError


class FactFailure:
    """Makes a method of FactStore fail while `is_active` is true. Create this object before the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.is_active = False
        original = getattr(FactStore, method)

        def put(*arguments: object) -> None:
            if self.is_active:
                raise UnexpectedError
            original(*arguments)

        monkeypatch.setattr(FactStore, method, put)

    def activate(self) -> None:
        self.is_active = True


async def assert_engine_fails(engine: Engine, trigger: Callable[[], object]) -> None:
    """Assert that the trigger ends the engine with UnexpectedError, and that the engine closes its port."""
    run = asyncio.create_task(engine.run())
    await engine.wait_started()
    trigger()
    await asyncio.wait({run}, timeout=10)
    assert run.done()
    with pytest.raises(BaseExceptionGroup) as raised:
        run.result()
    assert raised.group_contains(UnexpectedError)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", engine.xds_port)


@pytest.mark.parametrize("fact", ["put_health", "put_resolution", "put_topology"])
async def test_error_in_the_fact_store_ends_the_engine(
    tmp_path: Path, etcd: Etcd, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    async with healthy_node() as (sql, _):
        name = f"localhost:{sql.rpartition(':')[2]}"
        config = settings(tmp_path, pd={"urls": [etcd.url]}, nodes=[{"address": sql}, {"address": name}])
        failure = FactFailure(monkeypatch, fact)
        await assert_engine_fails(Engine(config), failure.activate)


async def test_error_in_a_decision_ends_the_engine(tmp_path: Path) -> None:
    clock = monotonic_unix_clock()
    fails_now = False

    def failing_clock() -> float:
        if fails_now:
            raise UnexpectedError
        return clock()

    def trigger() -> None:
        nonlocal fails_now
        fails_now = True

    await assert_engine_fails(Engine(settings(tmp_path), clock=failing_clock), trigger)


async def test_error_in_the_watch_of_certificates_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = XdsPki(tmp_path)
    engine = Engine(settings(tmp_path, xds={"tls": pki.settings}))
    await assert_engine_fails(engine, lambda: monkeypatch.setattr(ServerCertificates, "refresh", fail))


async def test_error_in_a_load_report_is_logged_and_the_engine_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error ends only the stream of the Envoy that sent the report."""
    failure = FactFailure(monkeypatch, "put_load")
    async with run_engine(settings(tmp_path)) as engine:
        with caplog.at_level(logging.ERROR):
            failure.activate()
            async with FakeEnvoy(engine.xds_port):
                await wait_until(lambda: "UnexpectedError" in caplog.text)
        failure.is_active = False
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_until(lambda: [view.sessions for view in engine.cluster.envoys()] == [0])
            await envoy.wait_for_endpoints(lambda endpoints: endpoints == {})
        caplog.clear()


async def test_event_subscribers_end_with_the_engine(tmp_path: Path) -> None:
    engine = Engine(settings(tmp_path))
    run = asyncio.create_task(engine.run())
    await engine.wait_started()
    events = engine.events.subscribe()
    reader = asyncio.create_task(anext(events, None))
    run.cancel()
    await asyncio.wait({run})
    assert await asyncio.wait_for(reader, 5) is None
    assert await asyncio.wait_for(anext(engine.events.subscribe(), None), 5) is None


async def test_event_ids_increase_over_a_restart(tmp_path: Path) -> None:
    last = 0
    for _ in range(2):
        async with (
            healthy_node() as (sql, _),
            run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine,
        ):
            await wait_for_state(engine, sql, "active")
            recorder = EventRecorder(engine)
            event = await recorder.wait_for("node.discovered")
            assert event.id > last
            await recorder.wait_for("node.state")
            last = recorder.recorded[-1].id
