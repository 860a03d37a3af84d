"""Runs actions and login probes in the background, and stops actions when leadership is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.config.rollouts import ActionSettings
from controlplane.config.settings import Settings
from controlplane.rollouts.actions import actions, login_probe
from controlplane.rollouts.actions.actions import ActionContext
from controlplane.rollouts.actions.leadership_guard import run_during_term
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import LoginResult

log = structlog.get_logger("tidevoy.rollouts")

# Time between two login probes of a node.
_LOGIN_RETRY_SECONDS = 1.0


class ActionRunner:
    """Runs actions and probes as tasks of the caller's group, and sets `wake` when one of them has ended."""

    def __init__(
        self, clock: Clock, term: Callable[[], int | None], metrics: RolloutMetrics, wake: asyncio.Event
    ) -> None:
        self.running: set[ActionContext] = set()
        self.outcomes: dict[ActionContext, str] = {}  # why an ended action failed; empty if it succeeded
        self.logins: dict[str, LoginResult] = {}  # latest result by address
        self._clock = clock
        self._term = term
        self._metrics = metrics
        self._wake = wake
        self._probing: set[str] = set()

    def start(
        self, tasks: asyncio.TaskGroup, context: ActionContext, action: ActionSettings | None, term: int
    ) -> None:
        """Start an action; the end of `term` cancels it. `action` is None if it is no longer configured."""
        if action is None:
            self.outcomes[context] = "was not started, because it is no longer in the configuration"
            self._wake.set()
            return
        self.running.add(context)
        tasks.create_task(self._run(context, action, term), name=f"action for {context.address}")

    def probe_login(self, tasks: asyncio.TaskGroup, address: str, endpoint: str, settings: Settings) -> None:
        """Start a login probe of a node, unless one is running or began less than a second ago."""
        latest = self.logins.get(address)
        if address in self._probing or (latest and self._clock() - latest.at < _LOGIN_RETRY_SECONDS):
            return
        self._probing.add(address)
        tasks.create_task(self._probe(address, endpoint, settings), name=f"login probe of {address}")

    async def _run(self, context: ActionContext, action: ActionSettings, term: int) -> None:
        started_at = self._clock()
        try:
            outcome = await run_during_term(_run_action(action, context), self._term, term)
            if outcome is not None:
                self.outcomes[context] = outcome
            else:
                log.warning("an action was canceled after a loss of leadership", node=context.address)
        finally:
            self.running.discard(context)
            seconds = self._clock() - started_at
            self._metrics.count_action(context.action, self.outcomes.get(context), seconds)
            self._wake.set()

    async def _probe(self, address: str, endpoint: str, settings: Settings) -> None:
        started_at, probe = self._clock(), settings.rollouts.probe
        uses_proxy_protocol = settings.backend.proxy_protocol != "off"
        host, _ = addresses.split(address)
        try:
            problem = await login_probe.probe_login(endpoint, host, probe, proxy_protocol=uses_proxy_protocol)
        except Exception as error:
            problem = _describe_bug("failed the login probe", error)
        self.logins[address] = LoginResult(started_at, problem)
        self._probing.discard(address)
        self._wake.set()


async def _run_action(action: ActionSettings, context: ActionContext) -> str:
    try:
        return await actions.run_action(action, context)
    except Exception as error:
        return _describe_bug("failed and may have been executed", error)


def _describe_bug(problem: str, error: Exception) -> str:
    """Log an unexpected exception and return it as a problem, which fails the step of one node only."""
    log.error("an action or a login probe failed with an internal error", exc_info=error)
    return f"{problem}: internal error ({type(error).__name__})"
