"""Which changes of values restart Pods, and that names leave room for what Kubernetes appends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubernetes.rendered_chart import Object, RenderedChart, is_selected, render
from tests.support.kubernetes.value_cases import BASE, CASES, Values, merged, rendered


def pod_template(chart: RenderedChart, component: str) -> Object:
    pod = chart.pods_of(component)
    assert pod is not None
    return {"labels": pod.labels, "annotations": pod.annotations, "spec": pod.spec}


def restarted_by(values: Values) -> set[str]:
    before, after = rendered("minimal"), render(merged(BASE, values))
    components = ("control-plane", "envoy")
    return {name for name in components if pod_template(before, name) != pod_template(after, name)}


@pytest.mark.parametrize(
    ("config", "restarted"),
    [
        ({"sql": {"idle_timeout": 600}, "rebalance": {"enabled": False}}, set()),
        ({"end": {"wait": 5, "timeout": 35}}, set()),  # as long together
        ({"groups": [{"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}}]}, {"envoy"}),
        ({"replicas": {"lease_ttl": 10}}, {"control-plane"}),
        ({"pd": {"urls": ["http://other-pd.tidb:2379"]}}, {"control-plane"}),
        ({"overload": {"max_connections": 1000}}, {"envoy"}),
        ({"balance": {"report_interval": 2}}, {"envoy"}),
        ({"end": {"timeout": 60}}, {"envoy"}),  # a longer grace period
    ],
)
def test_changed_settings_restart_only_pods_that_need_it(config: dict[str, Any], restarted: set[str]) -> None:
    assert restarted_by({"config": config}) == restarted


def test_control_planes_and_envoys_can_be_upgraded_one_after_the_other() -> None:
    first = {"controlPlane": {"image": {"tag": "0.2.0"}}, "envoy": {"image": {"tag": "0.1.0"}}}
    assert restarted_by(first) == {"control-plane"}
    envoy = render(merged(BASE, first)).pods_of("envoy")
    assert envoy is not None
    # The bootstrap names the version of the module, so it comes from the image of the Envoys' version.
    images = {container["image"] for container in envoy.containers}
    assert images == {"tidevoy/controlplane:0.1.0", "tidevoy/envoy:0.1.0"}


def test_more_replicas_restart_nothing() -> None:
    values = {
        "controlPlane": {"replicas": 3},
        "envoy": {"replicas": 5},
        "commonLabels": {"team": "databases"},
    }
    assert restarted_by(values) == set()


def test_long_release_name_leaves_room_for_suffixes() -> None:
    chart = render(
        merged(CASES["groups"], {"monitoring": {"dashboards": {"enabled": True}}}), release="r" * 53
    )
    for each in chart.objects:
        # The label of a revision has the name of the StatefulSet and eleven more characters.
        assert len(each["metadata"]["name"]) <= (52 if each["kind"] == "StatefulSet" else 63)
        assert all(len(label) <= 63 for label in each["metadata"]["labels"].values())


def test_two_releases_in_a_namespace_are_separate() -> None:
    one, other = render(BASE, release="red"), render(BASE, release="blue")
    names = [{(each["kind"], each["metadata"]["name"]) for each in chart.objects} for chart in (one, other)]
    assert not names[0] & names[1]
    for service in one.of_kind("Service"):
        assert not any(is_selected(service["spec"]["selector"], pod.labels) for pod in other.pods)
