"""Failover of a real Envoy between real control plane processes that die or hang."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from controlplane.xds.bootstrap.bootstrap import render_bootstrap
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from tests.support.controlplane.replicas import ControlPlaneGroup
from tests.support.controlplane.xds_server import EchoSession, StartEnvoy, run_echo_servers
from tests.support.fake_servers import FakeServer
from tests.support.waiting import wait_until

DISABLED = {"enabled": False}


async def envoy_at(planes: ControlPlaneGroup, name: str) -> dict[str, Any] | None:
    """Return the Envoy as a control plane shows it; None if unknown or without an answer."""
    with contextlib.suppress(httpx2.HTTPError):
        for envoy in (await planes.get(name, "/v1/envoys"))["envoys"]:
            if envoy["id"] == "envoy-1":
                return dict(envoy)
    return None


async def is_unreachable(planes: ControlPlaneGroup, name: str, by: str) -> bool:
    """Return whether a control plane shows another one as unreachable."""
    replicas = {replica["name"]: replica for replica in (await planes.get(by, "/v1/replicas"))["replicas"]}
    return name not in replicas or bool(replicas[name]["unheard"])


async def wait_until_all_know(
    planes: ControlPlaneGroup, names: Sequence[str], seconds: float, *, without: Sequence[str] = ()
) -> float:
    """Wait until each shows the Envoy as connected and current, and those in `without` as unreachable.

    Return how long that took.
    """
    start = time.monotonic()

    async def is_known_by_all() -> bool:
        for name in names:
            if not all([await is_unreachable(planes, other, name) for other in without]):
                return False
            view = await envoy_at(planes, name)
            if view is None or view["connected_since"] is None:
                return False
            if not view["acked_version"] or view["acked_version"] != view["published_version"]:
                return False
        return True

    await wait_until(is_known_by_all, seconds)
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
        await wait_until_all_know(planes, planes.running_names, 20.0)
        await wait_until(envoy.is_live)
        session = await EchoSession.open(port)
        try:
            assert await session.is_alive()
            yield planes, envoy, session
        finally:
            session.close()


async def test_killed_control_planes_are_replaced_without_session_loss(
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
            elapsed = await wait_until_all_know(planes, planes.running_names, 10.0, without=killed)
            assert elapsed < 3.0
            assert await session.is_alive()
        last = await envoy_at(planes, "c")
        assert last is not None
        assert {last["acked_version"]} == acked
        stats = await envoy.stats("^listener_manager.listener_(added|modified|removed)$")
        assert sorted(stats.values()) == [0, 0, 1]


async def test_envoy_leaves_a_hanging_control_plane_and_others_see_it(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (node,),
        running_site(tmp_path, ports, envoy_process, node) as (planes, _, session),
    ):
        for hanging in ("a", "b", "c"):
            others = [name for name in planes.running_names if name != hanging]
            planes.control_planes[hanging].process.send_signal(signal.SIGSTOP)
            try:
                elapsed = await wait_until_all_know(planes, others, 20.0, without=[hanging])
                assert elapsed < 9.0
                assert await session.is_alive()
            finally:
                planes.control_planes[hanging].process.send_signal(signal.SIGCONT)
            await wait_until_all_know(planes, planes.running_names, 30.0)
