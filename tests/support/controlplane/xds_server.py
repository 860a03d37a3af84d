"""A control plane's xDS server, a real Envoy, and echo servers behind it, for tests of Envoy's behavior."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from controlplane.config.settings import Settings
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan
from controlplane.xds.bootstrap.bootstrap import ControlPlaneTls, render_bootstrap
from controlplane.xds.resources.profile import MODULE_METADATA_KEY
from controlplane.xds.server import XdsServer
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.running_xds import RecordedEvents, make_xds_server, run_xds_server
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.waiting import wait_until

SettingsSections = dict[str, Any]
STATE_BY_EDS_HEALTH = {
    EdsHealth.HEALTHY: State.ACTIVE,
    EdsHealth.UNHEALTHY: State.UNHEALTHY,
    EdsHealth.DRAINING: State.DRAINING,
}


def make_node_plan(
    address: str, endpoint: str, advice: EdsHealth = EdsHealth.HEALTHY, weight: int = 100
) -> NodePlan:
    """Build a node of a plan."""
    return NodePlan(
        Node(address, Source.PD), STATE_BY_EDS_HEALTH[advice], "a reason", 0.0, advice, weight, endpoint
    )


def make_plan(*nodes: NodePlan) -> Plan:
    """Build a plan of these nodes."""
    return Plan(nodes={node_plan.node.address: node_plan for node_plan in nodes})


class EchoSession:
    """A client's connection. `node` is the name that the server sends first, "" if it sends none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str) -> None:
        self._reader, self.writer, self.node = reader, writer, node

    @classmethod
    async def open(cls, port: int, first: bytes = b"") -> EchoSession:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        try:
            async with asyncio.timeout(10.0):
                banner = await reader.readline()
        except ConnectionError:
            banner = b""
        return cls(reader, writer, banner.decode().strip())

    async def is_alive(self) -> bool:
        """Return whether the server still echoes a line."""
        try:
            self.writer.write(b"ping\n")
            async with asyncio.timeout(5.0):
                return await self._reader.readline() == b"ping\n"
        except ConnectionError:
            return False

    def close(self) -> None:
        self.writer.transport.abort()


def echo_handler(name: str, first_lines: list[bytes] | None = None) -> Callable[..., Awaitable[None]]:
    """Return a handler that sends its name, then echoes lines.

    If `first_lines` is set, the handler first reads a line and appends it to `first_lines`.
    """

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first_lines is not None:
            first_lines.append(await reader.readline())
        writer.write(f"{name}\n".encode())
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()

    return handler


