"""Actions and logins that are under way: begun once, watched, and ended with our lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from controlplane.aio import uninterrupted
from controlplane.clock import Clock
from controlplane.config.rollouts import Action
from controlplane.rollouts.actions import actions
from controlplane.rollouts.actions.actions import Errand
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import Login

log = structlog.get_logger("tidevoy.rollouts")

# Seconds between two looks at whether we still lead, while an action runs.
_WATCH = 0.2
# Seconds between two tries to log in to a node.
_LOGIN_AGAIN = 1.0

Key = tuple[str, str, int]  # rollout, node, attempt


class Errands:
    """What is under way. `on_end` is called when there is something to be recorded."""

    def __init__(
        self,
        clock: Clock,
        term: Callable[[], int | None],
        metrics: RolloutMetrics,
        on_end: Callable[[], None],
    ) -> None:
        self.outcomes: dict[Key, str] = {}  # of actions that have ended: how they failed, or nothing
        self.logins: dict[str, Login] = {}  # the latest, by address
        self._clock = clock
        self._term = term
        self._metrics = metrics
        self._on_end = on_end
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}

    def at(self, key: Key) -> bool:
        """Whether an action is under way here, or its outcome is still to be recorded."""
        return key in self._running or key in self.outcomes

    def begin(self, errand: Errand, action: Action | None, term: int) -> None:
        """Begin an action, which is known under this name or not any more. It ends with our `term`."""
        key = (errand.rollout, errand.address, errand.attempt)
        if action is None:
            self.outcomes[key] = "was not begun, for it is not in the configuration any more"
            self._on_end()
            return
        task = asyncio.create_task(self._run(key, errand, action, term), name=f"action for {errand.address}")
        self._running[key] = task

    def log_in(self, address: str, attempt: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Try a session on a node, unless that is under way or was just tried."""
        latest = self.logins.get(address)
        if address in self._trying or (latest and self._clock() - latest.at < _LOGIN_AGAIN):
            return
        self._trying[address] = asyncio.create_task(self._try(address, attempt))

    async def stop(self) -> None:
        """End all that is under way."""
        tasks = [*self._running.values(), *self._trying.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await uninterrupted(asyncio.wait(tasks))

    async def _run(self, key: Key, errand: Errand, action: Action, term: int) -> None:
        began = self._clock()
        work = asyncio.create_task(actions.perform(action, errand))
        result = "cut_off"
        try:
            while not work.done() and self._term() == term:
                await asyncio.wait({work}, timeout=_WATCH)
            if not work.done():
                log.warning("an action is cut off, for this control plane lost its lead", node=errand.address)
                return
            problem = _outcome(work)
            self.outcomes[key] = problem
            result = "failed" if problem else "ok"
        finally:
            if not work.done():
                work.cancel()
                await uninterrupted(asyncio.wait({work}))
            seconds = self._clock() - began if result != "cut_off" else None
            self._metrics.count_action(errand.action, result, seconds)
            del self._running[key]
            self._on_end()

    async def _try(self, address: str, attempt: Callable[[], Coroutine[Any, Any, str]]) -> None:
        began = self._clock()
        try:
            self.logins[address] = Login(began, await attempt())
        finally:
            del self._trying[address]
            self._on_end()


def _outcome(work: asyncio.Task[str]) -> str:
    """What came of an action; one that we failed at has failed, and nothing else stops for it."""
    error = work.exception()
    if error is not None:
        log.error("an action failed within the control plane", exc_info=error)
        return f"failed within the control plane ({type(error).__name__}), and may have been carried out"
    return work.result()
