"""Measures proxies in turn, in slices so short that noise of the machine meets all of them alike.

A block has several slices of each proxy: A, B, B, A, A, B, ... Everything in a block happens within about a
second, and all connections stay open from the first block to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from bench.load_client import LoadClient, SliceRunner
from bench.machine import CpuUsage
from bench.proxies.contenders import RunningProxy
from bench.proxies.pinning import CpuPinning
from bench.proxies.workloads import ProxyWorkload

BLOCKS = 80
SLICES_PER_BLOCK = (
    6  # slices of each proxy in a block; even, so that each is as often before the others as behind them
)
_WARM_UP_SECONDS = 0.5


@dataclass(slots=True)
class Block:
    """What the slices of one proxy in one block gave. CPU in seconds, latencies in milliseconds."""

    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    new_connections: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All blocks of a workload, by proxy, and what else used the CPU meanwhile."""

    blocks: Mapping[str, Sequence[Block]]
    cpu_usage: CpuUsage

    def values(self, figure: str, proxy: str) -> list[float]:
        """One value for each block: see `FIGURES`."""
        return [FIGURES[figure].compute(block) for block in self.blocks[proxy]]

    def figure_names(self) -> list[str]:
        """The names of the figures that it has."""
        some = all(block.new_connections for each in self.blocks.values() for block in each)
        return [name for name, figure in FIGURES.items() if some or not figure.needs_new_connections]


@dataclass(frozen=True, slots=True)
class FigureDefinition:
    """A figure of a block. Less is better for all of them."""

    title: str
    unit: str
    compute: Callable[[Block], float]
    needs_new_connections: bool = False


FIGURES: Mapping[str, FigureDefinition] = {
    "cpu": FigureDefinition("CPU per query", "µs", lambda block: block.cpu / len(block.latencies) * 1e6),
    "mean": FigureDefinition("Mean latency", "ms", lambda block: fmean(block.latencies)),
    "p95": FigureDefinition("95th percentile", "ms", lambda block: quantiles(block.latencies, n=20)[-1]),
    "new_connection": FigureDefinition(
        "Mean time of a new connection",
        "ms",
        lambda block: fmean(block.new_connections),
        needs_new_connections=True,
    ),
}


def measuring_order(names: Sequence[str], block: int) -> Iterator[str]:
    """Who is measured when in a block: forwards and backwards in turn; who begins changes by block."""
    first = block % len(names)
    rotated = [*names[first:], *names[:first]]
    for number in range(SLICES_PER_BLOCK):
        yield from rotated if number % 2 == 0 else reversed(rotated)


async def measure(
    workload: ProxyWorkload,
    proxies: Mapping[str, RunningProxy],
    client: LoadClient,
    pinning: CpuPinning | None,
    *,
    blocks: int = BLOCKS,
) -> Measurement:
    """Measure all proxies under one workload. ProcessFailed when a single statement fails; TimeoutError."""
    targets = [proxy.target for proxy in proxies.values()]
    async with client.slices(
        targets,
        connections=workload.clients,
        statement=workload.statement,
        numbers=workload.highest_id,
    ) as slices:
        if pinning is not None:
            pinning.pin_clients(slices.pid)
        for name in proxies:
            await _measure_slice(slices, proxies, name, workload, Block(), _WARM_UP_SECONDS)
        found: dict[str, list[Block]] = {name: [Block() for _ in range(blocks)] for name in proxies}
        before = CpuUsage.now()
        for number in range(blocks):
            for name in measuring_order(list(proxies), number):
                await _measure_slice(slices, proxies, name, workload, found[name][number], workload.seconds)
        return Measurement(found, CpuUsage.now().since(before))


async def _measure_slice(
    slices: SliceRunner,
    proxies: Mapping[str, RunningProxy],
    name: str,
    workload: ProxyWorkload,
    block: Block,
    seconds: float,
) -> None:
    before = proxies[name].cpu_seconds()
    result = await slices.run(
        list(proxies).index(name), seconds, rate=workload.rate, new_connections=workload.new_connections
    )
    block.cpu += proxies[name].cpu_seconds() - before
    block.latencies += result.latencies
    block.new_connections += result.new_connections
