"""Failover of a real Envoy between real control plane processes that die or hang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.replicas import ControlPlaneGroup
from tests.support.controlplane.xds_server import EchoSession, run_echo_servers
from tests.support.fake_servers import FakeServer
from tests.support.suspension import suspended
from tests.support.waiting import wait_until

DISABLED = {"enabled": False}


async def envoy_at(planes: ControlPlaneGroup, name: str) -> dict[str, Any] | None:
    """Return a control plane's view of the Envoy, `None` if the Envoy is unknown or the request fails."""
    with contextlib.suppress(httpx2.HTTPError):
        for envoy in (await planes.get(name, "/v1/envoys"))["envoys"]:
            if envoy["id"] == "envoy-1":
                return dict(envoy)
    return None


async def is_unreachable(planes: ControlPlaneGroup, name: str, by: str) -> bool:
    """Return whether control plane `by` shows control plane `name` as unreachable, or does not list it."""
    replicas = {replica["name"]: replica for replica in (await planes.get(by, "/v1/replicas"))["replicas"]}
    return name not in replicas or bool(replicas[name]["unreachable"])


async def wait_until_all_agree(
    planes: ControlPlaneGroup, names: Sequence[str], seconds: float, *, unreachable: Sequence[str] = ()
) -> float:
    """Wait until all control planes in `names` show the expected state; return the seconds that it took.

    In this state, the Envoy is connected and has acknowledged the latest configuration, and the control
    planes in `unreachable` are unreachable.
    """
    start = time.monotonic()

    async def do_all_agree() -> bool:
        for name in names:
            if not all([await is_unreachable(planes, other, by=name) for other in unreachable]):
                return False
            view = await envoy_at(planes, name)
            if view is None or view["connected_since"] is None:
                return False
            if not view["acked_version"] or view["acked_version"] != view["published_version"]:
                return False
        return True

    await wait_until(do_all_agree, seconds)
    return time.monotonic() - start


@contextlib.asynccontextmanager
async def running_site(
    directory: Path, ports: Ports, start_envoy: StartEnvoy, node: FakeServer
) -> AsyncIterator[tuple[ControlPlaneGroup, EnvoyProcess, EchoSession]]:
    """Run three control planes, an Envoy connected to one of them, and a session through it."""
    port = ports.allocate()
    shared = {
        "sql": {"listen": f"127.0.0.1:{port}"},
        "nodes": [{"address": node.endpoint}],
        "health": {"sql": DISABLED, "status": DISABLED},
    }
    async with ControlPlaneGroup(directory, extra_settings=shared) as planes:
        await planes.wait_for_leader()
        addresses = [planes.xds(name) for name in planes.control_planes]
        config = planes.control_planes["a"].parsed_settings()
        envoy = await start_envoy(
            render_bootstrap(config, control_planes=addresses, node_id="envoy-1", admin="127.0.0.1:0")
        )
        await wait_until_all_agree(planes, planes.running_names, 20.0)
        await wait_until(envoy.is_live)
        session = await EchoSession.open(port)
        try:
            assert await session.is_alive()
            yield planes, envoy, session
        finally:
            session.close()


async def test_envoy_leaves_killed_control_planes_without_session_loss(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (node,),
        running_site(tmp_path, ports, envoy_process, node) as (planes, envoy, session),
    ):
        views = {name: await envoy_at(planes, name) for name in planes.running_names}
        acked = {view["acked_version"] for view in views.values() if view is not None}
        assert len(acked) == 1
        for killed in (["a"], ["a", "b"]):
            await planes.kill(killed[-1])
            elapsed = await wait_until_all_agree(planes, planes.running_names, 10.0, unreachable=killed)
            assert elapsed < 6.0
            assert await session.is_alive()
        last = await envoy_at(planes, "c")
        assert last is not None
        assert {last["acked_version"]} == acked
        stats = await envoy.stats("^listener_manager.listener_(added|modified|removed)$")
        assert sorted(stats.values()) == [0, 0, 1]


async def test_envoy_leaves_a_hanging_control_plane_that_others_show_as_unreachable(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (node,),
        running_site(tmp_path, ports, envoy_process, node) as (planes, _, session),
    ):
        for hanging in ("a", "b", "c"):
            others = [name for name in planes.running_names if name != hanging]
            async with suspended(planes.control_planes[hanging].process.pid):
                elapsed = await wait_until_all_agree(planes, others, 20.0, unreachable=[hanging])
                assert elapsed < 15.0
                assert await session.is_alive()
            await wait_until_all_agree(planes, planes.running_names, 30.0)
