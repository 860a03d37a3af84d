"""Record the first xDS request of this machine's stock Envoy with a one-shot gRPC server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from controlplane.config.settings import Settings
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess

_ADS_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
_REQUEST_TIMEOUT_SECONDS = 30.0


async def record_first_request(directory: Path) -> bytes:
    """Return the serialized DiscoveryRequest that opens Envoy's stream. Raises TimeoutError without one."""
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def record_request(_: object, context: grpc.aio.ServicerContext) -> None:
        message = await context.read()
        if message is not grpc.aio.EOF and not received.done():
            received.set_result(message)

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    handler = grpc.stream_stream_rpc_method_handler(record_request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_ADS_SERVICE, {"StreamAggregatedResources": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    bootstrap = render_bootstrap(
        Settings(), control_planes=[f"127.0.0.1:{port}"], node_id="recorded", admin="127.0.0.1:0"
    )
    try:
        async with EnvoyProcess(bootstrap, directory), asyncio.timeout(_REQUEST_TIMEOUT_SECONDS):
            return await received
    finally:
        await server.stop(None)
