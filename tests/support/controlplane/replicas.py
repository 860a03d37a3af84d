"""Several control planes on one etcd with PD's timings: as engines in this process, or as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from controlplane.config.settings import Settings
from controlplane.engine.engine import Engine
from sandbox.child_process import ChildProcess
from sandbox.control_plane import ControlPlaneProcess
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from tests.support.controlplane.engine import run_engine, settings
from tests.support.waiting import wait_until

LEADER_CHANGE_SECONDS = (
    8.0  # seconds in which there is a new leader after the old one died, on an etcd with PD's timings
)


def replica_settings(directory: Path, name: str, etcd: Etcd, **sections: Any) -> Settings:
    """Settings of an engine that shares its state."""
    return settings(
        directory / name, pd={"urls": [etcd.url]}, replicas={"enabled": True, "name": name}, **sections
    )


@contextlib.asynccontextmanager
async def run_engines(
    directory: Path, etcd: Etcd, names: Sequence[str] = ("a", "b"), **sections: Any
) -> AsyncIterator[list[Engine]]:
    """Started engines of which one leads, that one first; all know of each other."""
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(run_engine(replica_settings(directory, name, etcd, **sections)))
            for name in names
        ]
        await wait_until(lambda: all(len(engine.replicas()) == len(names) for engine in started))
        await wait_until(lambda: sum(map(is_leader, started)) == 1)
        yield sorted(started, key=is_leader, reverse=True)


def is_leader(engine: Engine) -> bool:
    """Whether it may act as the leader."""
    return engine.leadership.term is not None


@contextlib.asynccontextmanager
async def suspended(process: ChildProcess) -> AsyncIterator[None]:
    """It lives and is silent. A signal takes a moment to reach all threads."""
    threads = Path(f"/proc/{process.pid}/task")

    def is_stopped() -> bool:
        stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    process.send_signal(signal.SIGSTOP)
    try:
        await wait_until(is_stopped)
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class ControlPlaneGroup:
    """Real `tidevoy serve` processes by name, and the etcd that they share.

    `async with Planes(directory) as planes:` starts etcd and all control planes; `planes.etcd` is the one to
    register nodes with. Control planes that a test kills are started again with `revive`. All say that Envoys
    listen at `sql_port`.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = ("a", "b", "c"),
        extra_settings: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    ) -> None:
        """`more`: settings of all of them, or of each by its name."""
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
            async with asyncio.TaskGroup() as starting:
                for plane in self.control_planes.values():
                    starting.create_task(self._launch(plane))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def xds(self, name: str) -> str:
        """Address of a control plane's xDS server."""
        return self.control_planes[name].parsed_settings().xds.listen

    def url(self, name: str) -> str:
        """Base URL of a control plane's REST API."""
        return self.control_planes[name].api_url

    @property
    def sql_port(self) -> int:
        """Where Envoys are told to listen."""
        return self._sql_port

    @property
    def running_names(self) -> list[str]:
        """The control planes whose process runs."""
        return [name for name, plane in self.control_planes.items() if plane.is_running]

    async def get(self, name: str, path: str) -> Any:
        """The JSON that a control plane answers to a GET."""
        async with httpx2.AsyncClient(base_url=self.url(name), timeout=10.0) as client:
            answer = await client.get(path)
            answer.raise_for_status()
            return answer.json()

    async def post(self, name: str, path: str, body: Any = None) -> httpx2.Response:
        """The answer of a control plane to a POST."""
        async with httpx2.AsyncClient(base_url=self.url(name), timeout=10.0) as client:
            return await client.post(path, json=body if body is not None else {})

    async def wait_for_leader(self, seconds: float = LEADER_CHANGE_SECONDS) -> str:
        """The control plane that leads by its own word; waits until there is one."""
        found = ""

        async def is_there() -> bool:
            nonlocal found
            found = ""
            for name in self.running_names:
                with contextlib.suppress(httpx2.HTTPError):
                    told = (await self.get(name, "/v1/replicas"))["replicas"]
                    if any(
                        each["is_us"] and each["leads"] for each in told
                    ) and await self._reports_leadership(name):
                        found = name
            return bool(found)

        await wait_until(is_there, seconds)
        return found

    async def kill(self, name: str) -> None:
        """What a power cut does."""
        await self.control_planes[name].kill()

    async def restart(self, name: str) -> None:
        """Start a control plane that was killed."""
        await self._launch(self.control_planes[name])

    async def _reports_leadership(self, name: str) -> bool:
        async with httpx2.AsyncClient(base_url=self.url(name), timeout=10.0) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return "tidevoy_leader 1.0" in lines

    async def _launch(self, plane: ControlPlaneProcess) -> None:
        await plane.launch()

    def _settings(self, name: str) -> dict[str, Any]:
        quick = {"interval": 0.2, "timeout": 2.0}
        chosen: dict[str, Any] = {
            "pd": {"urls": [self.etcd.url]},
            "xds": {"listen": f"127.0.0.1:{self._ports.allocate()}"},
            "api": {"listen": f"127.0.0.1:{self._ports.allocate()}"},
            "sql": {"listen": f"127.0.0.1:{self._sql_port}"},
            "state_dir": str(self._directory / name / "state"),
            "replicas": {"enabled": True, "name": name},
            "health": {"sql": quick, "status": quick},
            "balance": {"report_interval": 0.2, "slow_start": 0, "floor": 0},
            "drain": {"fleet_return": 1},
            "log": {"format": "json"},
        }
        for key, value in self._extra_settings(name).items():
            both = isinstance(value, Mapping) and isinstance(chosen.get(key), dict)
            chosen[key] = {**chosen[key], **value} if both else value
        return chosen

    async def _stop(self) -> None:
        async with self._stack, asyncio.TaskGroup() as ending:
            for plane in self.control_planes.values():
                if plane.is_running:
                    ending.create_task(plane.terminate())
