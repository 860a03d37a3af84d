"""gRPC errors of one etcd member, and two-way streams on which every wait has a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from controlplane.errors import PdError

# Status codes that every member would return, so it is useless to try another member
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
_ACCESS_DENIED_CODES = frozenset({grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED})
_NO_LEADER = "etcdserver: no leader"
# Details of the status INTERNAL in gRPC for Python if the connection is lost during a read or write.
_CONNECTION_LOST = "Internal error from Core"


class Unanswered(Exception):
    """A member did not serve a call, but another member might. The message continues "the member ...".

    `not_applied`: this member certainly changed nothing. `may_lack_leader`: the cluster may have no leader
    for now.
    """

    def __init__(self, reason: str, *, not_applied: bool = False, may_lack_leader: bool = False) -> None:
        self.not_applied, self.may_lack_leader = not_applied, may_lack_leader
        super().__init__(reason)


class Rejected(PdError):
    """PD rejected a call."""

    def __init__(self, url: str, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        self.retryable = code not in _ACCESS_DENIED_CODES
        super().__init__(f"PD at {url} rejected the call: {details or code.name}")


def error_from_status(url: str, code: grpc.StatusCode, details: str) -> Unanswered | Rejected:
    """Return the error for a gRPC status other than OK."""
    if code in _FINAL_CODES:
        return Rejected(url, code, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unanswered("did not answer in time")
    is_unavailable = code is grpc.StatusCode.UNAVAILABLE
    if details == _CONNECTION_LOST:
        return Unanswered("is unreachable (the connection was lost)")
    if is_unavailable and not details.startswith("etcdserver"):
        return Unanswered(f"is unreachable ({details})")
    not_applied = code is grpc.StatusCode.RESOURCE_EXHAUSTED or details.startswith(_NO_LEADER)
    return Unanswered(
        f"answered {details or code.name}", not_applied=not_applied, may_lack_leader=is_unavailable
    )


def is_cancelled_by_us() -> bool:
    """Return whether our code cancelled this task. gRPC raises CancelledError too if a channel is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class EtcdStream:
    """A two-way stream to one member. `close` must be called.

    gRPC ends a stream if a read is cancelled. So after a timeout, the read stays pending, and the next
    `receive` waits for the same read.
    """

    def __init__(self, url: str, call: Any) -> None:
        self.url = url
        self._call = call
        self._pending_read: asyncio.Task[Any] | None = None
        self._pending_tasks: set[asyncio.Task[Any]] = set()

    async def send(self, message: Any, within: float) -> None:
        """Send one message. Raises Unanswered if the stream does not accept it within `within` seconds."""
        sending = self._start_task(self._call.write(message))
        await asyncio.wait({sending}, timeout=within)
        if not sending.done():
            raise Unanswered(f"has accepted nothing for {within:g} s")
        await self._result(sending)

    async def receive(self, within: float) -> Any | None:
        """Return the next message, or None if no message arrives within `within` seconds.

        Raises Unanswered or Rejected if the stream has ended.
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
        """End the stream and all pending reads and writes."""
        self._call.cancel()
        # Cancelling the call is not enough: if it has not started yet, a write would wait for ever.
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
            task.exception()  # marks the exception as retrieved, so that asyncio does not log it

    async def _result(self, task: asyncio.Task[Any]) -> Any:
        if task.cancelled():
            raise Unanswered("was dropped: the connection was closed")
        error = task.exception()
        if error is None:
            return task.result()
        if self._call.done():
            # A write to an ended stream fails without a reason. The status of the call has the reason.
            raise error_from_status(
                self.url, await self._call.code(), await self._call.details() or ""
            ) from error
        raise Unanswered(f"sent an unreadable message ({error!r})") from error
