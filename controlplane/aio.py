"""Threads for blocking calls, tasks by key, and coroutines that finish even if their caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

import structlog

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
P = ParamSpec("P")

log = structlog.get_logger("tidevoy.aio")


class ThreadPool:
    """At most `max_threads` threads for one kind of blocking call: a hanging call delays only its own kind.

    They are daemon threads, so an exiting process does not wait for hanging or queued calls, as it would with
    a `ThreadPoolExecutor` (used by `asyncio.to_thread`).
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._thread_count = 0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in one of the threads. A queued call that is cancelled never starts.

        Raises RuntimeError if the first thread cannot start.
        """
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        if self._thread_count < self._max_threads:
            try:
                threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
                self._thread_count += 1
            except RuntimeError:  # at the limit of this process's threads
                if not self._thread_count:
                    future.cancel()
                    raise
        return await asyncio.wrap_future(future)

    def _run_calls(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # otherwise the waiting thread would keep the last result in memory


class KeyedTasks(Generic[K]):
    """Tasks that are started and cancelled by key while `run` runs. If a task fails, `run` fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[K, asyncio.Task[None]] = {}

    @property
    def is_running(self) -> bool:
        """Whether tasks can be started."""
        return self._group is not None

    def running_keys(self) -> frozenset[K]:
        """Return the keys that have a task."""
        return frozenset(self._tasks)

    async def run(self, start_tasks: Callable[[], None]) -> None:
        """Call `start_tasks`, which starts the first tasks, and run until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                start_tasks()
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None
                self._tasks.clear()

    def start(
        self, key: K, work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Start a task for a key.

        Does nothing if the key has a task, if `run` does not run, or if a task has failed.
        """
        if self._group is not None and key not in self._tasks:
            task_run = self._run_task(partial(work, *args, **kwargs))
            self._tasks[key] = self._group.create_task(task_run, name=f"{self._name} {key}")

    async def _run_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception:
            # The group rejects new tasks from now on, but `run` continues only in a later turn of the loop.
            self._group = None
            raise

    def cancel(self, key: K) -> None:
        """Cancel the task of a key, if any."""
        if task := self._tasks.pop(key, None):
            task.cancel()


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event for at most `seconds`, or without a limit if `seconds` is None."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # `wait_for` may swallow a cancellation in Python 3.11
            await event.wait()


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled; then raise the cancellation.

    If the caller was cancelled, an error of `work` is logged. With `asyncio.shield` instead, a cancelled
    caller would continue at once while `work` still runs in the background.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as cancelled:
            cancellation = cancelled
    if cancellation is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("work failed after its caller was cancelled", error=str(failure) or repr(failure))
    raise cancellation
