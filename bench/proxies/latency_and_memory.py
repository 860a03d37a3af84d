"""Measure the latency that a proxy adds to direct connections, and its memory per idle session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from bench.machine import raise_file_limit
from bench.proxies import interleaving
from bench.proxies.contenders import DIRECT, Contender, direct_contender
from bench.proxies.setup import ProxyBenchSetup
from bench.proxies.significance import LatencyDifference
from bench.proxies.workloads import ProxyWorkload
from cli.output import print_note

QUANTILES = (0.5, 0.95, 0.99, 0.999)
STATEMENTS_PER_SECOND = 1_000.0
"""Rate of all clients together, low enough that statements do not wait for each other."""
IDLE_SESSIONS = 1_000
_CLIENT_COUNTS = (1, 16, 64, 1_000, 10_000)
_BLOCKS = 20
_SLICE_SECONDS = 0.1
_RESERVED_FILES = 2_000


@dataclass(frozen=True, slots=True)
class AddedLatency:
    """Latency that a proxy (`contender`) adds at one quantile, such as 0.99, with this number of clients.

    In milliseconds, `direct` is the latency without a proxy, and `added` the difference. `others_busy`:
    fraction of the machine's CPU, from 0 to 1, that other programs or the host used during the measurement.
    """

    clients: int
    contender: str
    quantile: float
    direct: float
    added: LatencyDifference
    others_busy: float


def client_counts(max_files: int) -> list[int]:
    """Return the client counts to measure, limited to what `max_files` open files per process allow.

    The load client and the server have two connections per client: a direct one, and one through the proxy.
    The proxy also needs two files per client.
    """
    max_clients = max(1, (max_files - _RESERVED_FILES) // 2)
    return sorted({min(count, max_clients) for count in _CLIENT_COUNTS})


async def measure_added_latency(
    contenders: Sequence[Contender],
    bench: ProxyBenchSetup,
    *,
    counts: Sequence[int] = (),
    blocks: int = _BLOCKS,
) -> list[AddedLatency]:
    """Compare each contender with direct connections to the server, in short alternating slices.

    `counts`: client counts; default: the result of `client_counts`.

    Raises ProcessFailed or TimeoutError.
    """
    import numpy as np  # the import is slow, and most commands do not need it

    results = []
    async with bench.run([direct_contender(bench.site.backend), *contenders]) as proxies:
        for clients, contender in product(counts or client_counts(raise_file_limit()), contenders):
            print_note(f"latency that {contender.name} adds, {clients:,} clients")
            pair = {name: proxies[name] for name in (DIRECT, contender.name)}
            workload = ProxyWorkload("", clients, rate=STATEMENTS_PER_SECOND, seconds=_SLICE_SECONDS)
            measurement = await interleaving.measure(workload, pair, bench, blocks=blocks)
            direct, proxied = ([block.latencies for block in measurement.blocks[name]] for name in pair)
            results += [
                AddedLatency(
                    clients,
                    contender.name,
                    quantile,
                    float(np.quantile(np.concatenate(direct), quantile)),
                    LatencyDifference.of(proxied, direct, quantile),
                    measurement.cpu_usage.others_share,
                )
                for quantile in QUANTILES
            ]
    return results


async def measure_memory(contenders: Sequence[Contender], bench: ProxyBenchSetup) -> dict[str, float]:
    """Return the additional resident memory per idle session in kB (1,000 bytes), by contender."""
    memory_by_contender = {}
    async with bench.run(contenders) as proxies:
        for name, proxy in proxies.items():
            print_note(f"memory of {name} for {IDLE_SESSIONS:,} idle sessions")
            memory_before = proxy.resident_kb()
            async with bench.client.keep_idle(proxy.target.port, connections=IDLE_SESSIONS) as client_results:
                memory_by_contender[name] = (proxy.resident_kb() - memory_before) / IDLE_SESSIONS
            client_results[0].raise_for_errors()
    return memory_by_contender
