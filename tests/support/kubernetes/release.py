"""A release of the chart in a running cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.kubernetes.cluster import KubernetesCluster
from tests.support.kubernetes.rendered_chart import Object, run_helm
from tests.support.kubernetes.value_cases import Values
from tests.support.kubernetes.values_schema import CHART

NAME = "tidevoy"
_TIMEOUT = "180s"


class Release:
    """Installs the chart in a namespace with Helm, and looks at what Kubernetes makes of it."""

    def __init__(self, cluster: KubernetesCluster, namespace: str) -> None:
        self._cluster = cluster
        self.namespace = namespace

    async def install(self, values: Values, *options: str) -> None:
        """Install the chart. Raises HelmFailed."""
        await self._helm("install", NAME, str(CHART), "--values", "-", *options, input=json.dumps(values))

    async def upgrade(self, values: Values, *options: str) -> None:
        """Upgrade to other values. Raises HelmFailed."""
        await self._helm("upgrade", NAME, str(CHART), "--values", "-", *options, input=json.dumps(values))

    async def rollback(self, *options: str) -> None:
        """Go back to the revision before."""
        await self._helm("rollback", NAME, *options)

    async def test(self, *options: str) -> str:
        """Run `helm test` and return its output."""
        return await self._helm("test", NAME, *options)

    async def uninstall(self) -> None:
        """Remove the release."""
        await self._helm("uninstall", NAME, "--wait")

    async def notes(self) -> str:
        """Return what Helm prints after an installation."""
        return await self._helm("get", "notes", NAME)

    async def _helm(self, *arguments: str, input: str | None = None) -> str:
        options = (
            f"--kubeconfig={self._cluster.api.kubeconfig}",
            f"--namespace={self.namespace}",
        )
        waits = arguments[0] in ("install", "upgrade", "rollback", "uninstall", "test")
        timeout = (f"--timeout={_TIMEOUT}",) if waits else ()
        return await asyncio.to_thread(run_helm, *arguments, *options, *timeout, input=input)

    async def pods(self, component: str) -> list[Object]:
        """Return the Pods of a component."""
        selector = f"app.kubernetes.io/component={component},app.kubernetes.io/instance={NAME}"
        return await self._cluster.list(f"{self.path('pods')}?labelSelector={selector}")

    async def get(self, resource: str, group_version: str = "v1") -> Any:
        """Return an object (`services/NAME`) or a collection (`services`) of the namespace."""
        return await self._cluster.request("GET", self.path(resource, group_version))

    def path(self, resource: str, group_version: str = "v1") -> str:
        """Return the path of an object or a collection of the namespace."""
        root = "/api" if group_version == "v1" else "/apis"
        return f"{root}/{group_version}/namespaces/{self.namespace}/{resource}"
