"""A gRPC relay between an Envoy and its control plane that measures when the Envoy acknowledges endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from controlplane import address as addresses
from controlplane.xds.resource_type import ENDPOINTS

ADS_METHOD = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
HEALTHY = health_check_pb2.HEALTHY
DRAINING = health_check_pb2.DRAINING
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1),)


class EndpointsRejected(Exception):
    """The Envoy rejected the endpoints that a benchmark waits for."""


class XdsRelay(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Relays calls, and finds Envoy's ACK of an endpoint with a given health; awaits one ACK at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._awaited: tuple[str, int] | None = None
        self._ack_future: asyncio.Future[float] | None = None
        self._nonce = ""  # of the response with the awaited endpoint

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, port: int, control_plane_port: int) -> AsyncIterator[XdsRelay]:
        """Relay calls to `port` of 127.0.0.1 while the block runs."""
        target = f"127.0.0.1:{control_plane_port}"
        async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
            relay = cls(channel)
            server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *_CHANNEL_OPTIONS))
            server.add_generic_rpc_handlers((relay,))
            server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            try:
                yield relay
            finally:
                await server.stop(None)

    def expect_ack(self, address: str, health: int) -> asyncio.Future[float]:
        """Return a future of the time (`time.perf_counter`) when Envoy acknowledges this endpoint and health.

        The future raises EndpointsRejected if Envoy rejects the response.
        """
        self._awaited, self._nonce = (address, health), ""
        self._ack_future = asyncio.get_running_loop().create_future()
        return self._ack_future

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Relay every method, since load reports and stats use the same connection."""
        method = handler_call_details.method

        async def relay(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async def observed_requests() -> AsyncIterator[bytes]:
                async for request in requests:
                    if method == ADS_METHOD:
                        self._on_request(request)
                    yield request

            async for response in self._channel.stream_stream(method)(observed_requests()):
                if method == ADS_METHOD:
                    self._on_response(response)
                yield response

        return grpc.stream_stream_rpc_method_handler(relay)

    def _on_response(self, message: bytes) -> None:
        if self._awaited is None:
            return
        response = discovery_pb2.DiscoveryResponse.FromString(message)
        if response.type_url == ENDPOINTS.url:
            address, health = self._awaited
            endpoint = endpoints_by_address(response).get(address)
            if endpoint is not None and endpoint.health_status == health:
                self._awaited, self._nonce = None, response.nonce

    def _on_request(self, message: bytes) -> None:
        at = time.perf_counter()
        if not self._nonce or self._ack_future is None or self._ack_future.done():
            return
        request = discovery_pb2.DiscoveryRequest.FromString(message)
        if request.type_url != ENDPOINTS.url or request.response_nonce != self._nonce:
            return
        if request.HasField("error_detail"):
            self._ack_future.set_exception(EndpointsRejected(request.error_detail.message))
        else:
            self._ack_future.set_result(at)


def endpoints_by_address(response: Any) -> dict[str, Any]:
    """Return the `LbEndpoint` messages of a DiscoveryResponse by address."""
    endpoints = {}
    for resource in response.resources:
        for locality in endpoint_pb2.ClusterLoadAssignment.FromString(resource.value).endpoints:
            for endpoint in locality.lb_endpoints:
                socket_address = endpoint.endpoint.address.socket_address
                endpoints[addresses.join(socket_address.address, socket_address.port_value)] = endpoint
    return endpoints
