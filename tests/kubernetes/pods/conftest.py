"""A cluster with one machine, on which containers run, and fakes of PD and TiDB servers as Pods."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.session_certificate import SessionCertificate
from tests.support.kubernetes.cluster import KubernetesCluster, run_cluster
from tests.support.kubernetes.container_images import UPGRADED_VERSION
from tests.support.kubernetes.fake_tidb_cluster import TIDB_COUNT, create_tidb_cluster
from tests.support.kubernetes.machine import ADDRESS, missing_requirement, run_machine, set_up_namespaces
from tests.support.kubernetes.pods import Pods
from tests.support.kubernetes.prerequisites import create_certificates, local_volume, secrets
from tests.support.kubernetes.release import Release

NAMESPACE = "tidb"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubernetesCluster]:
    """Run the cluster. Skips if no container can run here."""
    if reason := missing_requirement():
        pytest.skip(reason)
    set_up_namespaces(os.environ)
    directory = tmp_path_factory.mktemp("cluster")
    async with run_cluster(directory, ADDRESS) as running, run_machine(running, directory):
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pods(cluster: KubernetesCluster, tmp_path_factory: pytest.TempPathFactory) -> Pods:
    """Start PD, a store and the TiDB servers."""
    await cluster.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    certificate = SessionCertificate.load_or_create(tmp_path_factory.mktemp("session"))
    files = {"session.crt": certificate.cert.read_text(), "session.key": certificate.key.read_text()}
    await create_tidb_cluster(cluster, NAMESPACE, files)
    running = Pods(cluster, NAMESPACE)
    await running.wait_ready("app=basic-tidb", TIDB_COUNT)
    return running


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue the certificates of control planes and Envoys."""
    directory = tmp_path_factory.mktemp("certificates")
    create_certificates(NAMESPACE, directory)
    return directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def release(
    cluster: KubernetesCluster, pods: Pods, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Release:
    """Create what the chart needs: Secrets with certificates, and volumes."""
    for name, files in secrets(NAMESPACE, certificates).items():
        path = f"/api/v1/namespaces/{NAMESPACE}/secrets"
        await cluster.create(path, {"metadata": {"name": name}, "stringData": files})
    for number in range(2):
        directory = tmp_path_factory.mktemp(f"volume-{number}", numbered=False)
        await cluster.create("/api/v1/persistentvolumes", local_volume(directory))
    return Release(cluster, NAMESPACE)


@pytest.fixture
def values() -> dict[str, object]:
    """Values for two replicas on one slow machine."""
    image = {"pullPolicy": "Never"}
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    return {
        "image": image,
        "config": {
            "pd": {"urls": ["http://basic-pd:2379"]},
            "end": {"wait": 5, "timeout": 30},
            "overload": {"max_heap_bytes": 268435456},
        },
        "certificates": {"source": "secrets"},
        "controlPlane": {"resources": {**small, "limits": {"memory": "512Mi"}}},
        "envoy": {
            "replicas": 2,
            "zone": {"from": "node"},
            "concurrency": 1,
            "resources": {**small, "limits": {"memory": "512Mi"}},
        },
    }


@pytest.fixture
def upgraded() -> dict[str, object]:
    """Values that run the same images under another tag."""
    image = {"image": {"tag": UPGRADED_VERSION}}
    return {"controlPlane": image, "envoy": image}
