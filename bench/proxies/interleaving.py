"""Measure proxies alternately, in slices so short that disturbances of the machine affect all of them
equally.

A block has several slices of each proxy, for example A, B, B, A, A, B. A block takes about a second. All
connections stay open from the first block to the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from bench.load_client import SliceRunner
from bench.machine import CpuUsage
from bench.proxies.contenders import RunningProxy
from bench.proxies.setup import ProxyBenchSetup
from bench.proxies.workloads import ProxyWorkload

BLOCKS = 80
SLICES_PER_BLOCK = 6  # per proxy; even, so that forward and backward order are equally frequent
_WARM_UP_SECONDS = 0.5


@dataclass(slots=True)
class Block:
    """The results of all slices of one proxy in one block. CPU in seconds, latencies in milliseconds."""

    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    new_connections: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All blocks of a workload, by proxy, and the machine's CPU usage during the measurement."""

    blocks: Mapping[str, Sequence[Block]]
    cpu_usage: CpuUsage

    def values(self, figure: str, proxy: str) -> list[float]:
        """Return one value of a figure (a key of `FIGURES`) per block."""
        return [FIGURES[figure].compute(block) for block in self.blocks[proxy]]

    def figure_names(self) -> list[str]:
        has_new_connections = all(
            block.new_connections for proxy_blocks in self.blocks.values() for block in proxy_blocks
        )
        return [
            name
            for name, figure in FIGURES.items()
            if has_new_connections or not figure.needs_new_connections
        ]


@dataclass(frozen=True, slots=True)
class FigureDefinition:
    """Definition of a figure of a block. Lower is better for all figures."""

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
    """Yield the proxies in alternating direction. Successive blocks start with successive proxies."""
    first = block % len(names)
    rotated = [*names[first:], *names[:first]]
    for number in range(SLICES_PER_BLOCK):
        yield from rotated if number % 2 == 0 else reversed(rotated)


async def measure(
    workload: ProxyWorkload,
    proxies: Mapping[str, RunningProxy],
    bench: ProxyBenchSetup,
    *,
    blocks: int = BLOCKS,
) -> Measurement:
    """Measure all proxies under one workload.

    Raises ProcessFailed if a single statement fails, and TimeoutError.
    """
    async with bench.connect(workload, proxies.values()) as slices:
        targets = {name: (index, proxy) for index, (name, proxy) in enumerate(proxies.items())}
        for name in proxies:
            await _measure_slice(slices, *targets[name], workload, Block(), _WARM_UP_SECONDS)
        results: dict[str, list[Block]] = {name: [Block() for _ in range(blocks)] for name in proxies}
        usage_before = CpuUsage.now()
        for number in range(blocks):
            for name in measuring_order(list(proxies), number):
                block = results[name][number]
                await _measure_slice(slices, *targets[name], workload, block, workload.seconds)
        return Measurement(results, CpuUsage.now().since(usage_before))


async def _measure_slice(
    slices: SliceRunner,
    target: int,
    proxy: RunningProxy,
    workload: ProxyWorkload,
    block: Block,
    seconds: float,
) -> None:
    cpu_before = proxy.cpu_seconds()
    result = await slices.run(target, seconds, rate=workload.rate, new_connections=workload.new_connections)
    block.cpu += proxy.cpu_seconds() - cpu_before
    block.latencies += result.latencies
    block.new_connections += result.new_connections
