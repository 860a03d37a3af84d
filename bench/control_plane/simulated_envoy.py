"""A simulated Envoy: the client side of a state-of-the-world ADS stream.

The large node message is serialized only once; each request adds its other fields. So a simulated fleet uses
little CPU compared with the control plane that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from bench.control_plane.xds_relay import ADS_METHOD
from controlplane.config.settings import Settings
from controlplane.errors import TidevoyError
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from controlplane.xds.resource_type import (
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    LIVE_CONFIG,
    RESOURCE_TYPES_BY_URL,
    ResourceType,
)
from controlplane.xds.resources.listeners_and_clusters import LIVE_CONFIG_NAME
from controlplane.xds.resources.profile import (
    FEATURES_METADATA_KEY,
    MODULE_FEATURES,
    MODULE_METADATA_KEY,
)
from sandbox.envoy import EnvoyProcess

_FIRST_REQUEST_TIMEOUT_SECONDS = 30.0
_CHANNEL_OPTIONS = (
    # Otherwise, all channels of one process share a connection, but every real Envoy has its own connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
)
# The types of which Envoy requests one resource by name.
_RESOURCE_NAMES = {ENDPOINTS: CLUSTER_NAME, LIVE_CONFIG: LIVE_CONFIG_NAME}


class StreamLost(TidevoyError):
    """The control plane ended the stream of a simulated Envoy, which a healthy control plane never does."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a simulated Envoy lost its stream, so nothing was measured: {reason}")


class SimulatedFleet:
    def __init__(
        self, port: int, first_request: bytes, count: int, *, module: str = "", repeat_node: bool = True
    ) -> None:
        """`port`: xDS port of the control plane; `first_request`: contains the node message to send.

        `module`: reported module version; empty if Envoys have no module. `repeat_node`: send the node in
        every request.
        """
        self._port = port
        self._changed = asyncio.Event()
        self.envoys = [
            SimulatedEnvoy(number, first_request, self._changed.set, module=module, repeat_node=repeat_node)
            for number in range(count)
        ]

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Connect all Envoys while the block runs. Raises StreamLost if a stream fails or ends."""
        try:
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(envoy.run(self._port)) for envoy in self.envoys]
                try:
                    yield
                finally:
                    for stream in streams:
                        stream.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def wait_for_all(self, condition: Callable[[SimulatedEnvoy], bool]) -> None:
        """Return as soon as every Envoy has met the condition."""
        for envoy in self.envoys:
            while not condition(envoy):
                self._changed.clear()
                await self._changed.wait()


class SimulatedEnvoy:
    """One simulated Envoy. `acked`: last acknowledged version per type; `acks`: number of ACKs per type.

    `on_response[type]` is called with each DiscoveryResponse of the type. `background_tasks` run during the
    stream, over the same connection.
    """

    def __init__(
        self,
        number: int,
        first_request: bytes,
        on_ack: Callable[[], None],
        *,
        module: str = "",
        repeat_node: bool = True,
    ) -> None:
        node = discovery_pb2.DiscoveryRequest.FromString(first_request).node
        node.id = f"simulated-{number:03}"
        if module:
            node.metadata[MODULE_METADATA_KEY] = module
            node.metadata[FEATURES_METADATA_KEY] = " ".join(MODULE_FEATURES)
        self.number = number
        self.node = node
        self.on_response: dict[ResourceType, Callable[[Any], None]] = {}
        self._subscribed_types = {CLUSTER, ENDPOINTS, LISTENER} | ({LIVE_CONFIG} if module else set())
        self.background_tasks: list[
            Callable[[SimulatedEnvoy, grpc.aio.Channel], Coroutine[Any, Any, None]]
        ] = []
        self._node_bytes: bytes = discovery_pb2.DiscoveryRequest(node=node).SerializeToString()
        self._repeat_node = repeat_node
        self._has_sent_node = False
        self._on_ack = on_ack
        self._nonces: dict[ResourceType, str] = {}
        self.acked: dict[ResourceType, str] = {}
        self.acks: Counter[ResourceType] = Counter()

    def has_acked_all_types(self) -> bool:
        return self.acked.keys() == self._subscribed_types

    @property
    def request_bytes(self) -> int:
        """Size of the node message in bytes."""
        return len(self._node_bytes)

    async def run(self, port: int) -> None:
        """Subscribe and acknowledge until cancelled. Raises StreamLost if the stream ends."""
        try:
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_CHANNEL_OPTIONS) as channel,
                asyncio.TaskGroup() as tasks,
            ):
                for task in self.background_tasks:
                    tasks.create_task(task(self, channel))
                tasks.create_task(self._run_stream(channel))
        except BaseExceptionGroup as group:
            raise StreamLost(str(group.exceptions[0])) from group
        raise StreamLost("the control plane ended it")

    async def _run_stream(self, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(ADS_METHOD)()
        await call.write(self._request(CLUSTER))
        while (message := await call.read()) is not grpc.aio.EOF:
            await self._acknowledge(call, message)

    async def _acknowledge(self, call: Any, message: bytes) -> None:
        response = discovery_pb2.DiscoveryResponse.FromString(message)
        kind = RESOURCE_TYPES_BY_URL[response.type_url]
        first = kind not in self.acked
        self.acked[kind], self._nonces[kind] = response.version_info, response.nonce
        await call.write(self._request(kind))
        # Envoy's order: it requests endpoints after each cluster, and the listener after the first endpoints.
        if kind is CLUSTER:
            await call.write(self._request(ENDPOINTS))
        elif kind is ENDPOINTS and first:
            await call.write(self._request(LISTENER))
        elif kind is LISTENER and first and LIVE_CONFIG in self._subscribed_types:
            await call.write(self._request(LIVE_CONFIG))
        if kind in self.on_response:
            self.on_response[kind](response)
        self.acks[kind] += 1
        self._on_ack()

    def _request(self, kind: ResourceType) -> bytes:
        request = discovery_pb2.DiscoveryRequest(
            version_info=self.acked.get(kind, ""),
            resource_names=[_RESOURCE_NAMES[kind]] if kind in _RESOURCE_NAMES else (),
            type_url=kind.url,
            response_nonce=self._nonces.get(kind, ""),
        )
        node = self._node_bytes if self._repeat_node or not self._has_sent_node else b""
        self._has_sent_node = True
        return node + bytes(request.SerializeToString())


async def record_first_request(directory: Path) -> bytes:
    """Return the first DiscoveryRequest of a real Envoy, serialized. Raises TimeoutError."""
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def record_request(_: object, context: grpc.aio.ServicerContext) -> None:
        message = await context.read()
        if message is not grpc.aio.EOF and not received.done():
            received.set_result(message)

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    handler = grpc.stream_stream_rpc_method_handler(record_request)
    _, service, method = ADS_METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    bootstrap = render_bootstrap(
        Settings(), control_planes=[f"127.0.0.1:{port}"], node_id="recorded", admin="127.0.0.1:0"
    )
    try:
        async with EnvoyProcess(bootstrap, directory), asyncio.timeout(_FIRST_REQUEST_TIMEOUT_SECONDS):
            return await received
    finally:
        await server.stop(None)
