"""The interface of gRPC services on the xDS port, and of the function that authorizes their callers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc

# Arguments: the call, and the node.id in its first message. If the caller may not use this id, the function
# aborts the call by an exception, which the service must not catch.
AuthorizeEnvoy = Callable[[grpc.aio.ServicerContext, str], Awaitable[None]]


class XdsPortService(Protocol):
    """A gRPC service on the xDS port."""

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy, /) -> None:
        """Add the service to a server that has not started yet."""
