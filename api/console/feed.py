"""The events that the console shows, and who waits for new ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from controlplane.engine.engine import Engine
from controlplane.model.events import Event

_KEPT = 1000
_PAUSE = 1.0  # seconds after which the events are asked for again, when they have ended


class Feed:
    """The last events of an engine, in the order in which they happened."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._news = asyncio.Event()

    async def follow(self, engine: Engine) -> None:
        """Take over the engine's events until cancelled."""
        while True:
            async for event in engine.events(self._kept[-1].id if self._kept else 0):
                self.append(event)
            # Cut off because we were late, or because the engine ends.
            await asyncio.sleep(_PAUSE)

    def append(self, event: Event) -> None:
        """One more."""
        self._kept.append(event)
        self._news.set()
        self._news = asyncio.Event()

    @property
    def last(self) -> int:
        """The id of the latest event; 0: there was none."""
        return self._kept[-1].id if self._kept else 0

    def events(self, after: int = 0) -> Sequence[Event]:
        """Those that are kept with an id above `after`."""
        if after >= self.last:
            return ()
        return [event for event in self._kept if event.id > after]

    async def news(self, after: int) -> None:
        """Returns when there is an event with an id above `after`."""
        while self.last <= after:
            await self._news.wait()
