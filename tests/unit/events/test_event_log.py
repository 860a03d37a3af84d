"""The event log: resuming readers get missed events, and slow or dropped readers use bounded memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import Event

MAX_KEPT_EVENTS = 1000


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def append_events(log: EventLog, count: int) -> list[int]:
    ids = []
    for number in range(count):
        log.emit("node.state", "a:1", f"message {number}")
        ids.append(log._recent_events[-1].id)
    return ids


async def read(events: AsyncIterator[Event], count: int) -> list[int]:
    async with asyncio.timeout(5):
        return [(await anext(events)).id for _ in range(count)]


async def test_reader_gets_events_from_its_subscription_on() -> None:
    log = EventLog(Clock())
    append_events(log, 1)
    events = log.subscribe()
    unread_ids = append_events(log, 2)  # before the first read
    assert await read(events, 2) == unread_ids
    later_ids = append_events(log, 1)
    assert await read(events, 1) == later_ids


async def test_resuming_reader_gets_missed_events_once() -> None:
    log = EventLog(Clock())
    ids = append_events(log, 5)
    events = log.subscribe(after_id=ids[1])
    ids += append_events(log, 2)
    assert await read(events, 5) == ids[2:]


async def test_ids_increase_across_restarts_and_at_the_same_time() -> None:
    clock = Clock()
    first_ids = append_events(EventLog(clock), 100)
    clock.now += 1.0  # a restart takes longer than this
    second_ids = append_events(EventLog(clock), 3)
    assert first_ids == sorted(set(first_ids))
    assert second_ids[0] > first_ids[-1]


async def test_only_latest_events_are_kept() -> None:
    log = EventLog(Clock())
    ids = append_events(log, MAX_KEPT_EVENTS + 5)
    assert await read(log.subscribe(after_id=0), MAX_KEPT_EVENTS) == ids[5:]


async def test_reader_of_all_kept_events_does_not_count_as_slow() -> None:
    log = EventLog(Clock())
    ids = append_events(log, MAX_KEPT_EVENTS)
    events = log.subscribe(after_id=0)
    ids += append_events(log, 3)
    assert await read(events, MAX_KEPT_EVENTS + 3) == ids


async def test_slow_reader_ends_after_its_queued_events() -> None:
    log = EventLog(Clock())
    slow, fast = log.subscribe(), log.subscribe()
    ids = []
    for _ in range(MAX_KEPT_EVENTS + 10):
        ids += append_events(log, 1)
        assert await read(fast, 1) == ids[-1:]
    slow_ids = [event.id async for event in slow]
    assert slow_ids == ids[:MAX_KEPT_EVENTS]


async def test_dropped_readers_are_forgotten() -> None:
    log = EventLog(Clock())
    unread, closed, active = log.subscribe(), log.subscribe(), log.subscribe()
    append_events(log, 1)
    await anext(closed)
    assert len(log._readers) == 3
    del unread
    await closed.aclose()
    gc.collect()
    assert len(log._readers) == 1
    assert await read(active, 1)


async def test_cancelled_and_closed_reader_is_forgotten() -> None:
    log = EventLog(Clock())
    events = log.subscribe()
    read_task = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    read_task.cancel()
    await asyncio.wait({read_task})
    assert read_task.cancelled()
    await events.aclose()
    del events, read_task
    gc.collect()
    assert len(log._readers) == 0


async def test_close_ends_current_and_future_readers() -> None:
    log = EventLog(Clock())
    reader = log.subscribe()
    ids = append_events(log, 2)
    log.close()
    assert [event.id async for event in reader] == ids
    assert [event.id async for event in log.subscribe()] == []
    assert [event.id async for event in log.subscribe(after_id=0)] == ids


async def test_events_of_other_replicas_are_not_forwarded_to_them() -> None:
    log = EventLog(Clock())
    forwarded = log.events_to_forward()
    log.record_unforwarded("envoy.nack", "envoy-2", "rejected", {})
    log.emit("envoy.nack", "envoy-1", "rejected", {"version": "1"})
    event = await asyncio.wait_for(anext(forwarded), 5)
    assert (event.subject, event.data) == ("envoy-1", {"version": "1"})
    subjects = [event.subject async for event in _until_closed(log)]
    assert subjects == ["envoy-2", "envoy-1"]
    await forwarded.aclose()


async def test_events_to_forward_are_bounded() -> None:
    log = EventLog(Clock())
    forwarded = log.events_to_forward()
    ids = append_events(log, MAX_KEPT_EVENTS + 5)  # the reader does not run meanwhile
    assert await read(forwarded, MAX_KEPT_EVENTS) == ids[5:]
    ids = append_events(log, 1)
    assert await read(forwarded, 1) == ids
    await forwarded.aclose()


def _until_closed(log: EventLog) -> AsyncIterator[Event]:
    events = log.subscribe(after_id=0)
    log.close()
    return events
