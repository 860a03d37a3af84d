"""A simulated Envoy: the client side of a state-of-the-world ADS stream.

Messages are handled as bytes. A request is the node message, serialized once, followed by the fields of that
request; in a response only the fields around the resources are parsed. So a simulated fleet costs little
compared to the control plane that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from controlplane.errors import TidevoyError
from controlplane.model.nodes import CLUSTER_NAME
from controlplane.xds.protobuf_encoding import delimited
from controlplane.xds.resource_type import (
    CLUSTER,
    ENDPOINTS,
    LISTENER,
    LIVE_CONFIG,
    RESOURCE_TYPES_BY_URL,
    ResourceType,
)
from controlplane.xds.resources.listeners_and_clusters import LIVE_CONFIG_NAME
from controlplane.xds.resources.profile import MODULE_METADATA_KEY

_ADS_METHOD = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
_CHANNEL_OPTIONS = (
    # Channels of one process would otherwise share a connection; Envoys have one each.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
)
# Field numbers of discovery.v3.DiscoveryRequest and DiscoveryResponse; 3 is in the request only.
_VERSION_FIELD, _RESOURCES_FIELD, _NAMES_FIELD, _TYPE_URL_FIELD, _NONCE_FIELD = 1, 2, 3, 4, 5
_LENGTH_DELIMITED_WIRE_TYPE = 2
# The types of which it requests a single resource, with the name of that resource.
_RESOURCE_NAMES = {ENDPOINTS: CLUSTER_NAME, LIVE_CONFIG: LIVE_CONFIG_NAME}


class StreamLost(TidevoyError):
    """The control plane ended the stream of a simulated Envoy, which a healthy one never does."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a simulated Envoy lost its stream, so nothing was measured: {reason}")


class SimulatedFleet:
    """Simulated Envoys that are connected at the same time."""

    def __init__(
        self, port: int, first_request: bytes, count: int, *, module: str = "", repeat_node: bool = True
    ) -> None:
        """`port`: xDS port of the control plane; `first_request`: a real Envoy's, whose node message is used.

        `module`: reported module version; empty: no module. `repeat_node`: send the node in every request.
        """
        self._port = port
        self._changed = asyncio.Event()
        self.envoys = [
            SimulatedEnvoy(number, first_request, self._changed.set, module=module, repeat_node=repeat_node)
            for number in range(count)
        ]

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Connect all of them while the block runs. Raises StreamLost if one cannot connect."""
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
        """Return as soon as each of them has met the condition."""
        for envoy in self.envoys:
            while not condition(envoy):
                self._changed.clear()
                await self._changed.wait()


class SimulatedEnvoy:
    """One simulated Envoy. `acked`: last acknowledged version by type; `acks`: number of ACKs by type.

    `on_response`, by type, is called with each serialized response. `background_tasks` run during the stream,
    over the same connection.
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
        self.number = number
        self.node = node
        self.on_response: dict[ResourceType, Callable[[bytes], None]] = {}
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
        """Return whether it has acknowledged a response of each subscribed type."""
        return self.acked.keys() == self._subscribed_types

    @property
    def request_bytes(self) -> int:
        """Size of a request's constant part, the node message."""
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
        call = channel.stream_stream(_ADS_METHOD)()
        await call.write(self._request(CLUSTER))
        while (response := await call.read()) is not grpc.aio.EOF:
            await self._acknowledge(call, response)

    async def _acknowledge(self, call: Any, response: bytes) -> None:
        kind, version, nonce = _parse_response_header(response)
        first = kind not in self.acked
        self.acked[kind], self._nonces[kind] = version, nonce
        await call.write(self._request(kind))
        # In Envoy's order: endpoints after their cluster, and the listener after the first endpoints.
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
        names = delimited(_NAMES_FIELD, _RESOURCE_NAMES[kind]) if kind in _RESOURCE_NAMES else b""
        version = delimited(_VERSION_FIELD, self.acked.get(kind, ""))
        nonce = delimited(_NONCE_FIELD, self._nonces.get(kind, ""))
        node = self._node_bytes if self._repeat_node or not self._has_sent_node else b""
        self._has_sent_node = True
        return node + version + names + delimited(_TYPE_URL_FIELD, kind.url) + nonce


def _parse_response_header(response: bytes) -> tuple[ResourceType, str, str]:
    """Return type, version and nonce of a serialized DiscoveryResponse without parsing its resources."""
    fields: dict[int, bytes] = {}
    offset = 0
    while offset < len(response):
        key, offset = _read_varint(response, offset)
        value, offset = _read_varint(response, offset)
        if key & 7 == _LENGTH_DELIMITED_WIRE_TYPE:
            fields[key >> 3] = response[offset : offset + value] if key >> 3 != _RESOURCES_FIELD else b""
            offset += value
    version, url, nonce = (
        fields.get(field, b"").decode() for field in (_VERSION_FIELD, _TYPE_URL_FIELD, _NONCE_FIELD)
    )
    return RESOURCE_TYPES_BY_URL[url], version, nonce


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while data[offset] & 0x80:
        value |= (data[offset] & 0x7F) << shift
        shift += 7
        offset += 1
    return value | data[offset] << shift, offset + 1
