"""An Envoy with the module whose listener and cluster change while it runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.module.bootstrap import Host, ModuleConfig, bootstrap
from tests.support.module.envoy import ModuleEnvoy, serve_envoy
from tests.support.waiting import wait_until

_API = "type.googleapis.com/envoy.config"
_TYPE_URLS = {"listeners": f"{_API}.listener.v3.Listener", "clusters": f"{_API}.cluster.v3.Cluster"}


class ReconfigurableEnvoy(ModuleEnvoy):
    """An Envoy that reads its listener and its cluster from files."""

    resources: dict[str, dict[str, Any]]
    """The listener and the cluster, by the keys of `_TYPE_URLS`."""

    def set_resources(self, static_resources: dict[str, Any]) -> None:
        """Take the listener and the cluster of a bootstrap, and write them."""
        self.resources = {
            kind: {"@type": url, **static_resources[kind][0]} for kind, url in _TYPE_URLS.items()
        }
        self.write(*_TYPE_URLS)

    def write(self, *enabled_kinds: str) -> None:
        """Write these kinds of resources, and remove the others."""
        for kind, resource in self.resources.items():
            file = self.directory / f"{kind}.json"
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps({"resources": [resource] if kind in enabled_kinds else []}))
            temporary.rename(file)

    @asynccontextmanager
    async def wait_counted(self, *counters: str) -> AsyncIterator[None]:
        """After the block, wait until each of these counters of Envoy has increased."""
        before = [(await self.stats(f"^{counter}$"))[counter] for counter in counters]
        yield

        async def are_counted() -> bool:
            now = [(await self.stats(f"^{counter}$"))[counter] for counter in counters]
            return all(new > old for new, old in zip(now, before, strict=True))

        await wait_until(are_counted)

    async def apply(self, hosts: Sequence[Host], config: ModuleConfig) -> None:
        """Replace the listener and the cluster, which must both differ; wait until Envoy has applied them."""
        async with self.wait_counted(
            "listener_manager.listener_modified", "cluster_manager.cluster_modified"
        ):
            self.set_resources(bootstrap(hosts, config)["static_resources"])

    async def replace_cluster(self) -> None:
        """Replace the cluster: change its connect timeout."""
        cluster = self.resources["clusters"]
        cluster["connect_timeout"] = f"{float(cluster['connect_timeout'].removesuffix('s')) + 1}s"
        async with self.wait_counted("cluster_manager.cluster_modified"):
            self.write("listeners", "clusters")

    async def remove_listener(self) -> None:
        async with self.wait_counted("listener_manager.listener_removed"):
            self.write("clusters")

    async def add_listener(self) -> None:
        async with self.wait_counted("listener_manager.listener_added"):
            self.write("listeners", "clusters")


@asynccontextmanager
async def run_reconfigurable_envoy(
    directory: Path, hosts: Sequence[Host], config: ModuleConfig, *arguments: str, workers: int = 1
) -> AsyncIterator[ReconfigurableEnvoy]:
    """Run an Envoy with additional `arguments`. A replaced listener keeps the port of `config`."""
    envoy_bootstrap = bootstrap(hosts, config)
    static_resources = envoy_bootstrap.pop("static_resources")
    envoy_bootstrap["dynamic_resources"] = {
        name: {
            "path_config_source": {"path": str(directory / f"{kind}.json")},
            "resource_api_version": "V3",
        }
        for name, kind in (("lds_config", "listeners"), ("cds_config", "clusters"))
    }
    process = ReconfigurableEnvoy(
        json.dumps(envoy_bootstrap), directory, concurrency=workers, arguments=arguments
    )
    process.set_resources(static_resources)
    async with serve_envoy(process, config):
        yield process