class XdsTestBed:
    """An xDS server, an Envoy and its clients. `events`: (kind, subject, message) of the server's events."""

    def __init__(
        self,
        ports: Ports,
        start_envoy: StartEnvoy,
        *,
        delta: bool,
        settings: dict[str, Any],
        claimed_module_version: str,
        group: str,
        zone: str,
        module: Path | None,
    ) -> None:
        self._event_log = RecordedEvents()
        self.events = self._event_log.recorded
        self._server_run = contextlib.AsyncExitStack()
        self.sql_port = ports.allocate()
        self._xds_port = ports.allocate()
        self._start_envoy = start_envoy
        self._delta = delta
        self._base_settings = settings
        self._claimed_module_version = claimed_module_version
        self._group, self._zone, self._module = group, zone, module
        self.settings = self.with_settings({})
        self.server = self.new_server()
        self.sessions: list[EchoSession] = []
        self.envoy: EnvoyProcess

    def with_settings(self, changes: SettingsSections) -> Settings:
        """Return the test bed's settings with the values in `changes`; other values of a section are kept."""
        sections: SettingsSections = {
            "xds": {"listen": f"127.0.0.1:{self._xds_port}"},
            "sql": {"listen": f"127.0.0.1:{self.sql_port}"},
        }
        for section, values in (*self._base_settings.items(), *changes.items()):
            sections[section] = (
                {**sections.get(section, {}), **values} if isinstance(values, dict) else values
            )
        return Settings.model_validate(sections)

    def new_server(self) -> XdsServer:
        return make_xds_server(self.settings, self._event_log)

    async def start(self, tls: ControlPlaneTls | None) -> None:
        await self._server_run.enter_async_context(run_xds_server(self.server))
        text = render_bootstrap(
            self.settings,
            control_planes=[f"127.0.0.1:{self.server.port}"],
            node_id="envoy-1",
            admin="127.0.0.1:0",
            delta=self._delta,
            tls=tls,
            group=self._group,
            zone=self._zone,
            module=None if self._module is None else str(self._module),
        )
        if self._claimed_module_version:
            bootstrap = yaml.safe_load(text)
            bootstrap["node"].setdefault("metadata", {})[MODULE_METADATA_KEY] = self._claimed_module_version
            text = yaml.safe_dump(bootstrap)
        self.envoy = await self._start_envoy(text)

    async def restart_server(self, published: Plan | None) -> None:
        """Replace the server by a new server with this plan, or with no plan. Wait until Envoy reconnects."""
        await self._server_run.aclose()
        self.server = self.new_server()
        if published is not None:
            self.server.publish(published)
        await self._server_run.enter_async_context(run_xds_server(self.server))
        await wait_until(lambda: bool(self.server.statuses()))

    @property
    def status(self) -> EnvoyStatus:
        (status,) = self.server.statuses()
        return status

    def event_kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def is_acked(self) -> bool:
        statuses = self.server.statuses()
        return bool(
            statuses
            and statuses[0].acked_version
            and statuses[0].acked_version == statuses[0].published_version
        )

    async def publish(self, published: Plan) -> None:
        """Publish the plan and wait for the Envoy's acknowledgement."""
        before = self.status.published_version if self.server.statuses() else ""
        self.server.publish(published)
        await wait_until(lambda: bool(self.server.statuses()) and self.status.published_version != before)
        await wait_until(self.is_acked)

    async def connect(self, first: bytes = b"", *, port: int | None = None) -> EchoSession:
        """Open a client connection through Envoy, at the port of a group if `port` is set."""
        session = await EchoSession.open(port or self.sql_port, first)
        self.sessions.append(session)
        return session

    async def wait_for_session(self, first: bytes = b"", *, port: int | None = None) -> EchoSession:
        """Retry `connect` until Envoy accepts a connection, and return the session."""
        deadline = time.monotonic() + 10
        while True:
            try:
                return await self.connect(first, port=port)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for session in self.sessions:
            session.close()
        await self._server_run.aclose()


@contextlib.asynccontextmanager
async def run_xds_test_bed(
    ports: Ports,
    start_envoy: StartEnvoy,
    *,
    delta: bool = False,
    tls: ControlPlaneTls | None = None,
    settings: SettingsSections | None = None,
    claimed_module_version: str = "",
    group: str = "",
    zone: str = "",
    module: Path | None = None,
) -> AsyncIterator[XdsTestBed]:
    """Run a server that has published nothing yet, and an Envoy that waits for it.

    `claimed_module_version`: the version of Tidevoy's module in the Envoy's node metadata, although the Envoy
    does not have the module. `group` and `zone` are the Envoy's. `module` is the module file that it loads.
    """
    base_settings = settings or {}
    test_bed = XdsTestBed(
        ports,
        start_envoy,
        delta=delta,
        settings=base_settings,
        claimed_module_version=claimed_module_version,
        group=group,
        zone=zone,
        module=module,
    )
    try:
        await test_bed.start(tls)
        yield test_bed
    finally:
        await test_bed.stop()


@contextlib.asynccontextmanager
async def run_echo_servers(*names: str) -> AsyncIterator[list[FakeServer]]:
    """Run echo servers with these names."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_fake_server(echo_handler(name))) for name in names]
