"""Actions and logins that are under way: begun once, watched, and ended with our lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.config.rollouts import ActionSettings
from controlplane.rollouts.actions import actions
from controlplane.rollouts.actions.actions import ActionContext
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import LoginResult

log = structlog.get_logger("tidevoy.rollouts")

# Seconds between two looks at whether we still lead, while an action runs.
_TERM_CHECK_SECONDS = 0.2
# Seconds between two tries to log in to a node.
_LOGIN_RETRY_SECONDS = 1.0

ActionKey = tuple[str, str, int]  # rollout, node, attempt


class ActionRunner:
    """What is under way. `on_end` is called when there is something to be recorded."""

    def __init__(
        self,
        clock: Clock,
        term: Callable[[], int | None],
        metrics: RolloutMetrics,
        on_end: Callable[[], None],
    ) -> None:
        self.outcomes: dict[ActionKey, str] = {}  # of actions that have ended: how they failed, or nothing
        self.logins: dict[str, LoginResult] = {}  # the latest, by address
        self._clock = clock
        self._term = term
        self._metrics = metrics
        self._on_end = on_end
        self._action_tasks: dict[ActionKey, asyncio.Task[None]] = {}
        self._login_tasks: dict[str, asyncio.Task[None]] = {}

    def is_running(self, key: ActionKey) -> bool:
        """Whether an action is under way here, or its outcome is still to be recorded."""
        return key in self._action_tasks or key in self.outcomes

    def start(self, context: ActionContext, action: ActionSettings | None, term: int) -> None:
        """Begin an action, which is known under this name or not any more. It ends with our `term`."""
        key = (context.rollout, context.address, context.attempt)
        if action is None:
            self.outcomes[key] = "was not begun, for it is not in the configuration any more"
            self._on_end()
            return
        task = asyncio.create_task(
            self._run(key, context, action, term), name=f"action for {context.address}"
        )
        self._action_tasks[key] = task

    def probe_login(self, address: str, open_session: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Try a session on a node, unless that is under way or was just tried."""
        latest = self.logins.get(address)
        if address in self._login_tasks or (latest and self._clock() - latest.at < _LOGIN_RETRY_SECONDS):
            return
        self._login_tasks[address] = asyncio.create_task(self._run_login(address, open_session))

    async def stop(self) -> None:
        """End all that is under way."""
        tasks = [*self._action_tasks.values(), *self._login_tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await run_to_completion(asyncio.wait(tasks))

    async def _run(self, key: ActionKey, context: ActionContext, action: ActionSettings, term: int) -> None:
        started_at = self._clock()
        action_task = asyncio.create_task(actions.run_action(action, context))
        result = "cut_off"
        try:
            while not action_task.done() and self._term() == term:
                await asyncio.wait({action_task}, timeout=_TERM_CHECK_SECONDS)
            if not action_task.done():
                log.warning(
                    "an action is cut off, for this control plane lost its lead", node=context.address
                )
                return
            problem = _describe_outcome(action_task)
            self.outcomes[key] = problem
            result = "failed" if problem else "ok"
        finally:
            if not action_task.done():
                action_task.cancel()
                await run_to_completion(asyncio.wait({action_task}))
            seconds = self._clock() - started_at if result != "cut_off" else None
            self._metrics.count_action(context.action, result, seconds)
            del self._action_tasks[key]
            self._on_end()

    async def _run_login(self, address: str, open_session: Callable[[], Coroutine[Any, Any, str]]) -> None:
        started_at = self._clock()
        try:
            self.logins[address] = LoginResult(started_at, await open_session())
        finally:
            del self._login_tasks[address]
            self._on_end()


def _describe_outcome(action_task: asyncio.Task[str]) -> str:
    """What came of an action; one that we failed at has failed, and nothing else stops for it."""
    error = action_task.exception()
    if error is not None:
        log.error("an action failed within the control plane", exc_info=error)
        return f"failed within the control plane ({type(error).__name__}), and may have been carried out"
    return action_task.result()
