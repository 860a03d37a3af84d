"""The live configuration of the module in a real Envoy, with both variants of xDS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.model.plan import EdsHealth, Plan
from controlplane.xds.resource_set import ResourceSet, build_resource_set
from controlplane.xds.resource_type import LIVE_CONFIG
from controlplane.xds.resources import live_config
from controlplane.xds.snapshot_cache import SnapshotCache
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import XdsTestBed, make_node_plan, make_plan, run_xds_test_bed
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.module.bootstrap import require_module
from tests.support.module.envoy import serve_ok, with_timeout
from tests.support.module.login_log import subset, wait_for_lines
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_never, wait_until

NO_NODE = b"\xff\x51\x04"  # error 1105


@contextlib.asynccontextmanager
async def run_test_bed(
    ports: Ports, envoy_process: StartEnvoy, *, delta: bool
) -> AsyncIterator[tuple[XdsTestBed, FakeServer]]:
    """Run a control plane, an Envoy with the module, and a node that accepts every login."""
    async with (
        run_fake_server(serve_ok) as node,
        run_xds_test_bed(ports, envoy_process, delta=delta, module=require_module()) as test_bed,
    ):
        yield test_bed, node


def plan_with(node: FakeServer, eds_health: EdsHealth = EdsHealth.HEALTHY, weight: int = 100) -> Plan:
    return make_plan(make_node_plan("a:4000", node.endpoint, eds_health, weight))


@contextlib.asynccontextmanager
async def connect_client(test_bed: XdsTestBed) -> AsyncIterator[RawClient]:
    raw = RawClient(*await asyncio.open_connection("127.0.0.1", test_bed.sql_port))
    try:
        yield raw
    finally:
        raw.writer.transport.abort()


@contextlib.contextmanager
def publish_for_another_release() -> Iterator[None]:
    """Publish configurations for another release of the module, so that the running module rejects them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_config, "VERSION", "99.0.0")
        yield


async def is_served(test_bed: XdsTestBed) -> bool:
    """Return whether the node greets a new client. If not, Envoy must refuse the client or send `NO_NODE`."""
    try:
        async with connect_client(test_bed) as raw:
            packet = (await with_timeout(raw.read_packet()))[1]
    except ConnectionRefusedError:
        return False
    assert packet[0] == 0x0A or packet.startswith(NO_NODE)
    return packet[0] == 0x0A


async def change_settings(test_bed: XdsTestBed, settings: dict[str, Any]) -> None:
    """Change the settings, and wait until Envoy has applied them."""
    before = test_bed.status.published_version
    test_bed.server.configure(test_bed.with_settings(settings))
    await wait_until(lambda: test_bed.status.published_version != before)
    await wait_until(test_bed.is_acked)


async def test_node_changes_reach_module_without_closing_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        await test_bed.publish(plan_with(node))
        await wait_until(lambda: is_served(test_bed))
        assert (test_bed.status.filter, test_bed.status.has_acknowledged_endpoints) == ("module", True)
        async with connect_client(test_bed) as session:
            assert (await with_timeout(session.login()))[0] == 0
            for weight in range(1, 6):
                await test_bed.publish(plan_with(node, weight=weight))
            await test_bed.publish(plan_with(node, EdsHealth.DRAINING))
            assert test_bed.status.has_acknowledged_endpoints
            assert not await is_served(test_bed)
            # A restarted control plane with the same plan changes nothing.
            await test_bed.restart_server(plan_with(node, EdsHealth.DRAINING))
            await wait_until(test_bed.is_acked)
            await test_bed.publish(plan_with(node))
            await wait_until(lambda: is_served(test_bed))
            assert (await with_timeout(session.send_command(0x0E)))[0] == 0
        assert rejections(test_bed) == []


