"""One gRPC exchange with one member: what failures mean, and two-way streams whose waits all have an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from controlplane.errors import PdError

# Answers that every member would give, so that asking another one does not help
# (etcd-io/etcd api/v3rpc/rpctypes/error.go).
_FINAL = frozenset(
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


class NoAnswer(Exception):
    """A member did not do what it was asked, and another one might. The message continues "the member ...".

    `untouched` says that this member certainly changed nothing; `electing`, that it lives and may do it soon.
    """

    def __init__(self, reason: str, *, untouched: bool = False, electing: bool = False) -> None:
        self.untouched, self.electing = untouched, electing
        super().__init__(reason)


class Refused(PdError):
    """PD understood and said no."""

    def __init__(self, url: str, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(f"PD at {url} refused: {details or code.name}")


def failure(url: str, code: grpc.StatusCode, details: str) -> NoAnswer | Refused:
    """What a gRPC status other than OK means for the caller."""
    if code in _FINAL:
        return Refused(url, code, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NoAnswer("did not answer in time")
    unavailable = code is grpc.StatusCode.UNAVAILABLE
    if unavailable and not details.startswith("etcdserver"):
        return NoAnswer(f"cannot be reached ({details})")
    untouched = code is grpc.StatusCode.RESOURCE_EXHAUSTED or details.startswith(_NO_LEADER)
    return NoAnswer(f"answered {details or code.name}", untouched=untouched, electing=unavailable)


def cancelled_by_us() -> bool:
    """Whether a CancelledError just caught is ours: gRPC raises one, too, when a channel is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Exchange:
    """A two-way stream to one member.

    gRPC ends a stream when a pending read is cancelled, so a wait that runs out here leaves the read pending
    and the next `receive` goes on with it. `close` must be called.
    """

    def __init__(self, url: str, call: Any) -> None:
        self.url = url
        self._call = call
        self._reading: asyncio.Task[Any] | None = None
        self._pending: set[asyncio.Task[Any]] = set()

    async def send(self, message: Any, within: float) -> None:
        """Send one message. NoAnswer when it cannot be handed over within so many seconds."""
        sending = self._begin(self._call.write(message))
        await asyncio.wait({sending}, timeout=within)
        if not sending.done():
            raise NoAnswer(f"has taken nothing for {within:g} s")
        await self._result(sending)

    async def receive(self, within: float) -> Any | None:
        """The next message, or None when none comes within so many seconds.

        NoAnswer, Refused: the stream is over.
        """
        if self._reading is None:
            self._reading = self._begin(self._call.read())
        reading = self._reading
        await asyncio.wait({reading}, timeout=within)
        if not reading.done():
            return None
        self._reading = None
        message = await self._result(reading)
        if message is grpc.aio.EOF:
            raise failure(self.url, await self._call.code(), await self._call.details() or "the stream ended")
        return message

    async def close(self) -> None:
        """End the stream and everything that still waits on it."""
        self._call.cancel()
        # Cancelling the call is not enough: a write waits for ever when the call has not been begun yet.
        for task in self._pending:
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending)

    def _begin(self, waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(waiting)
        self._pending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._pending.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report one that nobody waits for any more

    async def _result(self, done: asyncio.Task[Any]) -> Any:
        if done.cancelled():
            raise NoAnswer("was left: the connection was closed")
        error = done.exception()
        if error is None:
            return done.result()
        if self._call.done():
            # A write to a stream that is over says only that; the status says why.
            raise failure(self.url, await self._call.code(), await self._call.details() or "") from error
        raise NoAnswer(f"sent what cannot be read ({error!r})") from error
