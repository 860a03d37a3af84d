"""An Envoy with the module, whose live settings change while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_servers import Handler, run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, write_live_config
from tests.support.module.envoy import ModuleEnvoy, run_envoy
from tests.support.waiting import wait_until


class SwitchableEnvoy:
    """An Envoy whose live settings can be changed while it runs."""

    def __init__(self, envoy: ModuleEnvoy, endpoints: Path, host: Host) -> None:
        self.envoy, self._endpoints, self._host = envoy, endpoints, host

    async def apply(self, live_settings: Mapping[str, Any]) -> None:
        """Change the live settings, and wait until Envoy has applied them."""
        pattern = "tidevoy.live-config.config_reload$"
        before = await self.envoy.stats(pattern)
        write_live_config(self._endpoints, [self._host], live_settings)

        async def is_applied() -> bool:
            return await self.envoy.stats(pattern) != before

        await wait_until(is_applied)


@asynccontextmanager
async def run_switchable(
    serve: Handler,
    directory: Path,
    live_settings: Mapping[str, Any] | None = None,
    *,
    client: Mapping[str, Any] | None = None,
) -> AsyncIterator[SwitchableEnvoy]:
    """Run an Envoy in front of the node `n`, which serves each connection with `serve`.

    `client`: settings of the socket to clients.
    """
    endpoints = directory / "endpoints.json"
    config = ModuleConfig(endpoints=endpoints, live_settings=live_settings or {}, client=client or {})
    async with run_fake_server(serve) as node:
        host = Host(node.endpoint, "n")
        async with run_envoy(directory, [host], config, workers=2) as envoy:
            yield SwitchableEnvoy(envoy, endpoints, host)
