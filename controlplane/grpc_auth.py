"""How a service on the xDS port asks whether a caller may speak as the Envoy that it says it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

# Takes the call and the node.id that its first message names. Returns when the caller may speak under it;
# else the call is ended there and then, and what raises that must not be caught.
AuthorizeEnvoy = Callable[[grpc.aio.ServicerContext, str], Awaitable[None]]
