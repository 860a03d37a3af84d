"""The live configuration of the module in a real Envoy, by both variants of xDS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from controlplane.model.plan import EdsHealth, Plan
from controlplane.xds.resource_set import ResourceSet, build_resource_set
from controlplane.xds.resource_type import LIVE_CONFIG
from controlplane.xds.resources import live_config
from controlplane.xds.snapshot_cache import SnapshotCache
from sandbox.ports import Ports
from tests.support.controlplane.xds_server import StartEnvoy, XdsRig, make_node_plan, make_plan, run_xds_rig
from tests.support.fake_servers import FakeServer, run_fake_server
from tests.support.module.bootstrap import require_module
from tests.support.module.envoy import serve_ok, with_timeout
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_never, wait_until

BOTH_VARIANTS = pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
NO_NODE = b"\xff\x51\x04"  # error 1105


@contextlib.asynccontextmanager
async def run_rig(
    ports: Ports, envoy_process: StartEnvoy, *, delta: bool
) -> AsyncIterator[tuple[XdsRig, FakeServer]]:
    """A control plane, an Envoy with the module, and a node that accepts every login."""
    async with (
        run_fake_server(serve_ok) as node,
        run_xds_rig(ports, envoy_process, delta=delta, module=require_module()) as parts,
    ):
        yield parts, node


def plan_with(node: FakeServer, eds_health: EdsHealth = EdsHealth.HEALTHY, weight: int = 100) -> Plan:
    return make_plan(make_node_plan("a:4000", node.endpoint, eds_health, weight))


@contextlib.asynccontextmanager
async def connect_client(parts: XdsRig) -> AsyncIterator[RawClient]:
    """A client's connection."""
    raw = RawClient(*await asyncio.open_connection("127.0.0.1", parts.sql_port))
    try:
        yield raw
    finally:
        raw.writer.transport.abort()


@contextlib.contextmanager
def publish_for_another_release() -> Iterator[None]:
    """Publish configurations for another release of the module, which rejects them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_config, "VERSION", "99.0.0")
        yield


async def is_served(parts: XdsRig) -> bool:
    """Whether a new client is greeted by the node. If not, it must get the error that there is none."""
    try:
        async with connect_client(parts) as raw:
            packet = (await with_timeout(raw.read_packet()))[1]
    except ConnectionRefusedError:
        return False
    assert packet[0] == 0x0A or packet.startswith(NO_NODE)
    return packet[0] == 0x0A


@BOTH_VARIANTS
async def test_node_changes_reach_module_without_closing_sessions(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_rig(ports, envoy_process, delta=delta) as (parts, node):
        await parts.publish(plan_with(node))
        await wait_until(lambda: is_served(parts))
        assert (parts.status.filter, parts.status.eds_acked) == ("module", True)
        async with connect_client(parts) as session:
            assert (await with_timeout(session.login()))[0] == 0
            for weight in range(1, 6):
                await parts.publish(plan_with(node, weight=weight))
            await parts.publish(plan_with(node, EdsHealth.DRAINING))
            assert parts.status.eds_acked
            assert not await is_served(parts)
            # A restarted control plane with the same plan changes nothing.
            await parts.restart_server(plan_with(node, EdsHealth.DRAINING))
            await wait_until(parts.is_acked)
            await parts.publish(plan_with(node))
            await wait_until(lambda: is_served(parts))
            assert (await with_timeout(session.send_command(0x0E)))[0] == 0
        assert rejections(parts) == []


@BOTH_VARIANTS
async def test_listener_opens_only_after_first_live_config(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_live_config(self: SnapshotCache, ports: object) -> ResourceSet:
        return build_resource_set(LIVE_CONFIG, ())

    async with run_rig(ports, envoy_process, delta=delta) as (parts, node):
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotCache, "_live_configs_for", no_live_config)
            parts.server.publish(plan_with(node))
            await wait_until(lambda: bool(parts.server.statuses()) and not parts.status.stale_resources)
            await wait_until(lambda: parts.status.eds_acked)

            async def accepts_connection() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    async with connect_client(parts):
                        return True
                return False

            await assert_never(accepts_connection, 0.5)
        parts.server.publish(plan_with(node, weight=3))
        await wait_until(lambda: is_served(parts))


@BOTH_VARIANTS
async def test_rejected_live_config_is_reported_and_previous_stays(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_rig(ports, envoy_process, delta=delta) as (parts, node):
        await parts.publish(plan_with(node))
        await wait_until(lambda: is_served(parts))
        with publish_for_another_release():
            parts.server.publish(plan_with(node, weight=3))
            await wait_until(lambda: bool(rejections(parts)))
        nack = parts.status.last_nack
        assert nack is not None
        assert nack.type_url == LIVE_CONFIG.url
        assert not parts.status.eds_acked
        assert parts.status.filter == "module"
        assert await is_served(parts)
        await parts.publish(plan_with(node, weight=4))
        assert parts.status.eds_acked
        assert await is_served(parts)
        assert len(rejections(parts)) == 1


@BOTH_VARIANTS
async def test_rejected_live_config_is_rejected_again_after_restart(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    """Envoy would acknowledge the same bytes without asking the module."""
    async with run_rig(ports, envoy_process, delta=delta) as (parts, node):
        await parts.publish(plan_with(node))
        await wait_until(lambda: is_served(parts))
        with publish_for_another_release():
            parts.server.publish(plan_with(node, EdsHealth.DRAINING))
            await wait_until(lambda: len(rejections(parts)) == 1)
            await parts.restart_server(plan_with(node, EdsHealth.DRAINING))
            await wait_until(lambda: len(rejections(parts)) == 2)
            assert not parts.status.eds_acked


async def test_clients_get_error_while_first_live_config_is_rejected(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with run_rig(ports, envoy_process, delta=False) as (parts, node):
        with publish_for_another_release():
            parts.server.publish(plan_with(node))
            await wait_until(lambda: bool(rejections(parts)))

            async def gets_error() -> bool:
                with contextlib.suppress(ConnectionRefusedError):
                    async with connect_client(parts) as raw:
                        return (await with_timeout(raw.read_packet()))[1].startswith(NO_NODE)
                return False

            await wait_until(gets_error)
        await parts.publish(plan_with(node, weight=4))
        await wait_until(lambda: is_served(parts))


def rejections(parts: XdsRig) -> list[str]:
    return [message for kind, _, message in parts.events if kind == "envoy.nack"]
