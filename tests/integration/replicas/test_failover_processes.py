"""Real control planes that die or hang, and a real Envoy that knows all of them."""

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

OFF = {"enabled": False}


async def envoy_at(planes: ControlPlaneGroup, name: str) -> dict[str, Any] | None:
    """The Envoy as a control plane shows it; None: it does not know it, or does not answer."""
    with contextlib.suppress(httpx2.HTTPError):
        for each in (await planes.get(name, "/v1/envoys"))["envoys"]:
            if each["id"] == "envoy-1":
                return dict(each)
    return None


async def is_missed(planes: ControlPlaneGroup, name: str, by: str) -> bool:
    """Whether a control plane knows that it hears nothing of that one's Envoys."""
    told = {each["name"]: each for each in (await planes.get(by, "/v1/replicas"))["replicas"]}
    return name not in told or bool(told[name]["unheard"])


async def all_know(
    planes: ControlPlaneGroup, names: Sequence[str], seconds: float, *, without: Sequence[str] = ()
) -> float:
    """Returns when each shows the Envoy as connected and up to date, and hears none of those `without`."""
    begun = time.monotonic()

    async def do_all() -> bool:
        for name in names:
            if not all([await is_missed(planes, gone, name) for gone in without]):
                return False
            shown = await envoy_at(planes, name)
            if shown is None or shown["connected_since"] is None:
                return False
            if not shown["acked_version"] or shown["acked_version"] != shown["published_version"]:
                return False
        return True

    await wait_until(do_all, seconds)
    return time.monotonic() - begun


@contextlib.asynccontextmanager
async def site(
    directory: Path, ports: Ports, start_envoy: StartEnvoy, node: FakeServer
) -> AsyncIterator[tuple[ControlPlaneGroup, EnvoyProcess, EchoSession]]:
    """Three control planes, an Envoy at one of them, and a session through it."""
    port = ports.allocate()
    shared = {
        "sql": {"listen": f"127.0.0.1:{port}"},
        "nodes": [{"address": node.endpoint}],
        "health": {"sql": OFF, "status": OFF},
    }
    async with ControlPlaneGroup(directory, extra_settings=shared) as planes:
        await planes.wait_for_leader()
        addresses = [planes.xds(name) for name in planes.control_planes]
        wanted = planes.control_planes["a"].parsed_settings()
        envoy = await start_envoy(
            render_bootstrap(wanted, control_planes=addresses, node_id="envoy-1", admin="127.0.0.1:0")
        )
        await all_know(planes, planes.running_names, 20.0)
        await wait_until(envoy.is_live)
        session = await EchoSession.open(port)
        try:
            assert await session.is_alive()
            yield planes, envoy, session
        finally:
            session.close()


async def test_control_planes_that_die_are_replaced_and_no_session_notices(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (node,),
        site(tmp_path, ports, envoy_process, node) as (planes, envoy, session),
    ):
        shown = {name: await envoy_at(planes, name) for name in planes.running_names}
        acked = {each["acked_version"] for each in shown.values() if each is not None}
        assert len(acked) == 1
        for dead in (["a"], ["a", "b"]):
            await planes.kill(dead[-1])
            took = await all_know(planes, planes.running_names, 10.0, without=dead)
            assert took < 3.0
            assert await session.is_alive()
        last = await envoy_at(planes, "c")
        assert last is not None
        assert {last["acked_version"]} == acked
        stats = await envoy.stats("^listener_manager.listener_(added|modified|removed)$")
        assert sorted(stats.values()) == [0, 0, 1]


async def test_a_control_plane_that_hangs_is_left_and_the_others_see_it(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with (
        run_echo_servers("a") as (node,),
        site(tmp_path, ports, envoy_process, node) as (planes, _, session),
    ):
        for hanging in ("a", "b", "c"):
            others = [name for name in planes.running_names if name != hanging]
            planes.control_planes[hanging].process.send_signal(signal.SIGSTOP)
            try:
                took = await all_know(planes, others, 20.0, without=[hanging])
                assert took < 9.0
                assert await session.is_alive()
            finally:
                planes.control_planes[hanging].process.send_signal(signal.SIGCONT)
            await all_know(planes, planes.running_names, 30.0)
