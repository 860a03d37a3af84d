"""The gRPC service on the xDS port through which Envoys get commands and ask which session a KILL means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from controlplane.decide.kill_target import KillDecision
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.sessions import commands_pb2
from controlplane.sessions.command_queue import CommandQueue
from controlplane.sessions.messages import InvalidCommandMessage, decode, read_result

_SERVICE = "tidevoy.commands.v1.Commands"
POLL_SECONDS = 30.0

_Handler = Callable[[AuthorizeEnvoy, bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


class CommandService:
    """Serves the modules of Envoys. A module names its Envoy process; its metrics tell which Envoy it is."""

    def __init__(
        self,
        queue: CommandQueue,
        *,
        envoy_of: Callable[[str], str | None],
        resolve_kill: Callable[[int], Awaitable[KillDecision]],
    ) -> None:
        """`envoy_of` returns the id of the Envoy with this process id; None: no Envoy has reported it."""
        self._queue = queue
        self._envoy_of = envoy_of
        self._resolve_kill = resolve_kill

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started; `authorize` decides which Envoys may call."""
        methods: dict[str, _Handler] = {
            "Poll": self._poll,
            "Report": self._report,
            "Resolve": self._resolve,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(partial(method, authorize))
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def _poll(self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        request, _ = await self._authorized(commands_pb2.PollRequest, authorize, data, context)
        commands = await self._queue.next_commands(request.instance, POLL_SECONDS)
        response: bytes = commands_pb2.PollResponse(commands=commands).SerializeToString()
        return response

    async def _report(
        self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        request, envoy = await self._authorized(commands_pb2.ReportRequest, authorize, data, context)
        try:
            results = [
                (message, read_result(message, envoy, request.instance)) for message in request.results
            ]
        except InvalidCommandMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for message, result in results:
            self._queue.put_result(message.command, result, message)
        response: bytes = commands_pb2.ReportResponse().SerializeToString()
        return response

    async def _resolve(
        self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        request, _ = await self._authorized(commands_pb2.ResolveRequest, authorize, data, context)
        decision = await self._resolve_kill(request.id)
        response: bytes = commands_pb2.ResolveResponse(
            node_id=decision.node_id, refusal=decision.refusal
        ).SerializeToString()
        return response

    async def _authorized(
        self, message_type: Any, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> tuple[Any, str]:
        """Return the request and the id of its Envoy. Aborts the call if it is not allowed."""
        try:
            message = decode(message_type, data)
        except InvalidCommandMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if (envoy := self._envoy_of(message.instance)) is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "no metrics of this Envoy have arrived yet, so its id is unknown; call again",
            )
        assert envoy is not None  # `abort` raises
        await authorize(context, envoy)
        return message, envoy
