"""A whole cluster on this machine: etcd in PD's place, MariaDB, stand-in TiDBs, control plane, Envoy."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import httpx2

from controlplane.publish import module_file
from controlplane.publish.bootstrap import render
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd, EtcdPorts
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.process import ProcessFailed
from sandbox.server import Server, greets
from sandbox.tidb import Tidb

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Advertised:
    """The ports that people and scripts know, all on 127.0.0.1."""

    sql: int
    api: int
    xds: int
    admin: int

    @classmethod
    def take(cls, ports: Ports) -> Self:
        """Free ones."""
        return cls(ports.take(), ports.take(), ports.take(), ports.take())


class NotInTime(AssertionError):
    """What was waited for did not come true in time."""


class Stack:
    """The running parts. Each can be ended and started again by itself, on its ports and data."""

    def __init__(
        self,
        directory: Path,
        ports: Ports,
        advertised: Advertised,
        *,
        mariadb: MariaDb | None,
        graceful_wait: float,
        node_arguments: Sequence[str],
        settings: Mapping[str, Any],
        pd_timings: bool,
        concurrency: int,
        delta: bool,
        module: Path | None,
    ) -> None:
        self.directory = directory.absolute()
        self.ports = ports
        self.advertised = advertised
        self.graceful_wait = graceful_wait
        self._node_arguments = node_arguments
        self.etcd = Etcd(self.directory, EtcdPorts.take(ports), pd_timings=pd_timings)
        self._own_mariadb = mariadb is None
        self.mariadb = mariadb or MariaDb(self.directory, ports.take())
        self.tidb: list[Tidb] = []
        self.control_plane = ControlPlane(self.directory, _merged(self._defaults(), settings))
        bootstrap = render(
            self.control_plane.parsed(),
            control_planes=[f"127.0.0.1:{advertised.xds}"],
            node_id="envoy-1",
            admin=f"127.0.0.1:{advertised.admin}",
            module=None if module is None else str(module),
            delta=delta,
        )
        self.envoy = EnvoyProcess(bootstrap, self.directory, concurrency=concurrency)
        self.api = httpx2.AsyncClient(base_url=self.control_plane.api, trust_env=False, timeout=10.0)

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        directory: Path,
        *,
        nodes: int = 3,
        ports: Ports | None = None,
        advertised: Advertised | None = None,
        mariadb: MariaDb | None = None,
        graceful_wait: float = 0.0,
        node_arguments: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        pd_timings: bool = False,
        concurrency: int = 2,
        delta: bool = False,
        module: Path | Literal["auto"] | None = "auto",
        step: Callable[[str], None] = lambda text: None,
    ) -> AsyncIterator[Stack]:
        """Start everything; yield once `nodes` nodes are active and a client is greeted through Envoy.

        `ports`: where ports come from, `advertised` claimed there already; default: free ones. `mariadb`: one
        that runs, to be shared and left running. `settings`: laid over the control plane's defaults.
        `graceful_wait`: seconds a TiDB waits at SIGTERM. `node_arguments`: of all stand-ins. `delta`: Envoy
        asks for incremental xDS. `module`: Tidevoy's module for Envoy; "auto": the one that is built here, if
        any; None: none. `step` hears what is being done. A directory that was used before brings its data and
        nodes' addresses back.
        """
        with Ports() as own:
            source = ports or own
            stack = cls(
                directory,
                source,
                advertised or Advertised.take(source),
                mariadb=mariadb,
                graceful_wait=graceful_wait,
                node_arguments=node_arguments,
                settings=settings or {},
                pd_timings=pd_timings,
                concurrency=concurrency,
                delta=delta,
                module=module_file.find() if module == "auto" else module,
            )
            try:
                await stack._launch(nodes, step)
                yield stack
            finally:
                step("Ending")
                await stack._end()

    @property
    def sql_port(self) -> int:
        """Where SQL clients connect: Envoy's listener."""
        return self.advertised.sql

    def servers(self) -> Iterator[Server]:
        """All parts that are this stack's own, in the order of their start."""
        yield self.etcd
        if self._own_mariadb:
            yield self.mariadb
        yield from self.tidb
        yield self.control_plane
        yield self.envoy

    async def add_tidb(self, *arguments: str) -> Tidb:
        """Start one more stand-in with these arguments beside its usual ones, until it serves."""
        node = self._new_tidb(arguments)
        await node.launch()
        return node

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """What `GET /v1/nodes` says, by address."""
        answer = (await self.api.get("/v1/nodes")).raise_for_status()
        return {node["address"]: node for node in answer.json()["nodes"]}

    async def states(self) -> dict[str, str]:
        """The state of each node by address."""
        return {address: node["state"] for address, node in (await self.nodes()).items()}

    def violations(self) -> list[str]:
        """What the stand-ins saw that no MySQL client may do. Tests end with none."""
        return [line for node in self.tidb for line in node.violations()]

    async def wait_until(
        self, predicate: Callable[[], bool | Awaitable[bool]], what: str, timeout: float = 15.0
    ) -> None:
        """Wait for `predicate` to hold. NotInTime, with the last error if there was one, when it never does.

        A control plane that does not answer counts as "not yet": it may be starting.
        """
        deadline = time.monotonic() + timeout
        reason = ""
        while True:
            try:
                held = predicate()
                if inspect.isawaitable(held):
                    held = await held
                if held:
                    return
                reason = ""
            except (httpx2.HTTPError, OSError) as error:
                reason = f" ({type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                raise NotInTime(f"not within {timeout:.0f} s: {what}{reason}")
            await asyncio.sleep(_POLL_SECONDS)

    async def first_failure(self) -> ProcessFailed:
        """Wait until any part that runs now ends, and tell of it as an error."""
        watching = [asyncio.create_task(server.failed()) for server in self.servers()]
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def _defaults(self) -> dict[str, Any]:
        return {
            "pd": {"urls": [self.etcd.url]},
            "sql": {"listen": f"127.0.0.1:{self.advertised.sql}"},
            "xds": {"listen": f"127.0.0.1:{self.advertised.xds}"},
            "api": {"listen": f"127.0.0.1:{self.advertised.api}"},
            "state_dir": str(self.directory / "state"),
            # The one Envoy is back at once.
            "drain": {"fleet_return": 2.0},
        }

    def _new_tidb(self, arguments: Sequence[str] = ()) -> Tidb:
        name = f"tidb-{len(self.tidb) + 1}"
        node = Tidb(
            self.directory,
            *self._node_ports(name),
            name=name,
            pd=[self.etcd.url],
            mariadb=self.mariadb.address,
            graceful_wait=self.graceful_wait,
            arguments=(*self._node_arguments, *arguments),
        )
        self.tidb.append(node)
        return node

    def _node_ports(self, name: str) -> tuple[int, int]:
        """SQL and status port of a node: those that it had in this directory when they are free, else new."""
        file = self.directory / f"{name}.ports"
        try:
            sql, status = map(int, file.read_text().split())
            return self.ports.take_this(sql), self.ports.take_this(status)
        except (OSError, ValueError):
            sql, status = self.ports.take(), self.ports.take()
        self.directory.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{sql} {status}\n")
        return sql, status

    async def _launch(self, nodes: int, step: Callable[[str], None]) -> None:
        step("Starting etcd and MariaDB")
        first: list[Server] = [self.etcd, self.mariadb] if self._own_mariadb else [self.etcd]
        await _launch_all(first)
        step(f"Starting {nodes} TiDB stand-ins")
        await _launch_all([self._new_tidb() for _ in range(nodes)])
        step("Starting the control plane")
        await self.control_plane.launch()
        step("Starting Envoy")
        await self.envoy.launch()
        step("Waiting until the nodes are in service")
        await self.wait_until(lambda: self._in_service(nodes), f"{nodes} active nodes behind Envoy", 30.0)

    async def _in_service(self, nodes: int) -> bool:
        states = list((await self.states()).values())
        if states.count("active") < nodes or not await self.envoy.live():
            return False
        return nodes == 0 or await greets(self.sql_port)

    async def _end(self) -> None:
        """End all parts, whatever state they are in, from the clients' side to the data."""
        try:
            await _end_all(self._running(self.envoy), politely=True)
            await _end_all(self._running(self.control_plane), politely=True)
            # Nobody is connected any more: nothing to be graceful about.
            await _end_all(self._running(*self.tidb), politely=False)
            await _end_all(self._running(*self.servers()), politely=True)
        except BaseException:
            await _end_all(self._running(*self.servers()), politely=False)
            raise
        finally:
            await self.api.aclose()

    def _running(self, *servers: Server) -> list[Server]:
        return [server for server in servers if server.running]


async def _launch_all(servers: list[Server] | list[Tidb]) -> None:
    """Start servers side by side. The first failure ends the others' start and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as starting:
            for server in servers:
                starting.create_task(server.launch())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _end_all(servers: list[Server], *, politely: bool) -> None:
    await asyncio.gather(*(server.terminate() if politely else server.kill() for server in servers))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged
