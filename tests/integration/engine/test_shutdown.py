"""However an engine ends, nothing of it is left, and what it dies of is not kept quiet."""

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
from controlplane.storage.file_store import FileStore
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
from tests.support.waiting import wait_until

Tasks = set[asyncio.Task[Any]]


async def nothing_is_left(tmp_path: Path, port: int, before: Tasks) -> None:
    """No task, no lock on the directory, no listening port."""
    await wait_until(lambda: asyncio.all_tasks() <= before, 5)
    async with FileStore(tmp_path / "state").lock():
        pass

    def free() -> bool:
        with socket.socket() as claim:
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind(("127.0.0.1", port))
                claim.listen()
            except OSError:
                return False
        return True

    await wait_until(free, 5)


async def test_an_engine_cancelled_at_any_time_leaves_nothing_behind(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    before = asyncio.all_tasks()
    async with healthy_node() as (sql, _):
        wanted = settings(
            tmp_path,
            pd={"urls": [UNREACHABLE_PD_URL]},
            xds={"listen": f"127.0.0.1:{port}"},
            nodes=[{"address": sql}, {"address": "localhost:4999"}],
        )
        kept = asyncio.all_tasks()
        reached = set()
        for turns in [*range(40), *range(40, 200, 8)]:
            engine = Engine(wanted)
            run = asyncio.create_task(engine.run())
            for _ in range(turns):
                await asyncio.sleep(0 if turns < 40 else 0.0005)
            reached.add(engine.readiness_problems()[0] == "the control plane is starting")
            run.cancel()
            await asyncio.wait({run}, timeout=10)
            assert run.cancelled(), turns
            await nothing_is_left(tmp_path, port, kept)
        assert reached == {True, False}
    await wait_until(lambda: asyncio.all_tasks() <= before, 5)


async def test_an_engine_with_envoys_ends_at_once_and_again_starts(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    wanted = settings(tmp_path, xds={"listen": f"127.0.0.1:{port}"})
    for _ in range(2):
        before = asyncio.all_tasks()
        engine = Engine(wanted)
        run = asyncio.create_task(engine.run())
        await engine.wait_started()
        assert engine.xds_port == port
        async with FakeEnvoy(port) as envoy:
            await envoy.wait_for_endpoints(lambda endpoints: True)
            began = time.monotonic()
            run.cancel()
            await asyncio.wait({run})
            assert time.monotonic() - began < 2.0
        await nothing_is_left(tmp_path, port, before)


async def test_a_second_engine_on_the_directory_or_the_port_is_refused(tmp_path: Path, ports: Ports) -> None:
    port = ports.allocate()
    wanted = settings(tmp_path, xds={"listen": f"127.0.0.1:{port}"})
    async with run_engine(wanted):
        with pytest.raises(ConfigError, match="state_dir"):
            await Engine(wanted).run()
        elsewhere = settings(tmp_path / "other", xds={"listen": f"127.0.0.1:{port}"})
        with pytest.raises(ConfigError, match=r"xds\.listen"):
            await Engine(elsewhere).run()
    async with run_engine(elsewhere):  # what failed before left no lock
        pass


class Broken(Exception):
    """What a bug would raise."""


def breaks(*_: object, **__: object) -> None:
    raise Broken


async def dies(engine: Engine, trigger: Callable[[], object]) -> None:
    """The engine ends with the error, and everything that it had opened is closed."""
    run = asyncio.create_task(engine.run())
    await engine.wait_started()
    trigger()
    await asyncio.wait({run}, timeout=10)
    assert run.done()
    with pytest.raises(BaseExceptionGroup) as caught:
        run.result()
    assert caught.group_contains(Broken)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", engine.xds_port)


@pytest.mark.parametrize("fact", ["put_health", "put_resolution", "put_topology"])
async def test_a_bug_in_what_takes_facts_in_ends_the_engine(
    tmp_path: Path, etcd: Etcd, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    async with healthy_node() as (sql, _):
        name = f"localhost:{sql.rpartition(':')[2]}"
        wanted = settings(tmp_path, pd={"urls": [etcd.url]}, nodes=[{"address": sql}, {"address": name}])
        engine = Engine(wanted)
        await dies(engine, lambda: monkeypatch.setattr(engine._facts, fact, breaks))


async def test_a_bug_in_the_decision_ends_the_engine(tmp_path: Path) -> None:
    clock = monotonic_unix_clock()
    late = False

    def time_or_not() -> float:
        if late:
            raise Broken
        return clock()

    def trigger() -> None:
        nonlocal late
        late = True

    await dies(Engine(settings(tmp_path), clock=time_or_not), trigger)


async def test_a_bug_in_a_load_report_is_logged_and_the_engine_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream of one Envoy is all that an error in a report may cost."""
    async with run_engine(settings(tmp_path)) as engine:
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(engine._facts, "put_load", breaks)
            async with FakeEnvoy(engine.xds_port):
                await wait_until(lambda: "Broken" in caplog.text)
        async with FakeEnvoy(engine.xds_port) as envoy:
            await wait_until(lambda: engine.envoys()[0].sessions == 0)
            assert envoy.published
        caplog.clear()


async def test_readers_of_events_end_with_the_engine(tmp_path: Path) -> None:
    engine = Engine(settings(tmp_path))
    run = asyncio.create_task(engine.run())
    await engine.wait_started()
    events = engine.events()
    reader = asyncio.create_task(anext(events, None))
    run.cancel()
    await asyncio.wait({run})
    assert await asyncio.wait_for(reader, 5) is None
    assert await asyncio.wait_for(anext(engine.events(), None), 5) is None


async def test_event_ids_grow_over_a_restart(tmp_path: Path) -> None:
    last = 0
    for _ in range(2):
        async with (
            healthy_node() as (sql, _),
            run_engine(settings(tmp_path, nodes=[{"address": sql}])) as engine,
        ):
            await wait_for_state(engine, sql, "active")
            told = EventRecorder(engine)
            event = await told.wait_for("node.discovered")
            assert event.id > last
            await told.wait_for("node.state")
            last = told.recorded[-1].id
