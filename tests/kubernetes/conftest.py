"""A Kubernetes cluster without containers, and releases of the chart in namespaces of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.support.kubernetes.cluster import KubernetesCluster, run_cluster
from tests.support.kubernetes.fake_machines import FakeMachines, fake_machines
from tests.support.kubernetes.release import Release

CreateRelease = Callable[[str], Awaitable[Release]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubernetesCluster]:
    async with run_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def machines(cluster: KubernetesCluster) -> AsyncIterator[FakeMachines]:
    async with fake_machines(cluster) as running:
        yield running


@pytest.fixture
def create_release(cluster: KubernetesCluster) -> CreateRelease:
    """Yield a function that creates a namespace, whose name is its argument, for a release."""

    async def create(namespace: str) -> Release:
        # Pods that are not confined are rejected.
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": namespace, "labels": labels}
        await cluster.create("/api/v1/namespaces", {"metadata": metadata})
        return Release(cluster, namespace)

    return create
