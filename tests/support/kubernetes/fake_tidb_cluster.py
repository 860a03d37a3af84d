"""PD, TiKV and TiDB of the docker compose tests as Pods, with the names that TiDB Operator v1 gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.kubernetes.cluster import KubernetesCluster
from tests.support.kubernetes.container_images import PD_IMAGE, TIDB_IMAGE, TIKV_IMAGE
from tests.support.kubernetes.rendered_chart import Object

TIDB_COUNT = 2
_GRACEFUL_WAIT_SECONDS = 5


async def create_tidb_cluster(
    cluster: KubernetesCluster, namespace: str, certificate: Mapping[str, str]
) -> None:
    """Create the objects. `certificate` signs session tokens: the files `session.crt` and `session.key`."""
    core, apps = f"/api/v1/namespaces/{namespace}", f"/apis/apps/v1/namespaces/{namespace}"
    config = {
        "pd.toml": "[replication]\nmax-replicas = 1\n",
        "tikv.toml": "[storage]\n",
        "tidb.toml": f"graceful-wait-before-shutdown = {_GRACEFUL_WAIT_SECONDS}\n[security]\n"
        'session-token-signing-cert = "/session/session.crt"\n'
        'session-token-signing-key = "/session/session.key"\n',
    }
    await cluster.create(f"{core}/configmaps", {"metadata": {"name": "basic"}, "data": config})
    await cluster.create(
        f"{core}/secrets", {"metadata": {"name": "session"}, "stringData": dict(certificate)}
    )
    for name, ports, headless in (
        ("basic-pd", {"client": 2379}, False),
        ("tikv", {"sql": 3306, "store": 20160}, False),
        ("basic-tidb-peer", {"status": 10080}, True),
    ):
        await cluster.create(f"{core}/services", _service(name, ports, headless=headless))
    pd = (
        "--name=pd --data-dir=/data --client-urls=http://0.0.0.0:2379 --peer-urls=http://0.0.0.0:2380"
        " --advertise-client-urls=http://basic-pd:2379 --advertise-peer-urls=http://127.0.0.1:2380"
        " --initial-cluster=pd=http://127.0.0.1:2380 --config=/etc/basic/pd.toml"
    )
    tikv = (
        "--addr=0.0.0.0:20160 --advertise-addr=tikv:20160 --status-addr=0.0.0.0:20180"
        " --advertise-status-addr=tikv:20180 --data-dir=/data --pd=basic-pd:2379"
        " --config=/etc/basic/tikv.toml"
    )
    tidb = (
        "--store=tikv --path=basic-pd:2379 --host=0.0.0.0 --config=/etc/basic/tidb.toml"
        f" --advertise-address=$(POD_NAME).basic-tidb-peer.{namespace}.svc"
    )
    await cluster.create(f"{apps}/statefulsets", _workload("basic-pd", PD_IMAGE, pd.split()))
    await cluster.create(f"{apps}/statefulsets", _workload("tikv", TIKV_IMAGE, tikv.split()))
    servers = _workload(
        "basic-tidb", TIDB_IMAGE, tidb.split(), replicas=TIDB_COUNT, service="basic-tidb-peer"
    )
    await cluster.create(f"{apps}/statefulsets", servers)


def node_address(number: int, namespace: str) -> str:
    """Return the address under which a TiDB server registers."""
    return f"basic-tidb-{number}.basic-tidb-peer.{namespace}.svc:4000"


def _service(name: str, ports: Mapping[str, int], *, headless: bool) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {
            "selector": {"app": name.removesuffix("-peer")},
            "ports": [{"name": port, "port": number} for port, number in ports.items()],
            **({"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {}),
        },
    }


def _workload(
    name: str, image: str, arguments: Sequence[str], replicas: int = 1, service: str | None = None
) -> Object:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": "basic"}},
        {"name": "session", "secret": {"secretName": "session"}},
        {"name": "data", "emptyDir": {}},
    ]
    mounts = [
        {"name": "config", "mountPath": "/etc/basic"},
        {"name": "session", "mountPath": "/session"},
        {"name": "data", "mountPath": "/data"},
    ]
    container: dict[str, Any] = {
        "name": "server",
        "image": image,
        "imagePullPolicy": "Never",
        "args": list(arguments),
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "volumeMounts": mounts,
    }
    if service is not None:
        container["readinessProbe"] = {"tcpSocket": {"port": 4000}, "periodSeconds": 1}
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": service or name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": [container],
                    "volumes": volumes,
                    "terminationGracePeriodSeconds": _GRACEFUL_WAIT_SECONDS + 25,
                },
            },
        },
    }
