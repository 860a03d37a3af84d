"""Pods that really run, and SQL clients of theirs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pymysql

from tests.support.compose.commands import run_command as run_program
from tests.support.kubernetes import server_programs
from tests.support.kubernetes.cluster import KubernetesCluster
from tests.support.kubernetes.fake_machines import is_ready
from tests.support.kubernetes.rendered_chart import Object
from tests.support.waiting import wait_until

CONTROL_PLANE = "tidevoy-control-plane"
_START_TIMEOUT_SECONDS = 240.0


class Pods:
    """The Pods of a namespace."""

    def __init__(self, cluster: KubernetesCluster, namespace: str) -> None:
        self._cluster, self.namespace = cluster, namespace

    async def list(self, selector: str) -> list[Object]:
        """Return the Pods with these labels."""
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
        return await self._cluster.list(path)

    async def wait_ready(self, selector: str, count: int) -> None:
        """Wait until so many Pods with these labels are ready, and no other ones exist."""
        await wait_until(partial(self._are_ready, selector, count), _START_TIMEOUT_SECONDS)

    async def _are_ready(self, selector: str, count: int) -> bool:
        pods = await self.list(selector)
        return len(pods) == count and all(map(is_ready, pods))

    async def delete(self, name: str) -> None:
        """Delete a Pod, as its controller or a drained machine does."""
        await self._cluster.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    async def update_secret(self, name: str, files: Mapping[str, str]) -> None:
        """Replace the content of a Secret."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{name}"
        await self._cluster.patch(path, {"stringData": dict(files)})

    async def kubectl(self, *arguments: str) -> str:
        """Run kubectl, and return its output."""
        program = str(await asyncio.to_thread(server_programs.program, "kubectl"))
        options = (f"--kubeconfig={self._cluster.api.kubeconfig}", f"--namespace={self.namespace}")
        return await run_program(program, *options, *arguments, timeout=60.0)

    async def tidevoy(self, *arguments: str, replica: int = 0) -> Any:
        """Run the command line in the Pod of a control plane, and return the JSON that it prints."""
        command = ("exec", f"{CONTROL_PLANE}-{replica}", "--", "tidevoy", *arguments, "--json")
        return json.loads(await self.kubectl(*command))


@dataclass
class LoadResult:
    """What SQL clients have seen."""

    transactions: int = 0
    connections: int = 0
    errors: list[str] = field(default_factory=list)


@contextmanager
def running_load(address: str, port: int, workers: int = 8) -> Iterator[LoadResult]:
    """Run transactions in a pool of sessions that are validated with COM_PING before use, as pools do."""
    result, stopping, lock = LoadResult(), threading.Event(), threading.Lock()

    def work() -> None:
        connection: pymysql.Connection[Any] | None = None
        while not stopping.is_set():
            try:
                connection = _validated(connection)
                if connection is None:
                    connection = pymysql.connect(host=address, port=port, user="root", connect_timeout=10)
                    with lock:
                        result.connections += 1
                connection.begin()
                with connection.cursor() as cursor:
                    cursor.execute("select 1")
                connection.commit()
                with lock:
                    result.transactions += 1
            except pymysql.MySQLError as error:
                connection = None
                with lock:
                    result.errors.append(f"{time.strftime('%X')} {error}")
            stopping.wait(0.02)
        if connection is not None:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield result
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _validated(connection: pymysql.Connection[Any] | None) -> pymysql.Connection[Any] | None:
    if connection is None:
        return None
    try:
        connection.ping(reconnect=False)
    except pymysql.MySQLError:
        return None
    return connection
