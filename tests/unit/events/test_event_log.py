"""The memory of events: nobody who reads misses one in silence, and nobody who does not read costs memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

from controlplane.events.event_log import EventLog
from controlplane.model.events import Event

KEPT = 1000


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(log: EventLog, count: int) -> list[int]:
    return [log.append("node.state", "a:1", f"message {n}").id for n in range(count)]


async def read(events: AsyncIterator[Event], count: int) -> list[int]:
    async with asyncio.timeout(5):
        return [(await anext(events)).id for _ in range(count)]


async def test_a_reader_gets_what_happens_from_its_call_on() -> None:
    log = EventLog(Clock())
    told(log, 1)
    events = log.subscribe()
    between = told(log, 2)  # before the reader looks for the first time
    assert await read(events, 2) == between
    later = told(log, 1)
    assert await read(events, 1) == later


async def test_a_reader_that_comes_back_gets_what_it_missed_once() -> None:
    log = EventLog(Clock())
    ids = told(log, 5)
    events = log.subscribe(after_id=ids[1])
    ids += told(log, 2)
    assert await read(events, 5) == ids[2:]


async def test_ids_grow_over_restarts_and_within_one_moment() -> None:
    clock = Clock()
    first = told(EventLog(clock), 100)
    clock.now += 1.0  # a restart takes longer than this
    second = told(EventLog(clock), 3)
    assert first == sorted(set(first))
    assert second[0] > first[-1]


async def test_only_the_latest_are_kept() -> None:
    log = EventLog(Clock())
    ids = told(log, KEPT + 5)
    assert await read(log.subscribe(after_id=0), KEPT) == ids[5:]


async def test_a_reader_of_all_that_is_kept_is_not_taken_for_a_slow_one() -> None:
    log = EventLog(Clock())
    ids = told(log, KEPT)
    events = log.subscribe(after_id=0)
    ids += told(log, 3)
    assert await read(events, KEPT + 3) == ids


async def test_a_reader_that_has_stopped_reading_is_cut_off_after_what_it_had_coming() -> None:
    log = EventLog(Clock())
    slow, quick = log.subscribe(), log.subscribe()
    ids = []
    for _ in range(KEPT + 10):
        ids += told(log, 1)
        assert await read(quick, 1) == ids[-1:]
    got = [event.id async for event in slow]
    assert got == ids[:KEPT]


async def test_readers_that_are_dropped_are_forgotten() -> None:
    log = EventLog(Clock())
    never, begun, kept = log.subscribe(), log.subscribe(), log.subscribe()
    told(log, 1)
    await anext(begun)
    assert len(log._readers) == 3
    del never
    await begun.aclose()
    gc.collect()
    assert len(log._readers) == 1
    assert await read(kept, 1)


async def test_a_reader_that_is_cancelled_and_closed_is_forgotten() -> None:
    log = EventLog(Clock())
    events = log.subscribe()
    waiting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await events.aclose()
    del events, waiting
    gc.collect()
    assert len(log._readers) == 0


async def test_closing_ends_all_readers_those_to_come_too() -> None:
    log = EventLog(Clock())
    early = log.subscribe()
    ids = told(log, 2)
    log.close()
    assert [event.id async for event in early] == ids
    assert [event.id async for event in log.subscribe()] == []
    assert [event.id async for event in log.subscribe(after_id=0)] == ids
