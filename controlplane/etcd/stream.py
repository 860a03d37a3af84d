"""One gRPC exchange with one member: what failures mean, and two-way streams whose waits all have an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from controlplane.errors import PdError

# Answers that every member would give, so that asking another one does not help
# (etcd-io/etcd api/v3rpc/rpctypes/error.go).
_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
_NO_LEADER = "etcdserver: no leader"


class Unanswered(Exception):
    """A member did not do what it was asked, and another one might. The message continues "the member ...".

    `untouched` says that this member certainly changed nothing; `electing`, that it lives and may do it soon.
    """

    def __init__(self, reason: str, *, not_applied: bool = False, no_leader: bool = False) -> None:
        self.not_applied, self.no_leader = not_applied, no_leader
        super().__init__(reason)


class Rejected(PdError):
    """PD understood and said no."""

    def __init__(self, url: str, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(f"PD at {url} refused: {details or code.name}")


def error_from_status(url: str, code: grpc.StatusCode, details: str) -> Unanswered | Rejected:
    """What a gRPC status other than OK means for the caller."""
    if code in _FINAL_CODES:
        return Rejected(url, code, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unanswered("did not answer in time")
    unavailable = code is grpc.StatusCode.UNAVAILABLE
    if unavailable and not details.startswith("etcdserver"):
        return Unanswered(f"cannot be reached ({details})")
    not_applied = code is grpc.StatusCode.RESOURCE_EXHAUSTED or details.startswith(_NO_LEADER)
    return Unanswered(f"answered {details or code.name}", not_applied=not_applied, no_leader=unavailable)


def is_cancelled_by_us() -> bool:
    """Whether a CancelledError just caught is ours: gRPC raises one, too, when a channel is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class EtcdStream:
    """A two-way stream to one member.

    gRPC ends a stream when a pending read is cancelled, so a wait that runs out here leaves the read pending
    and the next `receive` goes on with it. `close` must be called.
    """

    def __init__(self, url: str, call: Any) -> None:
        self.url = url
        self._call = call
        self._pending_read: asyncio.Task[Any] | None = None
        self._pending_tasks: set[asyncio.Task[Any]] = set()

    async def send(self, message: Any, within: float) -> None:
        """Send one message. NoAnswer when it cannot be handed over within so many seconds."""
        sending = self._start_task(self._call.write(message))
        await asyncio.wait({sending}, timeout=within)
        if not sending.done():
            raise Unanswered(f"has taken nothing for {within:g} s")
        await self._result(sending)

    async def receive(self, within: float) -> Any | None:
        """The next message, or None when none comes within so many seconds.

        NoAnswer, Refused: the stream is over.
        """
        if self._pending_read is None:
            self._pending_read = self._start_task(self._call.read())
        reading = self._pending_read
        await asyncio.wait({reading}, timeout=within)
        if not reading.done():
            return None
        self._pending_read = None
        message = await self._result(reading)
        if message is grpc.aio.EOF:
            raise error_from_status(
                self.url, await self._call.code(), await self._call.details() or "the stream ended"
            )
        return message

    async def close(self) -> None:
        """End the stream and everything that still waits on it."""
        self._call.cancel()
        # Cancelling the call is not enough: a write waits for ever when the call has not been begun yet.
        for task in self._pending_tasks:
            task.cancel()
        if self._pending_tasks:
            await asyncio.wait(self._pending_tasks)

    def _start_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self._pending_tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._pending_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report one that nobody waits for any more

    async def _result(self, task: asyncio.Task[Any]) -> Any:
        if task.cancelled():
            raise Unanswered("was left: the connection was closed")
        error = task.exception()
        if error is None:
            return task.result()
        if self._call.done():
            # A write to a stream that is over says only that; the status says why.
            raise error_from_status(
                self.url, await self._call.code(), await self._call.details() or ""
            ) from error
        raise Unanswered(f"sent what cannot be read ({error!r})") from error
