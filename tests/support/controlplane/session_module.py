"""The part of an Envoy's module that gets commands about sessions, with the sessions that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from controlplane.decide.kill_target import KillDecision
from controlplane.model.sessions import Session
from controlplane.sessions import commands_pb2
from controlplane.version import VERSION
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.statement_reports import INSTANCE, announced_process, call_module
from tests.support.waiting import wait_until

SERVICE = "/tidevoy.commands.v1.Commands/"
_POLL_SECONDS = 40.0  # longer than a control plane keeps a poll


def session_message(connection: int, id_: int, node_id: int | None = None, **values: Any) -> Any:
    """Return a `Session` message, by default of an idle session that has not moved."""
    defaults = {
        "connection": connection,
        "id": id_,
        "node_id": id_ if node_id is None else node_id,
        "client": f"10.1.0.1:{40_000 + connection}",
        "user": "app",
        "node": "10.0.0.1:4000",
        "state": "idle",
        "milliseconds_in_state": 1500,
        "milliseconds_logged_in": 60_000,
    }
    return commands_pb2.Session(**(defaults | values))


def session(connection: int, id_: int, node_id: int | None = None, **values: Any) -> Session:
    """Return a session as the control plane sees it."""
    defaults: dict[str, Any] = {
        "envoy": "envoy-1",
        "instance": INSTANCE,
        "connection": connection,
        "id": id_,
        "node_id": id_ if node_id is None else node_id,
        "client": "10.1.0.1:40000",
        "user": "app",
        "database": "",
        "node": "10.0.0.1:4000",
        "state": "idle",
        "seconds_in_state": 1.5,
        "logged_in_seconds": 60.0,
        "moves": 0,
        "digest": "",
        "text": "",
    }
    return Session(**(defaults | values))


async def resolve(port: int, id_: int, instance: str = INSTANCE) -> KillDecision:
    """Ask which session a KILL means."""
    request = commands_pb2.ResolveRequest(instance=instance, id=id_)
    response = await call_module(port, f"{SERVICE}Resolve", request, commands_pb2.ResolveResponse)
    return KillDecision(response.node_id, response.refusal)


class SessionModule:
    """Polls one control plane, and reports to one, perhaps another one."""

    def __init__(self, port: int, report_port: int, instance: str, sessions: Sequence[Any]) -> None:
        self.sessions = {message.connection: message for message in sessions}
        self.is_incomplete = False
        self.commands: list[Any] = []
        self._polled: Sequence[Any] = ()
        self._port, self._report_port, self._instance = port, report_port, instance

    async def run(self) -> None:
        while True:
            # A control plane refuses a poll while it does not know the process.
            await wait_until(self._poll, 60)
            results = [self._result(command) for command in self._polled]
            report = commands_pb2.ReportRequest(instance=self._instance, results=results)
            await call_module(self._report_port, f"{SERVICE}Report", report, commands_pb2.ReportResponse)

    async def _poll(self) -> bool:
        request = commands_pb2.PollRequest(instance=self._instance)
        try:
            response = await call_module(
                self._port, f"{SERVICE}Poll", request, commands_pb2.PollResponse, seconds=_POLL_SECONDS
            )
        except grpc.aio.AioRpcError:
            return False
        self._polled = response.commands
        self.commands += self._polled
        return True

    def _result(self, command: Any) -> Any:
        match command.WhichOneof("content"):
            case "list":
                matching = [s for s in self.sessions.values() if command.list.user in ("", s.user)]
                sessions, total = matching[: command.list.limit], len(matching)
            case "find":
                id_ = command.find.id
                sessions = [s for s in self.sessions.values() if id_ in (s.id, s.node_id)]
                total = len(sessions)
            case _:
                ended = self.sessions.pop(command.end.connection, None)
                sessions = [ended] if ended is not None else []
                total = len(sessions)
        return commands_pb2.Result(
            command=command.id, is_incomplete=self.is_incomplete, sessions=sessions, total=total
        )


@asynccontextmanager
async def run_session_module(
    xds_port: int,
    *sessions: Any,
    envoy: str = "envoy-1",
    instance: str = INSTANCE,
    poll_port: int | None = None,
    report_port: int | None = None,
) -> AsyncIterator[SessionModule]:
    """Run an Envoy with a module, connected to `xds_port`. Its module calls other ports if they are given."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(FakeEnvoy(xds_port, envoy, module=VERSION))
        await stack.enter_async_context(announced_process(xds_port, envoy=envoy, instance=instance))
        module = SessionModule(poll_port or xds_port, report_port or xds_port, instance, sessions)
        task = asyncio.create_task(module.run())
        try:
            yield module
        finally:
            task.cancel()
            await asyncio.wait({task})
