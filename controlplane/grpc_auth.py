"""The type of the function that authorizes callers of a service on the xDS port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

# Takes the call and the node.id in its first message. Returns if the caller may use that id; else it aborts
# the call by an exception, which must not be caught.
AuthorizeEnvoy = Callable[[grpc.aio.ServicerContext, str], Awaitable[None]]
