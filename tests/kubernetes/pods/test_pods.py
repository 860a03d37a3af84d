"""The chart in a cluster that runs its containers, with SQL clients."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.main import run as run_command
from sandbox.server import http_client
from tests.support.kubernetes.fake_tidb_cluster import TIDB_COUNT, node_address
from tests.support.kubernetes.machine import ZONE
from tests.support.kubernetes.pods import LoadResult, Pods, running_load
from tests.support.kubernetes.prerequisites import TOKEN, secrets
from tests.support.kubernetes.release import Release
from tests.support.kubernetes.value_cases import Values, merged
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

ENVOYS = "app.kubernetes.io/component=envoy"


async def test_release_runs_and_is_changed_under_load(
    pods: Pods, release: Release, values: Values, upgraded: Values, certificates: Path
) -> None:
    await release.install(values, "--wait")
    assert "Phase:          Succeeded" in await release.test()
    print(await release.test("--logs"))
    await check_status(pods)

    service = await release.get("services/tidevoy-sql")
    address = service["spec"]["clusterIP"]
    with running_load(address, 6000) as load:
        await has_progress(load)
        print(f"kubernetes load: {load}")

        await check_reload(pods, release, values)
        await check_server_restart(pods)
        await check_drain_of_an_envoy(pods)
        await check_renewal(pods, certificates)

        # Control planes and Envoys are replaced, and then again by the rollback.
        before = await names(pods, ENVOYS)
        await release.upgrade(merged(values, upgraded), "--wait")
        await pods.wait_ready(ENVOYS, 2)  # Helm does not wait for the last old Pod to end.
        assert not await names(pods, ENVOYS) & before
        await release.rollback("--wait")
        await pods.wait_ready(ENVOYS, 2)
        await has_progress(load)
        await check_status(pods)
    print(f"kubernetes load: {load}")
    assert load.errors == []
    await release.uninstall()


async def has_progress(load: LoadResult) -> None:
    """Wait until clients have run some more transactions."""
    target = load.transactions + 100
    await wait_until(lambda: load.transactions >= target, 60)


async def names(pods: Pods, selector: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in await pods.list(selector)}


async def check_status(pods: Pods) -> None:
    """Check what the control planes show: all Envoys with the module, all servers, both replicas."""
    for replica in range(2):
        running = await names(pods, ENVOYS)
        await wait_until(partial(knows_envoys, pods, running, replica), 60)
        nodes = {each["address"]: each for each in (await pods.tidevoy("nodes", replica=replica))["nodes"]}
        assert set(nodes) == {node_address(number, pods.namespace) for number in range(TIDB_COUNT)}
        assert {each["state"] for each in nodes.values()} == {"active"}
        replicas = (await pods.tidevoy("replicas", replica=replica))["replicas"]
        assert {each["name"] for each in replicas} == {f"tidevoy-control-plane-{n}" for n in range(2)}


async def knows_envoys(pods: Pods, running: set[str], replica: int) -> bool:
    listed: Mapping[str, Any] = {
        each["id"]: each
        for each in (await pods.tidevoy("envoys", replica=replica))["envoys"]
        if each["connected_since"] is not None
    }
    expected = dict.fromkeys(running, ("module", ZONE))
    return {name: (each["filter"], each["zone"]) for name, each in listed.items()} == expected


async def check_reload(pods: Pods, release: Release, values: Values) -> None:
    """A changed setting reaches the control planes without a restart."""
    before = await pods.list("app.kubernetes.io/instance=tidevoy")
    await release.upgrade(merged(values, {"config": {"sql": {"idle_timeout": 600}}}), "--wait")
    for replica in range(2):
        await wait_until(partial(has_idle_timeout, pods, replica, 600), 150)
    after = await pods.list("app.kubernetes.io/instance=tidevoy")
    assert [pod["metadata"]["uid"] for pod in after] == [pod["metadata"]["uid"] for pod in before]


async def has_idle_timeout(pods: Pods, replica: int, seconds: float) -> bool:
    settings = await pods.tidevoy("config", "show", replica=replica)
    return bool(settings["sql"]["idle_timeout"] == seconds)


async def check_server_restart(pods: Pods) -> None:
    """A TiDB server's Pod is deleted: its sessions migrate, and it comes back under its name."""
    await pods.delete("basic-tidb-0")
    await wait_until(partial(is_new, pods, "basic-tidb-0"), 120)
    await pods.wait_ready("app=basic-tidb", TIDB_COUNT)
    await wait_until(partial(all_nodes_are_active, pods), 60)


