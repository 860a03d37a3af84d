"""Debounced writes: the latest value is written, at a bounded rate, and no change is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from controlplane.errors import StateUnavailable, VersionConflict
from controlplane.storage import debounced_writer
from controlplane.storage.debounced_writer import DebouncedWriter
from tests.support.waiting import assert_never, wait_until


class Writer(DebouncedWriter):
    """Records what it writes. Each write waits for `go_on`, and then raises the next of `errors`, if any."""

    def __init__(self) -> None:
        self.counter = Counter("failures", "", registry=CollectorRegistry())
        super().__init__("the value", self.counter)
        self.value = 0
        self.written: list[int] = []
        self.errors: list[Exception] = []
        self.pause = 0.0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.is_writing = False

    async def _write(self) -> float:
        value, self.is_writing = self.value, True
        await self.go_on.wait()
        self.is_writing = False
        if self.errors:
            raise self.errors.pop(0)
        self.written.append(value)
        return self.pause

    def change(self, value: int, *, is_urgent: bool = False) -> None:
        self.value = value
        self.mark_changed(is_urgent=is_urgent)


@pytest.fixture
async def writer() -> AsyncIterator[Writer]:
    writer = Writer()
    running = asyncio.create_task(writer.run())
    yield writer
    running.cancel()
    await asyncio.wait({running})


async def test_changes_during_a_write_are_written_together_after_it(writer: Writer) -> None:
    writer.go_on.clear()
    writer.change(1)
    await wait_until(lambda: writer.is_writing)
    writer.change(2)
    writer.change(3)
    writer.go_on.set()
    await wait_until(lambda: writer.written == [1, 3])


async def test_only_an_urgent_change_is_written_during_the_pause(writer: Writer) -> None:
    writer.pause = 3600.0
    writer.change(1)
    await wait_until(lambda: writer.written == [1])
    writer.change(2)
    await assert_never(lambda: writer.written != [1], 0.1)
    writer.change(3, is_urgent=True)
    await wait_until(lambda: writer.written == [1, 3])


async def test_failed_write_is_counted_and_tried_again(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debounced_writer, "_MIN_RETRY_SECONDS", 0.001)
    writer.errors = [
        StateUnavailable("value", "no"),
        VersionConflict("value"),
        StateUnavailable("value", "no"),
    ]
    writer.change(1)
    await wait_until(lambda: writer.written == [1])
    assert writer.counter._value.get() == 3.0


async def test_pauses_between_failures_grow(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debounced_writer, "_MIN_RETRY_SECONDS", 0.05)
    loop = asyncio.get_running_loop()
    writer.errors = [StateUnavailable("value", "no")] * 3
    start = loop.time()
    writer.change(1)
    await wait_until(lambda: writer.written == [1])
    assert loop.time() - start >= 0.05 + 0.1 + 0.2


async def test_cancelled_write_is_done_at_the_end() -> None:
    writer = Writer()
    running = asyncio.create_task(writer.run())
    writer.go_on.clear()
    writer.change(1)
    await wait_until(lambda: writer.is_writing)
    running.cancel()
    await asyncio.wait({running})
    assert writer.written == []
    writer.go_on.set()
    assert await writer.save() == 0.0
    assert writer.written == [1]


async def test_unchanged_value_is_written_periodically(writer: Writer) -> None:
    writer._max_interval = 0.01
    writer.change(1)
    await wait_until(lambda: writer.written[:3] == [1, 1, 1])
