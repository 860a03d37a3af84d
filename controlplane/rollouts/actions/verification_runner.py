"""Runs verifications in the background, one after another, while this control plane leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from controlplane.clock import Clock
from controlplane.config.rollouts import VerificationSettings
from controlplane.rollouts.actions import verification
from controlplane.rollouts.actions.leadership_guard import run_during_term
from controlplane.rollouts.actions.verification import VerificationRequest
from controlplane.rollouts.observation import VerificationResult

log = structlog.get_logger("tidevoy.rollouts")


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """One verification: the rollout, the node, and when the node began to be verified."""

    rollout: str
    address: str
    since: float


class VerificationRunner:
    """Runs verifications as tasks of the caller's group, and sets `wake` when one of them has ended."""

    def __init__(self, clock: Clock, term: Callable[[], int | None], wake: asyncio.Event) -> None:
        self.results: dict[VerificationKey, VerificationResult] = {}
        self._clock = clock
        self._term = term
        self._wake = wake
        self._tasks: dict[VerificationKey, asyncio.Task[None]] = {}
        # Two replays at the same time would slow each other down, and the old node, which serves clients.
        self._lock = asyncio.Lock()

    def is_known(self, key: VerificationKey) -> bool:
        """Return whether this verification runs, or has a result."""
        return key in self._tasks or key in self.results

    def start(
        self,
        tasks: asyncio.TaskGroup,
        key: VerificationKey,
        build_request: Callable[[], VerificationRequest],
        settings: Callable[[], VerificationSettings],
        term: int,
    ) -> None:
        """Start a verification once those before it have ended; the end of `term` cancels it."""
        name = f"verification of {key.address}"
        task = tasks.create_task(self._run(key, build_request, settings, term), name=name)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._on_end(key))

    def retain(self, keys: Collection[VerificationKey]) -> None:
        """Cancel all verifications but these, and forget their results."""
        for key in self._tasks.keys() - set(keys):
            self._tasks[key].cancel()
        for key in self.results.keys() - set(keys):
            del self.results[key]

    async def _run(
        self,
        key: VerificationKey,
        build_request: Callable[[], VerificationRequest],
        settings: Callable[[], VerificationSettings],
        term: int,
    ) -> None:
        async with self._lock:
            log.info("a node is verified", node=key.address, rollout=key.rollout)
            work = _run_reporting_errors(build_request, settings, self._clock())
            result = await run_during_term(work, self._term, term)
        if result is not None:
            self.results[key] = result

    def _on_end(self, key: VerificationKey) -> None:
        del self._tasks[key]
        self._wake.set()


async def _run_reporting_errors(
    build_request: Callable[[], VerificationRequest],
    settings: Callable[[], VerificationSettings],
    now: float,
) -> VerificationResult:
    try:
        return await verification.run_verification(build_request(), settings(), now)
    except Exception as error:
        log.error("a verification failed with an internal error", exc_info=error)
        return VerificationResult(f"internal error ({type(error).__name__})")
