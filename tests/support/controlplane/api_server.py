"""A control plane with its REST API in this process, on real ports, for tests that call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from api.server import serve
from controlplane.config.settings import Settings
from sandbox.ports import Ports


@dataclass(slots=True)
class ApiServer:
    """A running control plane; `wanted` is what its configuration says when it is read next."""

    next_settings: Settings
    http: httpx2.AsyncClient
    url: str
    serving: asyncio.Task[None]
    failures: list[Exception] = field(default_factory=list)

    def load(self) -> Settings:
        """What the control plane calls to read its configuration: fails once for each of `failures`."""
        if self.failures:
            raise self.failures.pop()
        return self.next_settings

    async def node(self, address: str) -> dict[str, Any]:
        """A node as the API shows it."""
        answer: dict[str, Any] = (await self.http.get(f"/v1/nodes/{address}")).raise_for_status().json()
        return answer

    async def wait_for_state(self, address: str, state: str) -> dict[str, Any]:
        """The node, once it is in that state."""
        async with asyncio.timeout(15):
            while (node := await self.node(address))["state"] != state:  # noqa: ASYNC110 - polls on purpose
                await asyncio.sleep(0.02)
        return node


def settings(directory: Path, ports: Ports, nodes: Sequence[str] = (), **sections: Any) -> Settings:
    """Settings on free ports, with the nodes `nodes`."""
    return Settings.model_validate(
        {
            "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "state_dir": directory / "state",
            "nodes": [{"address": address} for address in nodes],
            "health": {"sql": {"interval": 0.1}},
            "drain": {"fleet_return": 0},
            **sections,
        }
    )


@asynccontextmanager
async def run_api_server(initial_settings: Settings) -> AsyncIterator[ApiServer]:
    """A control plane that serves until the block ends, and then ends without an error."""
    ready = asyncio.Event()
    url = f"http://{initial_settings.api.listen}"
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
        plane: ApiServer
        serving = asyncio.create_task(serve(initial_settings, lambda: plane.load(), ready.set))
        plane = ApiServer(initial_settings, http, url, serving)
        opened = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({serving, opened}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            if serving.done():
                await serving
            yield plane
        finally:
            serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error
