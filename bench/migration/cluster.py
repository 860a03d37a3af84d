"""Stand-in nodes with thousands of sessions behind one Envoy with one worker, and its control plane."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from bench.load_client import NAME, Found
from bench.migration import event_loop_latency
from bench.migration.event_loop_latency import Turns
from bench.resource_usage import Held
from controlplane.xds.bootstrap.bootstrap import render
from sandbox.child_process import ProcessFailed
from sandbox.control_plane import ControlPlane
from sandbox.envoy import EnvoyProcess
from sandbox.local_cluster import NotInTime
from sandbox.ports import Ports
from sandbox.server import Server, answers, greets

_PATIENCE = 60.0
_POLL = 0.1
_UNCHANGED = 10
"""Readings in a row that must agree: Envoy closes a connection a moment after its session has left it."""
_WEIGHT = 100  # of a node in relation to the one apart
_SESSIONS = "envoy_tidevoy_sessions"
FLUSHED = 2.5
"""Seconds after which Envoy's own statistics, flushed every second here, tell all that was."""
_FLUSHES = ("stats_flush_interval: 5s", "stats_flush_interval: 1s")


class Nodes(Server):
    """Stand-ins in one process (bench/migration/fake_node.py), each an address of 127.0.0.0/8."""

    def __init__(self, directory: Path, ports: Ports, *, name: str, key: str) -> None:
        super().__init__(name, directory)
        self.port, self.status = ports.take(), ports.take()
        self._key = key

    def command(self) -> list[str]:
        """The stand-ins."""
        words = [f"--port={self.port}", f"--status={self.status}", f"--key={self._key}"]
        return [sys.executable, "-P", "-m", "bench.migration.fake_node", *words]

    def listens(self) -> list[int]:
        """Both ports."""
        return [self.port, self.status]

    async def serves(self) -> bool:
        """Whether it tells of its sessions."""
        return await answers(f"http://127.0.0.1:{self.status}/")

    def address(self, number: int) -> str:
        """Of a node, from 0 to 253."""
        return f"127.9.0.{number + 1}:{self.port}"

    async def told(self) -> Mapping[str, Any]:
        """See `House.report`."""
        async with httpx2.AsyncClient(trust_env=False, timeout=10.0, verify=False) as client:
            answer = (await client.get(f"http://127.0.0.1:{self.status}/")).raise_for_status()
        told: dict[str, Any] = answer.json()
        return told


@dataclass(frozen=True)
class Seen:
    """What all nodes tell: their sessions, logins with a password, and sessions that have moved there."""

    sessions: Counter[str] = field(default_factory=Counter)
    logins: Counter[str] = field(default_factory=Counter)
    arrivals: Counter[str] = field(default_factory=Counter)
    emptied: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def add(self, told: Mapping[str, Any]) -> None:
        """What one process tells."""
        self.sessions.update(told["sessions"])
        self.logins.update(told["logins"])
        self.arrivals.update(told["arrivals"])
        self.emptied.update(told["emptied"])
        self.violations.extend(told["violations"])


class Site:
    """It runs. Made by `site`."""

    def __init__(
        self, houses: Sequence[Nodes], control_plane: ControlPlane, envoy: EnvoyProcess, port: int
    ) -> None:
        self.envoy, self.port = envoy, port
        self._houses = houses
        self._api = control_plane.api

    @property
    def pid(self) -> int:
        """Of Envoy."""
        return self.envoy.process.pid

    async def held(self) -> Held:
        """What Envoy holds once it has closed what it closes late. NotInTime."""
        deadline = time.monotonic() + _PATIENCE
        readings: list[Held] = []
        while True:
            readings.append(Held.by(self.pid))
            latest = readings[-_UNCHANGED:]
            if len(latest) == _UNCHANGED and len({(each.files, each.watched) for each in latest}) == 1:
                return latest[-1]
            if time.monotonic() > deadline:
                raise NotInTime(f"Envoy's open files still change after {_PATIENCE:.0f} s: {latest[-1]}")
            await asyncio.sleep(_POLL)

    async def seen(self) -> Seen:
        """What the nodes have seen. ProcessFailed: the proxy did what it must not do."""
        seen = Seen()
        for house in self._houses:
            seen.add(await house.told())
        if seen.violations:
            raise ProcessFailed("Envoy", "has broken the protocol towards a node", "\n".join(seen.violations))
        return seen

    async def turns(self) -> Turns:
        """Those of its worker, of which Envoy tells a few seconds late (`FLUSHED`)."""
        return event_loop_latency.told((await self.envoy.get(event_loop_latency.PAGE)).json())

    async def drain(self, *addresses: str) -> float:
        """The sessions of these nodes are to leave; when it was asked for (time.monotonic)."""
        asked = time.monotonic()
        await self._post("drain", addresses)
        return asked

    async def undrain(self, *addresses: str) -> None:
        """They get sessions again. Returns when Envoy knows."""
        await self._post("undrain", addresses)
        await self.follows()

    async def empty(self, address: str) -> float:
        """Returns when the node has no session any more: since when (time.monotonic). NotInTime."""
        seen = await self.until(lambda seen: address in seen.emptied, f"{address} to be empty")
        return seen.emptied[address]

    async def until(self, predicate: Callable[[Seen], bool], what: str) -> Seen:
        """Wait until it holds for what the nodes have seen. NotInTime."""
        deadline = time.monotonic() + _PATIENCE
        while not predicate(seen := await self.seen()):
            if time.monotonic() > deadline:
                raise NotInTime(f"not within {_PATIENCE:.0f} s: {what}; {dict(seen.sessions)}")
            await asyncio.sleep(_POLL)
        return seen

    async def follows(self) -> None:
        """Returns when Envoy has what was published last. TimeoutError."""
        async with asyncio.timeout(_PATIENCE), self._client() as api:
            while True:
                answer = (await api.get("/v1/envoys")).raise_for_status()
                if any(map(_is_up_to_date, answer.json()["envoys"])):
                    return
                await asyncio.sleep(_POLL)

    async def counted(self) -> int:
        """The sessions that the module knows of, in all states at all nodes."""
        page = (await self.envoy.get("/stats/prometheus?filter=^tidevoy")).text
        families = text_string_to_metric_families(page)
        return sum(int(one.value) for all_ in families for one in all_.samples if one.name == _SESSIONS)

    async def _post(self, verb: str, addresses: Sequence[str]) -> None:
        async with self._client() as api:
            for address in addresses:
                (await api.post(f"/v1/nodes/{address}/{verb}")).raise_for_status()

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self._api, trust_env=False, timeout=30.0, verify=False)


@asynccontextmanager
async def site(
    directory: Path,
    module: Path,
    nodes: int,
    *,
    apart: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[Site, list[str]]]:
    """An Envoy before so many nodes, and their addresses.

    `apart`: there is one more, the last, in a process of its own, which gets hardly any sessions. `settings`:
    sections of the control plane's configuration beside those that are needed. Only what is drained moves.
    """
    key = secrets.token_hex(16)
    async with AsyncExitStack() as running:
        ports = running.enter_context(Ports())
        houses = [Nodes(directory, ports, name=name, key=key) for name in ("nodes", "apart")[: 1 + apart]]
        for house in houses:
            await running.enter_async_context(house)
        addresses = [houses[0].address(number) for number in range(nodes)]
        known = [{"address": address, "weight": _WEIGHT} for address in addresses]
        if apart:
            addresses.append(houses[1].address(nodes))
            known.append({"address": addresses[-1], "weight": 1})
        listen, xds, api = ports.take(), ports.take(), ports.take()
        control_plane = ControlPlane(
            directory,
            {
                "nodes": known,
                "health": {"status": {"enabled": False}, "sql": {"enabled": False}},
                "sql": {"listen": f"127.0.0.1:{listen}"},
                "xds": {"listen": f"127.0.0.1:{xds}"},
                "api": {"listen": f"127.0.0.1:{api}"},
                "state_dir": str(directory / "state"),
                "rebalance": {"enabled": False},
                **(settings or {}),
            },
        )
        bootstrap = render(
            control_plane.parsed(),
            control_planes=[f"127.0.0.1:{xds}"],
            node_id="measured",
            admin="127.0.0.1:0",
            module=str(module),
        )
        envoy = EnvoyProcess(
            bootstrap.replace(*_FLUSHES) + "\n" + event_loop_latency.COUNTED, directory, concurrency=1
        )
        await running.enter_async_context(control_plane)
        await running.enter_async_context(envoy)
        made = Site(houses, control_plane, envoy, listen)
        await made.follows()
        async with asyncio.timeout(_PATIENCE):
            while not await greets(listen):  # noqa: ASYNC110 - Envoy tells us nothing by itself
                await asyncio.sleep(_POLL)
        yield made, addresses
        await made.seen()
        if "a bug:" in envoy.process.output():
            raise ProcessFailed("Envoy", "has told of a bug of the module", envoy.process.tail())


def _is_up_to_date(envoy: Mapping[str, Any]) -> bool:
    return bool(envoy["filter"] == "module" and envoy["acked_version"] == envoy["published_version"] != "")


def all_alive(found: Sequence[Found], sessions: int) -> None:
    """ProcessFailed unless each session that was held has answered at its end."""
    (one,) = found
    if one.errors or one.figures["alive"] != sessions:
        raise ProcessFailed(
            NAME, f"lost sessions: {one.figures['alive']} of {sessions} answer", one.error_text
        )
