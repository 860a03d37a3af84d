"""The NetworkPolicies let each connection pass that Tidevoy needs, and no other."""

from __future__ import annotations

import pytest

from tests.support.kubernetes.network_policies import Peer, is_allowed
from tests.support.kubernetes.rendered_chart import PodTemplate
from tests.support.kubernetes.value_cases import CASES, rendered

OUTSIDE = Peer()
STRANGER = Peer(labels={"app": "stranger"})
SHOP = Peer(labels={"app": "shop"})
PROMETHEUS = Peer(labels={"app": "prometheus"}, namespace="monitoring")


def pods(case: str) -> dict[str, PodTemplate]:
    return {pod.labels["app.kubernetes.io/component"]: pod for pod in rendered(case).pods}


@pytest.mark.parametrize("case", CASES)
def test_needed_connections_pass(case: str) -> None:
    chart, by_component = rendered(case), pods(case)
    peers = {component: Peer(labels=pod.labels) for component, pod in by_component.items()}
    if control_plane := by_component.get("control-plane"):
        assert is_allowed(chart, peers["control-plane"], control_plane, "xds")
        if "envoy" in peers:
            assert is_allowed(chart, peers["envoy"], control_plane, "xds")
        if "api" in control_plane.ports:
            assert is_allowed(chart, peers["test"], control_plane, "api")
    if envoy := by_component.get("envoy"):
        for port in envoy.ports.keys() - {"health"}:
            assert is_allowed(chart, peers["test"], envoy, port)


@pytest.mark.parametrize("case", CASES)
def test_strangers_reach_no_port_but_sql(case: str) -> None:
    chart, by_component = rendered(case), pods(case)
    for component, port in (("control-plane", "xds"), ("control-plane", "api"), ("envoy", "health")):
        if (pod := by_component.get(component)) is None or port not in pod.ports:
            continue
        for peer in (OUTSIDE, STRANGER):
            assert not is_allowed(chart, peer, pod, port), f"{peer} -> {component}:{port}"


def test_sql_is_open_unless_peers_are_listed() -> None:
    open_chart, listed = rendered("minimal"), rendered("groups")
    for peer in (OUTSIDE, STRANGER):
        assert is_allowed(open_chart, peer, pods("minimal")["envoy"], "sql")
        assert not is_allowed(listed, peer, pods("groups")["envoy"], "sql")
    for port in ("sql", "sql-6001", "sql-6002"):
        assert is_allowed(listed, SHOP, pods("groups")["envoy"], port)


def test_listed_peers_reach_health_rest_and_metrics() -> None:
    balancer, envoy = rendered("load balancer"), pods("load balancer")["envoy"]
    assert is_allowed(balancer, Peer(address="10.0.3.4"), envoy, "health")
    assert not is_allowed(balancer, Peer(address="10.1.3.4"), envoy, "health")
    office = Peer(address="10.9.1.1")
    assert is_allowed(rendered("exposed API"), office, pods("exposed API")["control-plane"], "api")
    monitored, control_plane = rendered("monitoring"), pods("monitoring")["control-plane"]
    assert is_allowed(monitored, PROMETHEUS, control_plane, "api")
    assert not is_allowed(monitored, PROMETHEUS, control_plane, "xds")
    same_labels_elsewhere = Peer(labels={"app": "prometheus"}, namespace="other")
    assert not is_allowed(monitored, same_labels_elsewhere, control_plane, "api")
