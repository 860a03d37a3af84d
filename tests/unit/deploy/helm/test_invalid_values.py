"""Values that cannot work are rejected before anything is installed, with a message that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubernetes.rendered_chart import HelmFailed, render
from tests.support.kubernetes.value_cases import BASE, CASES, Values, merged

PD = {"config": BASE["config"]}
EXPOSED = {"api": {"exposed": True}}


def test_without_values_both_decisions_are_named() -> None:
    with pytest.raises(HelmFailed) as failed:
        render({})
    assert "* certificates.source is not set: choose" in str(failed.value)
    assert "* config.pd.urls is empty, and 2 control planes share their state in PD" in str(failed.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (merged(PD, {"certificates": {"source": "none"}}), "set config.allow_unauthenticated: true if"),
        (merged(BASE, EXPOSED), "api.exposed is true, but there are no tokens: set api.tokens.secretName"),
        (
            merged(BASE, EXPOSED, {"api": {"tokens": {"secretName": "t"}, "tls": {"enabled": False}}}),
            "tokens would be sent in clear text",
        ),
        (
            merged(BASE, EXPOSED, {"api": {"tls": {"clientCa": {"secretName": "people"}}}}),
            "api.tls.clientCa is set without api.tokens.secretName",
        ),
        (
            merged(CASES["no TLS"], EXPOSED, {"api": {"tls": {"enabled": True}}}),
            "set certificates.api.secretName, or api.tls.enabled: false",
        ),
        (merged(BASE, {"api": {"tokens": {"secretName": "t"}}}), "but api.exposed is false"),
        (merged(BASE, {"monitoring": {"serviceMonitor": {"enabled": True}}}), "set api.exposed: true"),
        (
            merged(CASES["only Envoys"], {"monitoring": {"serviceMonitor": {"enabled": True}}}),
            "Envoys send their metrics to the control planes",
        ),
        (
            merged(CASES["one control plane"], {"controlPlane": {"persistence": {"enabled": False}}}),
            "would be lost with the Pod",
        ),
        (
            merged(CASES["only Envoys"], {"envoy": {"controlPlanes": []}}),
            "set envoy.controlPlanes to the xDS addresses",
        ),
        (
            merged(CASES["only Envoys"], {"certificates": {"source": "certManager"}}),
            "name the issuer of the control planes' certificates",
        ),
        (
            merged(BASE, {"controlPlane": {"enabled": False}, "envoy": {"enabled": False}}),
            "enable one of them",
        ),
        (merged(BASE, {"certificates": {"verifyEnvoyIds": True}}), "set certificates.envoy.volume"),
        (
            merged(CASES["no TLS"], {"certificates": {"envoy": {"volume": {"emptyDir": {}}}}}),
            "certificates.envoy.volume is set, but certificates.source is none",
        ),
        (
            merged(BASE, {"envoy": {"terminationGracePeriodSeconds": 54}}),
            "needs config.end.wait + config.end.timeout + 15 s = 55 s",
        ),
        (
            merged(
                BASE, {"config": {"end": {"timeout": 0.5}}, "envoy": {"terminationGracePeriodSeconds": 25}}
            ),
            "set at least 26, or nothing",
        ),
        (
            merged(BASE, {"config": {"overload": {"max_heap_bytes": 2_500_000_000}}}),
            "1.25 * config.overload.max_heap_bytes + 128 MiB = 3259217728 bytes",
        ),
        (
            merged(BASE, {"envoy": {"resources": {"limits": {"memory": "2816000000"}}}}),
            "= 2818572288 bytes: raise the limit",
        ),
        (
            merged(BASE, {"envoy": {"resources": {"limits": {"memory": "3 GB"}}}}),
            "write a quantity such as 3Gi",
        ),
        (
            merged(BASE, {"envoy": {"kind": "DaemonSet", "autoscaling": {"enabled": True}}}),
            "choose Deployment, or no autoscaling",
        ),
        (merged(BASE, {"envoy": {"group": "olap"}}), "config.groups has no group of this name"),
        (merged(BASE, {"envoy": {"healthPort": 6000}}), "envoy.healthPort and envoy.sqlPort are both 6000"),
        (
            merged(CASES["groups"], {"envoy": {"sqlPort": 6002}}),
            "config.groups[1].listen and envoy.sqlPort are both 6002",
        ),
        (
            merged(BASE, {"config": {"pd": {"tls": {"ca": "/run/tidevoy/secrets/pd/ca.crt"}}}}),
            "config names a file in /run/tidevoy/secrets/pd, but neither",
        ),
    ],
)
def test_combination_is_rejected(values: Values, message: str) -> None:
    with pytest.raises(HelmFailed) as failed:
        render(values)
    assert message in str(failed.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": {"sql": {"login_timout": 3}}}, "'/config/sql': additional properties 'login_timout'"),
        ({"config": {"xds": {"listen": "0.0.0.0:18000"}}}, "'/config/xds': additional properties 'listen'"),
        ({"config": {"api": {"tokens": []}}}, "'/config/api': additional properties 'tokens'"),
        # Helm reads YAML 1.1, in which an unquoted `off` is false.
        ({"config": {"sql": {"proxy_protocol": False}}}, "'/config/sql/proxy_protocol'"),
        ({"config": {"health": {"sql": {"rise": 0}}}}, "'/config/health/sql/rise'"),
        ({"config": {"groups": [{"name": "olap"}]}}, "'/config/groups/0': missing properties"),
        ({"envoy": {"service": {"prt": 1}}}, "'/envoy/service': additional properties 'prt'"),
        ({"envoy": {"kind": "StatefulSet"}}, "'/envoy/kind'"),
        ({"envoy": {"maxSurge": 0}}, "'/envoy/maxSurge'"),
        ({"controlPlane": {"replicas": 0}}, "'/controlPlane/replicas'"),
        ({"networkPolicy": {"health": {"from": [{}]}}}, "'/networkPolicy/health/from/0'"),
        ({"image": {"tag": "1"}}, "'/image': additional properties 'tag'"),
    ],
)
def test_typing_error_is_rejected_by_schema(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmFailed) as failed:
        render(merged(BASE, values))
    assert message in str(failed.value)
