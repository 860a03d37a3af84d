"""The gRPC service on the xDS port through which Envoys get commands and ask which session a KILL means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from controlplane.decide.kill_target import KillDecision
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.module_calls import InvalidModuleMessage, read_call
from controlplane.sessions import commands_pb2
from controlplane.sessions.command_queue import CommandQueue
from controlplane.sessions.messages import read_result

_SERVICE = "tidevoy.commands.v1.Commands"
POLL_SECONDS = 30.0

_Handler = Callable[[AuthorizeEnvoy, bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


class CommandService:
    """Serves the modules of Envoys.

    A message has the id of the Envoy process. The Envoy's id comes from the metrics with the same process id.
    """

    def __init__(
        self,
        queue: CommandQueue,
        *,
        envoy_of: Callable[[str], str | None],
        resolve_kill: Callable[[int], Awaitable[KillDecision]],
    ) -> None:
        """`envoy_of`: see `read_call`; `resolve_kill` decides which session the id in a KILL means."""
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
        request, _ = await read_call(commands_pb2.PollRequest, data, context, authorize, self._envoy_of)
        commands = await self._queue.next_commands(request.instance, POLL_SECONDS)
        response: bytes = commands_pb2.PollResponse(commands=commands).SerializeToString()
        return response

    async def _report(
        self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        request, envoy = await read_call(commands_pb2.ReportRequest, data, context, authorize, self._envoy_of)
        try:
            results = [
                (message, read_result(message, envoy, request.instance)) for message in request.results
            ]
        except InvalidModuleMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for message, result in results:
            self._queue.put_result(message.command, result, message)
        response: bytes = commands_pb2.ReportResponse().SerializeToString()
        return response

    async def _resolve(
        self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        request, _ = await read_call(commands_pb2.ResolveRequest, data, context, authorize, self._envoy_of)
        decision = await self._resolve_kill(request.id)
        response: bytes = commands_pb2.ResolveResponse(
            node_id=decision.node_id, refusal=decision.refusal
        ).SerializeToString()
        return response
