"""Values of the Helm chart that tests render: one case for each choice that an operator has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tests.support.kubernetes.rendered_chart import RenderedChart, render

Values = Mapping[str, Any]

_PD = {"pd": {"urls": ["http://basic-pd.tidb:2379"]}}
_EXPOSED_API = {"exposed": True, "tokens": {"secretName": "tokens"}}
_PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}


def merged(*values: Values) -> dict[str, Any]:
    """Merge values as Helm does: mappings are merged, everything else is replaced."""
    result: dict[str, Any] = {}
    for each in values:
        for key, value in each.items():
            old = result.get(key)
            is_section = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = merged(old, value) if is_section else value  # type: ignore[arg-type]
    return result


BASE: Values = {"config": _PD, "certificates": {"source": "certManager"}}

CASES: Mapping[str, Values] = {
    "minimal": BASE,
    "existing secrets": merged(BASE, {"certificates": {"source": "secrets"}}),
    "named secrets": merged(
        BASE,
        {
            "certificates": {
                "source": "secrets",
                "controlPlane": {"secretName": "cp"},
                "envoy": {"secretName": "envoys"},
                "api": {"secretName": "rest"},
            },
            "api": _EXPOSED_API,
        },
    ),
    "no TLS": merged(
        BASE,
        {
            "certificates": {"source": "none"},
            "config": {"allow_unauthenticated": True},
            "api": {"exposed": True, "tls": {"enabled": False}},
        },
    ),
    "exposed API": merged(
        BASE,
        {
            "api": {**_EXPOSED_API, "tls": {"extraDnsNames": ["tidevoy.example.org"]}},
            "networkPolicy": {"api": {"from": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}},
        },
    ),
    "API behind a proxy": merged(
        BASE,
        {
            "api": {**_EXPOSED_API, "tls": {"enabled": False}},
            "config": {"api": {"allow_cleartext_tokens": True, "trusted_proxies": ["10.0.0.0/8"]}},
        },
    ),
    "client certificates": merged(
        BASE,
        {
            "api": {**_EXPOSED_API, "tls": {"clientCa": {"secretName": "people", "key": "people.crt"}}},
            "config": {"api": {"clients": [{"name": "anna@example.org", "role": "operator"}]}},
        },
    ),
    "load balancer": merged(
        BASE,
        {
            "envoy": {
                "service": {
                    "type": "LoadBalancer",
                    "port": 4000,
                    "externalTrafficPolicy": "Local",
                    "loadBalancerClass": "service.k8s.aws/nlb",
                    "loadBalancerSourceRanges": ["10.0.0.0/8"],
                    "allocateLoadBalancerNodePorts": False,
                    "annotations": {"service.beta.kubernetes.io/aws-load-balancer-nlb-target-type": "ip"},
                }
            },
            "config": {"end": {"wait": 180, "timeout": 600.5}},
            "networkPolicy": {"health": {"from": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]}},
        },
    ),
    "node port": merged(BASE, {"envoy": {"service": {"type": "NodePort", "nodePort": 30600}}}),
    "daemon set": merged(
        BASE, {"envoy": {"kind": "DaemonSet", "service": {"internalTrafficPolicy": "Local"}}}
    ),
    "autoscaling": merged(BASE, {"envoy": {"autoscaling": {"enabled": True}}}),
    "groups": merged(
        BASE,
        {
            "config": {
                "groups": [
                    {"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}},
                    {"name": "batch", "listen": "0.0.0.0:6002", "labels": {"use": "batch"}},
                ]
            },
            "networkPolicy": {"sql": {"from": [{"podSelector": {"matchLabels": {"app": "shop"}}}]}},
        },
    ),
    "one group": merged(
        BASE,
        {
            "config": {"groups": [{"name": "olap", "listen": "0.0.0.0:6001", "labels": {"use": "olap"}}]},
            "envoy": {"group": "olap"},
        },
    ),
    "monitoring": merged(
        BASE,
        {
            "api": _EXPOSED_API,
            "monitoring": {
                "serviceMonitor": {"enabled": True, "token": {"secretName": "viewer"}},
                "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
                "dashboards": {"enabled": True, "datasourceUid": "mimir"},
            },
            "networkPolicy": {"metrics": {"from": [_PROMETHEUS]}},
        },
    ),
    "zone of the node": merged(BASE, {"envoy": {"zone": {"from": "node"}}}),
    "fixed zone": merged(BASE, {"envoy": {"zone": {"from": "value", "value": "a"}}}),
    "one control plane": {
        "certificates": {"source": "certManager"},
        "controlPlane": {"replicas": 1},
        "config": {"nodes": [{"address": "10.0.0.1:4000", "status_address": "10.0.0.1:10080"}]},
    },
    "no persistence": merged(BASE, {"controlPlane": {"persistence": {"enabled": False}}}),
    "no reloader": merged(BASE, {"controlPlane": {"reloader": {"enabled": False}, "replicas": 3}}),
    "own issuer": merged(
        BASE,
        {"certificates": {"certManager": {"issuerRef": {"name": "tidevoy-ca", "kind": "ClusterIssuer"}}}},
    ),
    "certificate for each Envoy": merged(
        BASE,
        {
            "certificates": {
                "verifyEnvoyIds": True,
                "envoy": {"volume": {"csi": {"driver": "csi.cert-manager.io", "readOnly": True}}},
            }
        },
    ),
    "only Envoys": merged(
        BASE,
        {
            "certificates": {"source": "secrets"},
            "controlPlane": {"enabled": False},
            "envoy": {"controlPlanes": ["tidevoy-control-plane.tidb.svc.cluster.local:18000"]},
        },
    ),
    "only control planes": merged(BASE, {"envoy": {"enabled": False}}),
    "IPv6": merged(BASE, {"bindAddress": "::", "api": _EXPOSED_API}),
    "TLS of PD and SQL": merged(
        BASE,
        {
            "config": {
                "pd": {
                    "urls": ["https://basic-pd.tidb:2379"],
                    "tls": {
                        "ca": "/run/tidevoy/secrets/pd/ca.crt",
                        "cert": "/run/tidevoy/secrets/pd/tls.crt",
                        "key": "/run/tidevoy/secrets/pd/tls.key",
                    },
                },
                "tls": {
                    "client": {
                        "mode": "required",
                        "cert": "/run/tidevoy/secrets/sql/tls.crt",
                        "key": "/run/tidevoy/secrets/sql/tls.key",
                    }
                },
            },
            "controlPlane": {"secrets": {"pd": "basic-cluster-client-secret"}},
            "envoy": {"secrets": {"sql": "sql-tls"}},
        },
    ),
    "all options": merged(
        BASE,
        {
            "fullnameOverride": "balancer",
            "commonLabels": {"team": "databases"},
            "image": {"registry": "registry.example.org", "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "registry"}],
            "config": {
                "balance": {"report_interval": 5, "module_counts": "sessions"},
                "log": {"level": "debug"},
            },
            "controlPlane": {
                "image": {"tag": "0.2.0", "digest": "sha256:" + "0" * 64},
                "podLabels": {"sidecar.istio.io/inject": "false"},
                "nodeSelector": {"pool": "system"},
                "tolerations": [{"key": "system", "operator": "Exists"}],
                "priorityClassName": "system-cluster-critical",
                "extraEnv": [{"name": "TZ", "value": "UTC"}],
                "extraVolumes": [{"name": "scripts", "configMap": {"name": "scripts"}}],
                "extraVolumeMounts": [{"name": "scripts", "mountPath": "/scripts"}],
            },
            "envoy": {
                "image": {"tag": "0.1.9"},
                "concurrency": 4,
                "extraArgs": ["--log-level", "warning"],
                "terminationGracePeriodSeconds": 120,
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
                ],
                "extraVolumes": [{"name": "logs", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "logs", "mountPath": "/var/log/tidevoy"}],
            },
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "scripts"},
                    "data": {"release": "{{ .Release.Name }}"},
                }
            ],
        },
    ),
}


@functools.cache
def rendered(case: str) -> RenderedChart:
    """Render one of the cases."""
    return render(CASES[case])