async def test_login_log_is_switched_on_and_off_without_closing_sessions(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    log = tmp_path / "logins.log"
    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        await test_bed.publish(plan_with(node))
        await wait_until(lambda: is_served(test_bed))
        async with connect_client(test_bed) as session:
            assert (await with_timeout(session.login()))[0] == 0
            for path in (log, None):
                await change_settings(test_bed, {"sql": {"login_log": {"path": path}}})
                async with connect_client(test_bed) as client:
                    assert (await with_timeout(client.login()))[0] == 0
            (line,) = await wait_for_lines(log, 1)
            assert subset(line, "user", "node", "result") == ("root", "a:4000", "ok")
            assert (await with_timeout(session.send_command(0x0E)))[0] == 0
        assert rejections(test_bed) == []


async def test_statement_log_is_switched_on_without_closing_sessions(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    log = tmp_path / "statements.log"
    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        await test_bed.publish(plan_with(node))
        await wait_until(lambda: is_served(test_bed))
        async with connect_client(test_bed) as session:
            assert (await with_timeout(session.login()))[0] == 0
            await change_settings(test_bed, {"statements": {"log": {"path": log, "threshold": 0}}})
            assert (await with_timeout(session.send_command(0x03, b"select 1")))[0] == 0
            (line,) = await wait_for_lines(log, 1)
            assert subset(line, "user", "node", "text") == ("root", "a:4000", "select ?")
        assert rejections(test_bed) == []


async def test_listener_opens_only_after_first_live_config(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_live_config(*_: object) -> ResourceSet:
        return build_resource_set(LIVE_CONFIG, ())

    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotCache, "_live_configs_for", no_live_config)
            test_bed.server.publish(plan_with(node))
            await wait_until(lambda: bool(test_bed.server.statuses()) and not test_bed.status.stale_resources)
            await wait_until(lambda: test_bed.status.has_acknowledged_endpoints)

            async def accepts_connection() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    async with connect_client(test_bed):
                        return True
                return False

            await assert_never(accepts_connection, 0.5)
        test_bed.server.publish(plan_with(node, weight=3))
        await wait_until(lambda: is_served(test_bed))


async def test_rejected_live_config_is_reported_and_previous_stays(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        await test_bed.publish(plan_with(node))
        await wait_until(lambda: is_served(test_bed))
        with publish_for_another_release():
            test_bed.server.publish(plan_with(node, weight=3))
            await wait_until(lambda: bool(rejections(test_bed)))
        nack = test_bed.status.last_nack
        assert nack is not None
        assert nack.type_url == LIVE_CONFIG.url
        assert not test_bed.status.has_acknowledged_endpoints
        assert test_bed.status.filter == "module"
        assert await is_served(test_bed)
        await test_bed.publish(plan_with(node, weight=4))
        assert test_bed.status.has_acknowledged_endpoints
        assert await is_served(test_bed)
        assert len(rejections(test_bed)) == 1


async def test_rejected_live_config_is_rejected_again_after_restart(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    """If Envoy got the same bytes again, it would acknowledge them without asking the module."""
    async with run_test_bed(ports, envoy_process, delta=delta) as (test_bed, node):
        await test_bed.publish(plan_with(node))
        await wait_until(lambda: is_served(test_bed))
        with publish_for_another_release():
            test_bed.server.publish(plan_with(node, EdsHealth.DRAINING))
            await wait_until(lambda: len(rejections(test_bed)) == 1)
            await test_bed.restart_server(plan_with(node, EdsHealth.DRAINING))
            await wait_until(lambda: len(rejections(test_bed)) == 2)
            assert not test_bed.status.has_acknowledged_endpoints


async def test_clients_get_error_while_first_live_config_is_rejected(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with run_test_bed(ports, envoy_process, delta=False) as (test_bed, node):
        with publish_for_another_release():
            test_bed.server.publish(plan_with(node))
            await wait_until(lambda: bool(rejections(test_bed)))

            async def gets_error() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    async with connect_client(test_bed) as raw:
                        return (await with_timeout(raw.read_packet()))[1].startswith(NO_NODE)
                return False

            await wait_until(gets_error)
        await test_bed.publish(plan_with(node, weight=4))
        await wait_until(lambda: is_served(test_bed))


def rejections(test_bed: XdsTestBed) -> list[str]:
    return [message for kind, _, message in test_bed.events if kind == "envoy.nack"]
