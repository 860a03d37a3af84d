"""A NACK is reported with Envoy's message, and the Envoy keeps what it had."""

from __future__ import annotations

import pytest

from sandbox.ports import Ports
from tests.support.controlplane.xds_server import (
    StartEnvoy,
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_rig,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_rejected_endpoints_leave_old_ones(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_rig(ports, envoy_process, delta=delta) as parts:
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        good = parts.status.acked_version
        parts.server.publish(
            make_plan(make_node_plan("a:4000", a.endpoint), make_node_plan("b:4000", "no-ip.invalid:4000"))
        )
        await wait_until(lambda: parts.status.last_nack is not None)
        status = parts.status
        assert status.last_nack is not None
        assert "malformed IP address: no-ip.invalid" in status.last_nack.message
        assert status.last_nack.type_url.endswith("ClusterLoadAssignment")
        assert status.acked_version == good != status.published_version
        assert list(await parts.envoy.hosts("tidb")) == [a.endpoint]
        assert (await parts.connect()).node == "a"
        assert await session.is_alive()

        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=5)))
        assert (await parts.envoy.hosts("tidb"))[a.endpoint]["weight"] == 5
        assert parts.event_kinds().count("envoy.nack") == 1  # the version was not sent again
        assert parts.status.last_nack == status.last_nack  # kept until the next NACK


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_rejected_first_listener_falls_back_to_no_filter(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    settings = {"xds": {"filter": "contrib"}}  # the stock Envoy does not have it
    async with (
        run_echo_servers("a") as (a,),
        run_xds_rig(ports, envoy_process, delta=delta, settings=settings) as parts,
    ):
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await parts.wait_for_session()
        assert session.node == "a"
        await wait_until(lambda: parts.status.last_nack is not None and parts.is_acked())
        assert parts.status.filter == "none"
        assert parts.status.last_nack is not None
        assert "envoy.filters.network.mysql_proxy" in parts.status.last_nack.message
        assert parts.event_kinds() == ["envoy.connected", "envoy.nack", "envoy.filter_fallback"]

        await parts.restart_server(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(lambda: parts.status.filter == "none")
        await parts.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=3)))
        assert parts.status.filter == "none"
        assert await session.is_alive()
