"""Several control planes on one etcd with PD's timings: as engines in this process, or as real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.support.controlplane.engine import run_engine, settings
from tests.support.waiting import wait_until

LEADER_CHANGE_SECONDS = 8.0  # Limit from a leader's death to a new leader, with PD's etcd timings.


def replica_settings(directory: Path, name: str, etcd: Etcd, **sections: Any) -> Settings:
    """Return the settings of an engine that shares its state with other engines, in `etcd`."""
    return settings(
        directory / name, pd={"urls": [etcd.url]}, replicas={"enabled": True, "name": name}, **sections
    )


@contextlib.asynccontextmanager
async def run_engines(
    directory: Path, etcd: Etcd, names: Sequence[str] = ("a", "b"), **sections: Any
) -> AsyncIterator[list[Engine]]:
    """Run engines that have found each other and elected a leader. Yield the leader first."""
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(run_engine(replica_settings(directory, name, etcd, **sections)))
            for name in names
        ]
        await wait_until(lambda: all(len(engine.replicas()) == len(names) for engine in started))
        await wait_until(lambda: sum(map(is_leader, started)) == 1)
        yield sorted(started, key=is_leader, reverse=True)


def is_leader(engine: Engine) -> bool:
    """Return whether the engine may act as the leader."""
    return engine.valid_term is not None


class ControlPlaneGroup:
    """Real `tidevoy serve` processes by name, and the etcd that they share.

    `async with ControlPlaneGroup(directory) as group:` starts etcd and all control planes. Tests register
    nodes in `group.etcd`. All control planes configure Envoys to listen on `sql_port`.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = ("a", "b", "c"),
        extra_settings: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    ) -> None:
        """`extra_settings`: settings of all control planes, or a function from a name to settings."""
        self._directory = directory
        self._extra_settings = (
            extra_settings if callable(extra_settings) else lambda name: extra_settings or {}
        )
        self._names = names
        self._ports = Ports()
        self._sql_port = self._ports.allocate()
        self._stack = contextlib.AsyncExitStack()
        self.etcd: Etcd
        self.control_planes: dict[str, ControlPlaneProcess] = {}

    async def __aenter__(self) -> Self:
        try:
            self.etcd = await self._stack.enter_async_context(
                Etcd.start(self._directory / "etcd", pd_timings=True)
            )
            self._stack.callback(self._ports.close)
            for name in self._names:
                self.control_planes[name] = ControlPlaneProcess(
                    self._directory / name, self._settings(name), name=f"control-plane-{name}"
                )
            async with asyncio.TaskGroup() as tasks:
                for plane in self.control_planes.values():
                    tasks.create_task(plane.launch())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def xds(self, name: str) -> str:
        """Return the address of a control plane's xDS server."""
        return self.control_planes[name].parsed_settings().xds.listen

    def url(self, name: str) -> str:
        """Return the base URL of a control plane's REST API."""
        return self.control_planes[name].api_url

    @property
    def sql_port(self) -> int:
        """The port where Envoys listen."""
        return self._sql_port

    @property
    def running_names(self) -> list[str]:
        """The control planes whose process runs."""
        return [name for name, plane in self.control_planes.items() if plane.is_running]

    async def get(self, name: str, path: str) -> Any:
        """Return the JSON of a control plane's response to a GET."""
        async with http_client(self.url(name)) as client:
            response = await client.get(path)
            response.raise_for_status()
            return response.json()

    async def post(self, name: str, path: str, body: Any = None) -> httpx2.Response:
        """Return a control plane's response to a POST."""
        async with http_client(self.url(name)) as client:
            return await client.post(path, json=body if body is not None else {})

    async def wait_for_leader(self, seconds: float = LEADER_CHANGE_SECONDS) -> str:
        """Wait until one control plane reports itself as the leader, and return its name."""
        leader = ""

        async def has_leader() -> bool:
            nonlocal leader
            leader = ""
            for name in self.running_names:
                with contextlib.suppress(httpx2.HTTPError):
                    replicas = (await self.get(name, "/v1/replicas"))["replicas"]
                    if any(
                        replica["is_self"] and replica["is_leader"] for replica in replicas
                    ) and await self._reports_leadership(name):
                        leader = name
            return bool(leader)

        await wait_until(has_leader, seconds)
        return leader

    async def kill(self, name: str) -> None:
        """Kill a control plane, as a power failure does."""
        await self.control_planes[name].kill()

    async def restart(self, name: str) -> None:
        """Start a control plane that was killed."""
        await self.control_planes[name].launch()

    async def _reports_leadership(self, name: str) -> bool:
        async with http_client(self.url(name)) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return "tidevoy_leader 1.0" in lines

    def _settings(self, name: str) -> dict[str, Any]:
        fast_check = {"interval": 0.2, "timeout": 2.0}
        result: dict[str, Any] = {
            "pd": {"urls": [self.etcd.url]},
            "xds": {"listen": f"127.0.0.1:{self._ports.allocate()}"},
            "api": {"listen": f"127.0.0.1:{self._ports.allocate()}"},
            "sql": {"listen": f"127.0.0.1:{self._sql_port}"},
            "state_dir": str(self._directory / name / "state"),
            "replicas": {"enabled": True, "name": name},
            "health": {"sql": fast_check, "status": fast_check},
            "balance": {"report_interval": 0.2, "slow_start": 0, "panic_threshold": 0},
            "drain": {"reconnect_grace": 1},
            "log": {"format": "json"},
        }
        for key, value in self._extra_settings(name).items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), dict)
            result[key] = {**result[key], **value} if both else value
        return result

    async def _stop(self) -> None:
        async with self._stack, asyncio.TaskGroup() as tasks:
            for plane in self.control_planes.values():
                if plane.is_running:
                    tasks.create_task(plane.terminate())
