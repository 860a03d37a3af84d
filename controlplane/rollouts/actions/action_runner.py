"""Runs actions and login probes in the background, and stops actions when leadership is lost."""

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

# How often a running action checks that this replica still leads.
_TERM_CHECK_SECONDS = 0.2
# Time between two login probes of a node.
_LOGIN_RETRY_SECONDS = 1.0

ActionKey = tuple[str, str, int]  # rollout, node, attempt


class ActionRunner:
    """The running actions and probes. `on_end` is called when there is a result to record."""

    def __init__(
        self,
        clock: Clock,
        term: Callable[[], int | None],
        metrics: RolloutMetrics,
        on_end: Callable[[], None],
    ) -> None:
        self.outcomes: dict[ActionKey, str] = {}  # of ended actions: why they failed, or empty
        self.logins: dict[str, LoginResult] = {}  # the latest, by address
        self._clock = clock
        self._term = term
        self._metrics = metrics
        self._on_end = on_end
        self._action_tasks: dict[ActionKey, asyncio.Task[None]] = {}
        self._login_tasks: dict[str, asyncio.Task[None]] = {}

    def is_running(self, key: ActionKey) -> bool:
        """Return whether an action is running here, or its outcome is not recorded yet."""
        return key in self._action_tasks or key in self.outcomes

    def start(self, context: ActionContext, action: ActionSettings | None, term: int) -> None:
        """Start an action, which stops at the end of our `term`. None: it is no longer configured."""
        key = (context.rollout, context.address, context.attempt)
        if action is None:
            self.outcomes[key] = "was not started, because it is no longer in the configuration"
            self._on_end()
            return
        task = asyncio.create_task(
            self._run(key, context, action, term), name=f"action for {context.address}"
        )
        self._action_tasks[key] = task

    def probe_login(self, address: str, open_session: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Start a login probe of a node, unless one is running or has just ended."""
        latest = self.logins.get(address)
        if address in self._login_tasks or (latest and self._clock() - latest.at < _LOGIN_RETRY_SECONDS):
            return
        self._login_tasks[address] = asyncio.create_task(self._run_login(address, open_session))

    async def stop(self) -> None:
        """Cancel all running actions and probes, and wait for their end."""
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
                    "an action is canceled, because this control plane lost leadership", node=context.address
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
    """Return why an action failed, or an empty string. An exception here fails only this action."""
    error = action_task.exception()
    if error is not None:
        log.error("an action failed with an internal error", exc_info=error)
        return f"failed with an internal error ({type(error).__name__}) and may have been executed"
    return action_task.result()
