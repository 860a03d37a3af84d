"""Runs commands at the Envoys that call other replicas: `tidevoy.ReplicaCommands/Run` on the xDS port.

An Envoy may call any replica, so each command runs at all of them. A replica streams the results that it gets
until the caller ends the stream, because only the caller knows when all Envoys have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc

from controlplane.config.settings import Settings
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.sessions import SessionResult
from controlplane.module_calls import InvalidModuleMessage
from controlplane.replicas.peer_authorization import abort_unless_replica
from controlplane.replicas.peer_feed_client import open_channel
from controlplane.sessions import commands_pb2
from controlplane.sessions.command_queue import CommandQueue
from controlplane.sessions.messages import read_result

_SERVICE, _METHOD = "tidevoy.ReplicaCommands", "Run"
_MAX_SECONDS = 10.0


class ReplicaCommands:
    """The service for other replicas, and the calls to them."""

    def __init__(
        self, settings: Settings, queue: CommandQueue, addresses: Callable[[], Mapping[str, str]]
    ) -> None:
        """`addresses` returns the advertised addresses of the other registered replicas, by name."""
        self._settings = settings
        self._queue = queue
        self._addresses = addresses

    def register(self, server: grpc.aio.Server, _: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started."""
        handler = grpc.unary_stream_rpc_method_handler(
            self._serve,
            request_deserializer=commands_pb2.RunRequest.FromString,
            response_serializer=commands_pb2.RunReply.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))

    def names(self) -> list[str]:
        """Return the names of the other replicas."""
        return sorted(self._addresses())

    async def run(
        self, name: str, command: Any, seconds: float, on_result: Callable[[SessionResult], None]
    ) -> str:
        """Run a command at the Envoys that call a replica; `on_result` gets each result.

        Return why it has ended, as a clause about the replica; empty when the time is over.
        """
        address, tls = self._addresses().get(name), self._settings.xds.tls
        if address is None:
            return ""
        try:
            channel = await open_channel(address, tls)
        except OSError as error:
            return f"cannot be asked, because {error.filename} cannot be read: {error.strerror}"
        async with channel:
            run = channel.unary_stream(
                f"/{_SERVICE}/{_METHOD}",
                request_serializer=commands_pb2.RunRequest.SerializeToString,
                response_deserializer=commands_pb2.RunReply.FromString,
            )
            request = commands_pb2.RunRequest(command=command, timeout_milliseconds=int(seconds * 1000))
            call = run(request, timeout=seconds)
            try:
                async for reply in call:
                    on_result(read_result(reply.result, reply.envoy, reply.instance))
            except InvalidModuleMessage as error:
                return f"sent an unreadable result: {error}"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return ""
                return f"cannot be asked ({error.details() or error.code().name})"
            finally:
                call.cancel()
        return ""

    async def _serve(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        await abort_unless_replica(context, self._addresses().values(), self._settings)
        replies: asyncio.Queue[Any] = asyncio.Queue()

        def add(result: SessionResult, message: Any) -> None:
            replies.put_nowait(
                commands_pb2.RunReply(envoy=result.envoy, instance=result.instance, result=message)
            )

        seconds = min(request.timeout_milliseconds / 1000, _MAX_SECONDS)
        deadline = asyncio.get_running_loop().time() + seconds
        with self._queue.run(request.command, add), suppress(TimeoutError):
            while True:
                async with asyncio.timeout_at(deadline):
                    reply = await replies.get()
                # Outside the timeout, because gRPC cannot end a call while a write is pending.
                await context.write(reply)
