"""Machines that exist only as objects: they accept Pods and report them as running, but run nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import httpx2

from tests.support.kubernetes.cluster import KubernetesCluster, KubernetesError
from tests.support.kubernetes.rendered_chart import Object

ZONES = ("a", "b", "c")
_POLL_SECONDS = 0.1


def is_ready(pod: Object) -> bool:
    """Return whether a Pod is ready and not about to end."""
    conditions = pod.get("status", {}).get("conditions", [])
    has_condition = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return has_condition and "deletionTimestamp" not in pod["metadata"]


class FakeMachines:
    """One machine in each of `ZONES`, and a volume for each claim."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self._observers: list[Callable[[list[Object]], None]] = []
        self._addresses = 0

    async def create(self) -> None:
        """Create the machines."""
        for zone in ZONES:
            labels = {"topology.kubernetes.io/zone": zone, "kubernetes.io/hostname": f"machine-{zone}"}
            machine = {"metadata": {"name": f"machine-{zone}", "labels": labels}}
            await self._cluster.create("/api/v1/nodes", machine)
            capacity = {"cpu": "64", "memory": "256Gi", "pods": "110"}
            status = {
                "capacity": capacity,
                "allocatable": capacity,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Fake"}],
            }
            await self._cluster.patch(f"/api/v1/nodes/machine-{zone}/status", {"status": status})
            await self._cluster.patch(f"/api/v1/nodes/machine-{zone}", {"spec": {"taints": None}})

    @asynccontextmanager
    async def observed(self, observe: Callable[[list[Object]], None]) -> AsyncIterator[None]:
        """Call `observe` with all Pods whenever the machines look at them."""
        self._observers.append(observe)
        try:
            yield
        finally:
            self._observers.remove(observe)

    async def run(self) -> None:
        """Report the state of Pods until cancelled."""
        while True:
            with suppress(httpx2.TransportError):
                pods = await self._cluster.list("/api/v1/pods")
                for observe in self._observers:
                    observe(pods)
                await self._update(pods)
                for claim in await self._cluster.list("/api/v1/persistentvolumeclaims"):
                    if claim.get("status", {}).get("phase") == "Pending":
                        await self._provide_volume(claim)
            await asyncio.sleep(_POLL_SECONDS)

    async def _update(self, pods: Iterable[Object]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            # A Pod may be gone since it was listed.
            with suppress(KubernetesError):
                if "deletionTimestamp" in metadata:
                    await self._cluster.request("DELETE", path, {"gracePeriodSeconds": 0})
                elif "nodeName" in pod["spec"] and pod["status"]["phase"] == "Pending":
                    await self._cluster.patch(f"{path}/status", {"status": self._running(pod)})

    async def _provide_volume(self, claim: Object) -> None:
        metadata = claim["metadata"]
        volume = {
            "metadata": {"name": f"volume-{metadata['uid']}"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": "/nonexistent"},
                "claimRef": {"namespace": metadata["namespace"], "name": metadata["name"]},
            },
        }
        with suppress(KubernetesError):  # it exists, and is not bound yet
            await self._cluster.create("/api/v1/persistentvolumes", volume)

    def _running(self, pod: Object) -> Object:
        if pod["spec"]["restartPolicy"] == "Never":
            return {"phase": "Succeeded"}
        self._addresses += 1
        address = f"10.1.{self._addresses // 250}.{self._addresses % 250 + 1}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {"type": name, "status": "True", "lastTransitionTime": now}
            for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        addresses = [{"ip": address}]
        return {"phase": "Running", "podIP": address, "podIPs": addresses, "conditions": conditions}


@asynccontextmanager
async def fake_machines(cluster: KubernetesCluster) -> AsyncIterator[FakeMachines]:
    """Create machines, and report the state of Pods in the background."""
    machines = FakeMachines(cluster)
    await machines.create()
    task = asyncio.create_task(machines.run())
    try:
        yield machines
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
