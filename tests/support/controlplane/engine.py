"""An engine in this process, fake nodes, and fake Envoys that a test controls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import grpc
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2, lrs_pb2_grpc

from controlplane import address as addresses
from controlplane.clock import Clock
from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from controlplane.etcd.client import EtcdClient
from controlplane.events.event_messages import Event
from controlplane.model.facts import Facts
from controlplane.xds.resource_type import ENDPOINTS, LIVE_CONFIG
from controlplane.xds.resources.listeners_and_clusters import LIVE_CONFIG_NAME
from controlplane.xds.resources.profile import (
    FEATURES_METADATA_KEY,
    MODULE_FEATURES,
    MODULE_METADATA_KEY,
)
from sandbox.live_config import parse_live_config
from tests.support.controlplane.telemetry_messages import (
    MetricsStream,
    module_info_family,
    open_metrics_stream,
    sessions_family,
)
from tests.support.fake_servers import (
    GREETING_PAYLOAD,
    STATUS_BODY,
    answer_http,
    http_response,
    mysql_packet,
    run_fake_server,
    send_parts,
)
from tests.support.waiting import wait_until

UNREACHABLE_PD_URL = "http://127.0.0.1:1"  # No server listens there.
CLUSTER = "tidb"
_REPORT_SECONDS = 0.05  # Time between two reports of an Envoy or of a module.
FAST_CHECKS = {"interval": 0.1, "timeout": 2.0}
TOPOLOGY_INFO = (
    '{"version": "v8.5.3", "git_hash": "abc", "ip": "127.0.0.1", "status_port": %s, "labels": null}'
)


def settings(directory: Path, **sections: Any) -> Settings:
    """Return settings with a free xDS port and fast checks."""
    result: dict[str, Any] = {
        "xds": {"listen": "127.0.0.1:0"},
        "state_dir": directory / "state",
        "health": {"sql": FAST_CHECKS, "status": FAST_CHECKS},
        "balance": {"report_interval": 0.1, "slow_start": 0, "panic_threshold": 0},
        "backend": {"connect_timeout": 0.1},
        "drain": {"reconnect_grace": 0},
    }
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = {**result[name], **value} if both else value
    return Settings.model_validate(result)


@contextlib.asynccontextmanager
async def run_engine(initial_settings: Settings, **more: Any) -> AsyncIterator[Engine]:
    """Run an engine until the block ends. Raises the error that stopped the engine earlier, if any."""
    engine = Engine(initial_settings, **more)
    run = asyncio.create_task(engine.run())
    started = asyncio.create_task(engine.wait_started())
    try:
        await asyncio.wait({run, started}, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            await run
        yield engine
    finally:
        started.cancel()
        run.cancel()
        await asyncio.wait({run})
    if not run.cancelled() and (error := run.exception()) is not None:
        raise error


@contextlib.asynccontextmanager
async def healthy_node() -> AsyncIterator[tuple[str, str]]:
    """Run a healthy fake TiDB; yield its SQL and its status address."""
    async with (
        run_fake_server(send_parts(mysql_packet(GREETING_PAYLOAD))) as sql,
        run_fake_server(answer_http(http_response(200, STATUS_BODY))) as status,
    ):
        yield sql.endpoint, status.endpoint


async def register_node(etcd: EtcdClient, address: str, status: str, *, lease: int = 0) -> None:
    """Write to PD what a TiDB server writes when it starts."""
    info = TOPOLOGY_INFO % addresses.split(status)[1]
    await etcd.put(f"/topology/tidb/{address}/info", info.encode())
    await etcd.put(f"/topology/tidb/{address}/ttl", b"1767225630123456789", lease)


async def wait_for_state(engine: Engine, address: str, state: str | None, seconds: float = 10.0) -> None:
    """Wait until the node is in `state`. If `state` is None, wait until the node is removed."""

    def has_state() -> bool:
        planned = {view.plan.node.address: view.plan.state.value for view in engine.cluster.nodes()}
        return planned.get(address) == state

    await wait_until(has_state, seconds)


def fast_clock(speed: float) -> Clock:
    """Return a clock that starts at the present time and runs `speed` times faster."""
    start, started_at = time.time(), time.monotonic()
    return lambda: start + speed * (time.monotonic() - started_at)


def current_facts(engine: Engine) -> Facts:
    """Return the facts of the engine's next decision."""
    return engine._facts.view()


async def wait_for_plans(engine: Engine, times: int = 3) -> None:
    """Wait until the engine has computed this many more plans."""

    def plan_count() -> float:
        return engine.registry.get_sample_value("tidevoy_plan_duration_seconds_count") or 0.0

    target = plan_count() + times
    await wait_until(lambda: plan_count() >= target)


class FakeModule:
    """A module that repeatedly reports session counts of nodes. The series `module_info` ends each report."""

    def __init__(self, counts: Mapping[str, int], instance: str | None) -> None:
        self.counts = counts
        self.completes_flushes = True  # If False, reports lack `module_info`.
        self._instance = instance

    async def report(self, stream: MetricsStream, envoy: str) -> None:
        name = envoy
        while True:
            for address, count in list(self.counts.items()):
                await stream.send(sessions_family(count, address), envoy=name)
                name = ""
            if self.completes_flushes:
                await stream.send(module_info_family(self._instance), envoy=name)
                name = ""
            await asyncio.sleep(_REPORT_SECONDS)


@contextlib.asynccontextmanager
async def reporting_module(
    engine: Engine, counts: Mapping[str, int], instance: str | None = None
) -> AsyncIterator[FakeModule]:
    """Run the metrics stream of `envoy-1`. Without `instance`, the control plane requests no migrations."""
    async with open_metrics_stream(engine.xds_port) as stream:
        module = FakeModule(counts, instance)
        task = asyncio.create_task(module.report(stream, "envoy-1"))
        try:
            yield module
        finally:
            task.cancel()
            await asyncio.wait({task})


