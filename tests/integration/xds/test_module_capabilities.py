"""Envoys without the module, even if they claim to have it: their resources and reported problems."""

from __future__ import annotations

import pytest

from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    XdsTestBed,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.waiting import wait_until

REQUIRED_TLS = {"tls": {"client": {"mode": "required", "cert": "/no/cert.pem", "key": "/no/key.pem"}}}


async def refuses_connections(test_bed: XdsTestBed) -> bool:
    try:
        await test_bed.connect()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize(("filter_setting", "claimed_version"), [("auto", VERSION), ("module", "")])
async def test_envoy_without_module_falls_back_to_no_filter(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, filter_setting: str, claimed_version: str
) -> None:
    settings = {"xds": {"filter": filter_setting}}
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(
            ports, envoy_process, delta=delta, settings=settings, claimed_module_version=claimed_version
        ) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        assert session.node == "a"
        await wait_until(lambda: test_bed.status.filter == "none" and test_bed.is_acked())
        status = test_bed.status
        assert status.module_version == claimed_version
        assert status.last_nack is not None
        assert status.last_nack.type_url.endswith(".Cluster")
        assert "libtidevoy.so" in status.last_nack.message
        assert status.problem.startswith("it rejected Tidevoy's module")
        assert sorted(test_bed.event_kinds()) == [
            "envoy.connected",
            "envoy.filter_fallback",
            "envoy.nack",
            "envoy.problem",
        ]
        # A restarted control plane does not try the module again, because this could end the session.
        await test_bed.restart_server(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(lambda: test_bed.status.filter == "none")
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=3)))
        assert await session.is_alive()
        assert "envoy.nack" not in test_bed.event_kinds()[4:]


async def test_incompatible_module_is_not_configured(ports: Ports, envoy_process: StartEnvoy) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, claimed_module_version="99.0.0") as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        assert (await test_bed.wait_for_session()).node == "a"
        await wait_until(lambda: "envoy.problem" in test_bed.event_kinds())
        assert (test_bed.status.filter, test_bed.status.module_version) == ("none", "99.0.0")
        assert "99.0.0" in test_bed.status.problem
        assert test_bed.status.last_nack is None


@pytest.mark.parametrize("claimed_version", ["", VERSION])
async def test_required_tls_gives_no_listener_without_module(
    ports: Ports, envoy_process: StartEnvoy, delta: bool, claimed_version: str
) -> None:
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(
            ports, envoy_process, delta=delta, settings=REQUIRED_TLS, claimed_module_version=claimed_version
        ) as test_bed,
    ):
        test_bed.server.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        reason = "it gets no listener"
        await wait_until(lambda: any(message.startswith(reason) for _, _, message in test_bed.events))
        assert test_bed.status.problem.startswith(
            "it gets no listener, because tls.client.mode is set to required and it"
        )
        assert ("envoy.problem", "envoy-1", test_bed.status.problem) in test_bed.events
        assert not test_bed.is_acked()
        assert await refuses_connections(test_bed)

        # TLS is no longer required. The cluster changes and has no session, so Envoy replaces it.
        test_bed.server.configure(
            test_bed.with_settings({"tls": {"client": {}}, "backend": {"connect_timeout": 0.7}})
        )
        assert (await test_bed.wait_for_session()).node == "a"
        await wait_until(test_bed.is_acked)
        assert test_bed.status.stale_resources == ()
        dump = (await test_bed.envoy.get("/config_dump?resource=dynamic_active_clusters")).json()
        assert [config["cluster"]["connect_timeout"] for config in dump["configs"]] == ["0.700s"]


async def test_reports_envoys_that_run_without_later_required_tls(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        test_bed.server.configure(test_bed.with_settings(REQUIRED_TLS))
        await wait_until(lambda: "envoy.problem" in test_bed.event_kinds())
        assert test_bed.status.problem.startswith("it still runs older settings, although tls.client.mode")
        assert test_bed.status.stale_resources == ("listener",)
        assert await session.is_alive()
