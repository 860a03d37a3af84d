"""A NACK is reported with Envoy's message, and the Envoy keeps its previous resources."""

from __future__ import annotations

from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import (
    make_node_plan,
    make_plan,
    run_echo_servers,
    run_xds_test_bed,
)
from tests.support.waiting import wait_until


async def test_rejected_endpoints_leave_old_ones(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_echo_servers("a") as (a,), run_xds_test_bed(ports, envoy_process, delta=delta) as test_bed:
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        good = test_bed.status.acked_version
        test_bed.server.publish(
            make_plan(make_node_plan("a:4000", a.endpoint), make_node_plan("b:4000", "no-ip.invalid:4000"))
        )
        await wait_until(lambda: test_bed.status.last_nack is not None)
        status = test_bed.status
        assert status.last_nack is not None
        assert "malformed IP address: no-ip.invalid" in status.last_nack.message
        assert status.last_nack.type_url.endswith("ClusterLoadAssignment")
        assert status.acked_version == good != status.published_version
        assert list(await test_bed.envoy.hosts("tidb")) == [a.endpoint]
        assert (await test_bed.connect()).node == "a"
        assert await session.is_alive()

        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=5)))
        assert (await test_bed.envoy.hosts("tidb"))[a.endpoint]["weight"] == 5
        assert test_bed.event_kinds().count("envoy.nack") == 1  # the rejected version was not sent again
        assert test_bed.status.last_nack == status.last_nack  # kept until the next NACK


async def test_rejected_first_listener_falls_back_to_no_filter(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    settings = {"xds": {"filter": "contrib"}}  # the stock Envoy lacks this filter
    async with (
        run_echo_servers("a") as (a,),
        run_xds_test_bed(ports, envoy_process, delta=delta, settings=settings) as test_bed,
    ):
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint)))
        session = await test_bed.wait_for_session()
        assert session.node == "a"
        await wait_until(lambda: test_bed.status.last_nack is not None and test_bed.is_acked())
        assert test_bed.status.filter == "none"
        assert test_bed.status.last_nack is not None
        assert "envoy.filters.network.mysql_proxy" in test_bed.status.last_nack.message
        assert test_bed.event_kinds() == ["envoy.connected", "envoy.nack", "envoy.filter_fallback"]

        await test_bed.restart_server(make_plan(make_node_plan("a:4000", a.endpoint)))
        await wait_until(lambda: test_bed.status.filter == "none")
        await test_bed.publish(make_plan(make_node_plan("a:4000", a.endpoint, weight=3)))
        assert test_bed.status.filter == "none"
        assert await session.is_alive()