class EventRecorder:
    """Records the events of an engine, including past events that the engine still keeps."""

    def __init__(self, engine: Engine) -> None:
        self._events = engine.events.subscribe(after_id=0)
        self.recorded: list[Event] = []

    async def wait_for(self, kind: str, seconds: float = 10.0) -> Event:
        """Return the first event of this kind. Wait for it if it has not happened yet."""
        for event in self.recorded:
            if event.kind == kind:
                return event
        async with asyncio.timeout(seconds):
            async for event in self._events:
                self.recorded.append(event)
                if event.kind == kind:
                    return event
        raise AssertionError(f"the events ended without {kind}")


class FakeEnvoy:
    """Subscribes to endpoints, acknowledges responses, and reports the sessions that a test sets."""

    def __init__(self, port: int, name: str = "envoy-1", *, module: str = "") -> None:
        """`module`: the version of Tidevoy's module that the Envoy claims; empty without a module."""
        self._port, self.name, self._module = port, name, module
        # For each response, the health and the weight of each endpoint.
        self.published: list[dict[str, tuple[str, int]]] = []
        # For each response, the requested migrations by endpoint.
        self.requested_migrations: list[dict[str, str]] = []
        # For each response, the live configuration.
        self.live_configs: list[dict[str, Any]] = []
        self.sessions: dict[str, int] = {}
        self.is_reporting = True
        self.nack_message = ""  # If not empty, each response is rejected with this message.
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        alone = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=alone)
        subscribed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._subscribe(subscribed)),
            asyncio.create_task(self._report()),
        ]
        await subscribed.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._channel.close()
        for task in self._tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, _STREAM_ENDED_ERRORS):
                raise error

    @property
    def endpoints(self) -> Mapping[str, tuple[str, int]]:
        """The endpoints of the last response."""
        return self.published[-1] if self.published else {}

    async def wait_for_endpoints(
        self, condition: Callable[[Mapping[str, tuple[str, int]]], bool], seconds: float = 10
    ) -> None:
        """Wait until something has been published and the condition holds for the endpoints."""
        await wait_until(lambda: bool(self.published) and condition(self.endpoints), seconds)

    @property
    def switched_off(self) -> set[str]:
        """The names of the switches that are off in the last live configuration."""
        published = self.live_configs[-1] if self.live_configs else {}
        return {part for part in ("offload", "migration", "ready") if published.get(part) is False}

    async def _subscribe(self, subscribed: asyncio.Event) -> None:
        call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(self._channel).StreamAggregatedResources()
        names = {ENDPOINTS.url: [CLUSTER]}
        if self._module:
            names[LIVE_CONFIG.url] = [LIVE_CONFIG_NAME]
        for url in names:
            request = discovery_pb2.DiscoveryRequest(type_url=url, resource_names=names[url])
            request.node.id = self.name
            if self._module:
                request.node.metadata.fields[MODULE_METADATA_KEY].string_value = self._module
                request.node.metadata.fields[FEATURES_METADATA_KEY].string_value = " ".join(MODULE_FEATURES)
            await call.write(request)
        subscribed.set()
        acked_versions = dict.fromkeys(names, "")
        async for response in call:
            type_url = response.type_url
            if self.nack_message:
                nack = discovery_pb2.DiscoveryRequest(
                    type_url=type_url,
                    resource_names=names[type_url],
                    version_info=acked_versions[type_url],
                    response_nonce=response.nonce,
                )
                nack.error_detail.message = self.nack_message
                await call.write(nack)
                continue
            acked_versions[type_url] = response.version_info
            for resource in response.resources:
                if type_url == LIVE_CONFIG.url:
                    self.live_configs.append(parse_live_config(resource.value))
                    nodes = self.live_configs[-1]["nodes"]
                    self.requested_migrations.append(
                        {node["endpoint"]: node["moves"] for node in nodes if "moves" in node}
                    )
                    continue
                assignment = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value)
                self.published.append(
                    {
                        _endpoint(lb_endpoint.endpoint.address): (
                            health_check_pb2.HealthStatus.Name(lb_endpoint.health_status),
                            lb_endpoint.load_balancing_weight.value,
                        )
                        for group in assignment.endpoints
                        for lb_endpoint in group.lb_endpoints
                    }
                )
            await call.write(
                discovery_pb2.DiscoveryRequest(
                    type_url=type_url,
                    resource_names=names[type_url],
                    version_info=acked_versions[type_url],
                    response_nonce=response.nonce,
                )
            )

    async def _report(self) -> None:
        call = lrs_pb2_grpc.LoadReportingServiceStub(self._channel).StreamLoadStats()
        first = lrs_pb2.LoadStatsRequest()
        first.node.id = self.name
        await call.write(first)
        await call.read()
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if self.is_reporting:
                await call.write(self._load())

    def _load(self) -> lrs_pb2.LoadStatsRequest:
        request = lrs_pb2.LoadStatsRequest()
        cluster = request.cluster_stats.add(cluster_name=CLUSTER)
        locality = cluster.upstream_locality_stats.add()
        for endpoint, count in self.sessions.items():
            stats = locality.upstream_endpoint_stats.add(total_requests_in_progress=count)
            host, port = addresses.split(endpoint)
            stats.address.socket_address.address = host
            stats.address.socket_address.port_value = port
        return request


_STREAM_ENDED_ERRORS = (grpc.RpcError, asyncio.InvalidStateError)  # The control plane closed the stream.


def _endpoint(address: Any) -> str:
    socket_address = address.socket_address
    return addresses.join(socket_address.address, socket_address.port_value)