async def is_new(pods: Pods, name: str) -> bool:
    for pod in await pods.list("app=basic-tidb"):
        if pod["metadata"]["name"] == name:
            return "deletionTimestamp" not in pod["metadata"]
    return False


async def all_nodes_are_active(pods: Pods) -> bool:
    nodes = (await pods.tidevoy("nodes"))["nodes"]
    return len(nodes) == TIDB_COUNT and all(each["state"] == "active" for each in nodes)


async def check_drain_of_an_envoy(pods: Pods) -> None:
    """An Envoy that an operator sets to not ready leaves the Service, and returns."""
    name = min(await names(pods, ENVOYS))
    await pods.kubectl("exec", "tidevoy-control-plane-0", "--", "tidevoy", "envoys", "not-ready", name)
    await wait_until(partial(is_pod_ready, pods, name, False), 30)
    await pods.kubectl("exec", "tidevoy-control-plane-0", "--", "tidevoy", "envoys", "ready", name)
    await wait_until(partial(is_pod_ready, pods, name, True), 30)


async def check_renewal(pods: Pods, certificates: Path) -> None:
    """Control planes present a renewed certificate without a restart."""
    assert await asyncio.to_thread(run_command, ["certificates", "renew", str(certificates), "--all"]) == 0
    name = "tidevoy-control-plane-tls"
    await pods.update_secret(name, secrets(pods.namespace, certificates)[name])
    renewed = ssl.PEM_cert_to_DER_cert((certificates / "control-plane.pem").read_text())
    for pod in await pods.list("app.kubernetes.io/component=control-plane"):
        await wait_until(partial(presents, pod["status"]["podIP"], renewed), 150)


async def presents(address: str, certificate: bytes) -> bool:
    presented = await asyncio.to_thread(ssl.get_server_certificate, (address, 18000))
    return ssl.PEM_cert_to_DER_cert(presented) == certificate


async def is_pod_ready(pods: Pods, name: str, expected: bool) -> bool:
    (pod,) = [each for each in await pods.list(ENVOYS) if each["metadata"]["name"] == name]
    ready = [each["status"] for each in pod["status"]["conditions"] if each["type"] == "Ready"]
    return ready == ["True" if expected else "False"]


async def test_exposed_api_and_envoys_on_each_machine(pods: Pods, release: Release, values: Values) -> None:
    """REST has TLS and tokens, so the kubelet's probes use HTTPS. One control plane, without a volume."""
    other = {
        "api": {"exposed": True, "tokens": {"secretName": "tokens"}},
        "controlPlane": {"replicas": 1, "persistence": {"enabled": False}, "reloader": {"enabled": False}},
        "envoy": {"kind": "DaemonSet", "zone": {"from": "value", "value": "a"}},
    }
    await release.install(merged(values, other), "--wait")
    output = await release.test("--logs")
    assert "tidevoy-api.tidb.svc.cluster.local:3080/readyz: 200" in output

    service = await release.get("services/tidevoy-api")
    url = f"https://{service['spec']['clusterIP']}:3080/v1/envoys"
    async with http_client() as client:
        assert (await client.get(url)).status_code == 401
        answer = await client.get(url, headers={"Authorization": f"Bearer {TOKEN}"})
    (envoy,) = [each for each in answer.json()["envoys"] if each["connected_since"] is not None]
    assert (envoy["id"], envoy["filter"], envoy["zone"]) == (
        min(await names(pods, ENVOYS)),
        "module",
        "a",
    )
    await release.uninstall()
