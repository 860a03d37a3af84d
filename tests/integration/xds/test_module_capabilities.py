"""Envoys without the module, or with another one than they report: their resources and problems."""

from __future__ import annotations

import pytest

from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.xds_server import (
    StartEnvoy,
    XdsRig,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_rig,
)
from tests.support.waiting import wait_until

REQUIRED_TLS = {"tls": {"client": {"mode": "required", "cert": "/no/cert.pem", "key": "/no/key.pem"}}}


async def refuses_connections(parts: XdsRig) -> bool:
    try:
        await parts.connect()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
@pytest.mark.parametrize(("filter_setting", "claimed_version"), [("auto", VERSION), ("module", "")])
async def test_envoy_without_module_rejects_its_parts_and_serves_plain(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, filter_setting: str, claimed_version: str
) -> None:
    settings = {"xds": {"filter": filter_setting}}
    async with (
        run_echo_servers("a") as (a,),
        run_xds_rig(
            ports, envoy_process, delta=delta, settings=settings, claimed_module_version=claimed_version
        ) as parts,
    ):
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        assert session.node == "a"
        await wait_until(lambda: parts.status.filter == "none" and parts.is_acked())
        status = parts.status
        assert status.module_version == claimed_version
        assert status.last_nack is not None
        assert status.last_nack.type_url.endswith(".Cluster")
        assert "libtidevoy.so" in status.last_nack.message
        assert status.problem.startswith("it rejected Tidevoy's module")
        assert sorted(parts.event_kinds()) == [
            "envoy.connected",
            "envoy.filter_fallback",
            "envoy.nack",
            "envoy.problem",
        ]
        # A new control plane does not retry what could end the session.
        await parts.restart_server(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(lambda: parts.status.filter == "none")
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=3)))
        assert await session.is_alive()
        assert "envoy.nack" not in parts.event_kinds()[4:]


async def test_incompatible_module_is_not_configured(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_rig(ports, envoy_process, claimed_module_version="99.0.0") as parts,
    ):
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await parts.wait_for_session()).node == "a"
        await wait_until(lambda: "envoy.problem" in parts.event_kinds())
        assert (parts.status.filter, parts.status.module_version) == ("none", "99.0.0")
        assert "99.0.0" in parts.status.problem
        assert parts.status.last_nack is None


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
@pytest.mark.parametrize("claimed_version", ["", VERSION])
async def test_required_tls_gives_no_listener_without_module(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, claimed_version: str
) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_rig(
            ports, envoy_process, delta=delta, settings=REQUIRED_TLS, claimed_module_version=claimed_version
        ) as parts,
    ):
        parts.server.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        reason = "it gets no listener"
        await wait_until(lambda: any(message.startswith(reason) for _, _, message in parts.events))
        assert parts.status.problem.startswith(
            "it gets no listener, because tls.client.mode is set to required and it"
        )
        assert ("envoy.problem", "envoy-1", parts.status.problem) in parts.events
        assert not parts.is_acked()
        assert await refuses_connections(parts)

        # TLS is not required any more, and the cluster changes: it carries no session, so it is replaced.
        parts.server.configure(
            parts.with_settings({"tls": {"client": {}}, "backend": {"connect_timeout": 0.7}})
        )
        assert (await parts.wait_for_session()).node == "a"
        await wait_until(parts.is_acked)
        assert parts.status.stale_resources == ()
        dump = (await parts.envoy.get("/config_dump?resource=dynamic_active_clusters")).json()
        assert [config["cluster"]["connect_timeout"] for config in dump["configs"]] == ["0.700s"]


async def test_reports_envoys_that_run_without_later_required_tls(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        parts.server.configure(parts.with_settings(REQUIRED_TLS))
        await wait_until(lambda: "envoy.problem" in parts.event_kinds())
        assert parts.status.problem.startswith("it still runs older settings, although tls.client.mode")
        assert parts.status.stale_resources == ("listener",)
        assert await session.is_alive()
