"""A control plane with its REST API in this process, on real ports, for tests that call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from api.server import serve
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from sandbox.server import http_client

PROBLEM_MEDIA_TYPE = "application/problem+json"


@dataclass(slots=True)
class ApiServer:
    """A running control plane. When it reloads its configuration, it gets `next_settings`."""

    next_settings: Settings
    http: httpx2.AsyncClient
    url: str
    serving: asyncio.Task[None]
    failures: list[Exception] = field(default_factory=list)

    @property
    def xds_port(self) -> int:
        return int(self.next_settings.xds.listen.rpartition(":")[2])

    def load(self) -> Settings:
        """Return `next_settings`. If `failures` is not empty, raise and remove its first exception."""
        if self.failures:
            raise self.failures.pop(0)
        return self.next_settings

    async def node(self, address: str) -> dict[str, Any]:
        """Return a node as the API shows it."""
        node: dict[str, Any] = (await self.http.get(f"/v1/nodes/{address}")).raise_for_status().json()
        return node

    async def wait_for_state(self, address: str, state: str) -> dict[str, Any]:
        """Wait until the node is in `state`, and return the node."""
        async with asyncio.timeout(15):
            while (node := await self.node(address))["state"] != state:  # noqa: ASYNC110 - polls on purpose
                await asyncio.sleep(0.02)
        return node


async def stored_events(http: httpx2.AsyncClient, after: int = 0, /, **headers: str) -> list[dict[str, Any]]:
    """Return the stored events that follow the event with the id `after`, oldest first."""
    response = await http.get(
        "/v1/events", params={"follow": "false"}, headers={**headers, "last-event-id": str(after)}
    )
    lines = response.raise_for_status().text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def problem_kind(response: httpx2.Response) -> str:
    """Check that the response is a complete RFC 9457 problem, and return the last part of its type."""
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["title"]
    assert problem["detail"]
    prefix, _, kind = str(problem["type"]).rpartition(":")
    assert prefix == "urn:tidevoy:problem"
    return kind


def settings(directory: Path, ports: Ports, nodes: Sequence[str] = (), **sections: Any) -> Settings:
    """Return settings on free ports, with these nodes."""
    return Settings.model_validate(
        {
            "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
            "state_dir": directory / "state",
            "nodes": [{"address": address} for address in nodes],
            "health": {"sql": {"interval": 0.1}},
            "drain": {"reconnect_grace": 0},
            **sections,
        }
    )


@asynccontextmanager
async def run_api_server(initial_settings: Settings) -> AsyncIterator[ApiServer]:
    """Run a control plane until the block ends; check that it stops without an error."""
    ready = asyncio.Event()
    url = f"http://{initial_settings.api.listen}"
    async with http_client(url) as http:
        server: ApiServer
        serve_task = asyncio.create_task(serve(initial_settings, lambda: server.load(), ready.set))
        server = ApiServer(initial_settings, http, url, serve_task)
        ready_task = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({serve_task, ready_task}, return_when=asyncio.FIRST_COMPLETED)
            ready_task.cancel()
            if serve_task.done():
                await serve_task
            yield server
        finally:
            serve_task.cancel()
            await asyncio.wait({serve_task})
        if not serve_task.cancelled() and (error := serve_task.exception()) is not None:
            raise error
