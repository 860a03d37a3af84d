"""A real API server accepts all objects of the chart, and its controllers make Pods of them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.conftest import CreateRelease
from tests.support.kubernetes.cluster import KubernetesCluster
from tests.support.kubernetes.fake_machines import FakeMachines, is_ready
from tests.support.kubernetes.release import Release
from tests.support.kubernetes.rendered_chart import HelmFailed, Object
from tests.support.kubernetes.value_cases import BASE, CASES, merged
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def count_ready(release: Release, component: str) -> int:
    return sum(is_ready(pod) for pod in await release.pods(component))


async def has_pods(release: Release, component: str, count: int) -> bool:
    return len(await release.pods(component)) == count


@pytest.mark.parametrize("case", CASES)
async def test_objects_are_accepted(
    case: str, cluster: KubernetesCluster, machines: FakeMachines, create_release: CreateRelease
) -> None:
    """The namespace enforces the restricted Pod security standard, so all Pods meet it."""
    release = await create_release(re.sub(r"\W+", "-", case).lower())
    await release.install(CASES[case])
    for component, default in (("control-plane", 2), ("envoy", 3)):
        section = CASES[case].get({"control-plane": "controlPlane"}.get(component, component), {})
        count = section.get("replicas", default) if section.get("enabled", True) else 0
        # Until metrics are known, an autoscaler sees only that there are fewer Pods than its minimum.
        await wait_until(partial(has_pods, release, component, count), 60)
    assert "Warning" not in str(await failures(release))
    await release.uninstall()
    for resource, group in (("services", "v1"), ("statefulsets", "apps/v1"), ("configmaps", "v1")):
        names = [each["metadata"]["name"] for each in (await release.get(resource, group))["items"]]
        assert names in ([], ["kube-root-ca.crt"])


async def failures(release: Release) -> list[str]:
    """Return why controllers could not create something."""
    events = (await release.get("events"))["items"]
    return [each["message"] for each in events if each["reason"] in ("FailedCreate", "ReplicaSetCreateError")]


async def test_release_is_updated_rolled_back_and_removed(
    machines: FakeMachines, create_release: CreateRelease
) -> None:
    release = await create_release("lifecycle")
    await release.install(BASE, "--wait")
    assert (await count_ready(release, "control-plane"), await count_ready(release, "envoy")) == (2, 3)
    assert "tidevoy-sql.lifecycle.svc.cluster.local:6000" in await release.notes()
    assert "Phase:          Succeeded" in await release.test()
    zones = [pod["spec"]["nodeName"] for pod in await release.pods("envoy")]
    assert len(set(zones)) == 3

    # A reload applies this setting, so no Pod restarts.
    before = await names(release)
    reloaded = merged(BASE, {"config": {"sql": {"idle_timeout": 600}}})
    await release.upgrade(reloaded, "--wait")
    assert await names(release) == before
    config = await release.get("configmaps/tidevoy-control-plane")
    assert "idle_timeout: 600" in config["data"]["tidevoy.yaml"]

    # A changed image replaces all Pods. Meanwhile, enough of them are ready.
    lowest = {"envoy": 3, "control-plane": 2}

    def observe(pods: list[Object]) -> None:
        for component in lowest:
            ready = [pod for pod in pods if is_of(pod, release, component) and is_ready(pod)]
            lowest[component] = min(lowest[component], len(ready))

    async with machines.observed(observe):
        images = {"controlPlane": {"image": {"tag": "0.1.1"}}, "envoy": {"image": {"tag": "0.1.1"}}}
        await release.upgrade(merged(reloaded, images), "--wait")
        # Helm does not wait for the last old Pod to end.
        await wait_until(partial(has_pods, release, "envoy", 3), 60)
    upgraded = await names(release)
    assert not upgraded["envoy"] & before["envoy"]
    assert upgraded["control-plane"] == before["control-plane"]  # new Pods of the same names
    assert {image_of(pod) for pod in await release.pods("control-plane")} == {"tidevoy/controlplane:0.1.1"}
    assert lowest == {"envoy": 3, "control-plane": 1}

    await release.rollback("--wait")
    await wait_until(partial(has_pods, release, "envoy", 3), 60)
    assert {image_of(pod) for pod in await release.pods("envoy")} == {"tidevoy/envoy:0.1.0"}

    await release.uninstall()
    await wait_until(partial(has_pods, release, "envoy", 0))
    claims = (await release.get("persistentvolumeclaims"))["items"]
    assert {claim["metadata"]["name"] for claim in claims} == {
        "state-tidevoy-control-plane-0",
        "state-tidevoy-control-plane-1",
    }


def is_of(pod: Object, release: Release, component: str) -> bool:
    metadata = pod["metadata"]
    labels: dict[str, str] = metadata.get("labels", {})
    is_component = labels.get("app.kubernetes.io/component") == component
    return is_component and bool(metadata["namespace"] == release.namespace)


def image_of(pod: Object) -> str:
    image: str = pod["spec"]["containers"][0]["image"]
    return image


async def names(release: Release) -> dict[str, set[str]]:
    return {
        component: {pod["metadata"]["name"] for pod in await release.pods(component)}
        for component in ("control-plane", "envoy")
    }


async def test_one_envoy_at_a_time_can_be_evicted(
    cluster: KubernetesCluster, machines: FakeMachines, create_release: CreateRelease
) -> None:
    release = await create_release("eviction")
    await release.install(BASE, "--wait")

    async def budget_allows(count: int) -> bool:
        budget = await release.get("poddisruptionbudgets/tidevoy-envoy", "policy/v1")
        allowed = budget.get("status", {}).get("disruptionsAllowed", 0)
        return int(allowed) == count

    await wait_until(partial(budget_allows, 1))
    results = [await evict(cluster, release, pod) for pod in (await release.pods("envoy"))[:2]]
    assert results[0] == ""
    assert "violate the pod's disruption budget" in results[1]
    await release.uninstall()


async def evict(cluster: KubernetesCluster, release: Release, pod: Object) -> str:
    """Evict a Pod, as `kubectl drain` does. Return why this is not allowed; empty if it is."""
    name = pod["metadata"]["name"]
    eviction: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": release.namespace},
    }
    try:
        await cluster.create(f"{release.path(f'pods/{name}')}/eviction", eviction)
    except Exception as error:
        return str(error)
    return ""


async def test_autoscaler_sets_number_of_envoys_and_upgrades_keep_it(
    cluster: KubernetesCluster, machines: FakeMachines, create_release: CreateRelease
) -> None:
    release = await create_release("autoscaled")
    values = merged(BASE, {"envoy": {"autoscaling": {"enabled": True, "minReplicas": 2}}})
    await release.install(values, "--wait")
    await wait_until(partial(has_pods, release, "envoy", 2), 60)
    # As the autoscaler does.
    scale = release.path("deployments/tidevoy-envoy/scale", "apps/v1")
    await cluster.patch(scale, {"spec": {"replicas": 5}})
    await wait_until(partial(has_pods, release, "envoy", 5), 60)
    before = await names(release)
    await release.upgrade(merged(values, {"controlPlane": {"replicas": 3}}), "--wait")
    await release.rollback("--wait")
    assert (await names(release))["envoy"] == before["envoy"]
    await release.uninstall()


async def test_autoscaler_that_is_enabled_later_ends_with_its_minimum(
    machines: FakeMachines, create_release: CreateRelease
) -> None:
    """values.yaml says what happens before."""
    release = await create_release("autoscaled-later")
    await release.install(merged(BASE, {"envoy": {"replicas": 5}}), "--wait")
    await release.upgrade(merged(BASE, {"envoy": {"autoscaling": {"enabled": True}}}), "--wait")
    await wait_until(partial(has_pods, release, "envoy", 3), 120)
    await release.uninstall()


async def test_persistence_cannot_be_changed_later(
    machines: FakeMachines, create_release: CreateRelease
) -> None:
    """values.yaml says so."""
    release = await create_release("persistence")
    await release.install(BASE)
    with pytest.raises(HelmFailed, match="updates to statefulset spec for fields other than"):
        await release.upgrade(merged(BASE, {"controlPlane": {"persistence": {"enabled": False}}}))
    await release.uninstall()


async def test_zone_label_of_pod_reaches_init_container(
    cluster: KubernetesCluster, machines: FakeMachines, create_release: CreateRelease
) -> None:
    """The API accepts the downward API's reference to a label that the Pod may lack."""
    release = await create_release("zones")
    await release.install(BASE, "--wait")
    (pod, *_) = await release.pods("envoy")
    (init,) = pod["spec"]["initContainers"]
    (variable,) = init["env"]
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['topology.kubernetes.io/zone']"
    assert "--zone=$(ZONE)" in init["args"]
    await release.uninstall()
