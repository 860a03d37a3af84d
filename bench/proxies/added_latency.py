"""Measure the latency that a proxy adds to the server's own, with few and with many clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load_client import LoadClient
from bench.proxies import interleaving
from bench.proxies.comparison import start_all
from bench.proxies.contenders import Contender, ProxySite
from bench.proxies.pinning import CpuPinning
from bench.proxies.significance import LatencyDifference
from bench.proxies.workloads import Encryption, ProxyWorkload
from bench.resource_usage import raise_file_limit
from cli.output import print_note

QUANTILES = (0.5, 0.95, 0.99, 0.999)
STATEMENTS_PER_SECOND = 1_000.0
"""Rate of all clients together: low enough that no statement waits for another one."""
_CLIENT_COUNTS = (1, 16, 64, 1_000, 10_000)
_BLOCKS = 20
_SLICE_SECONDS = 0.1
_RESERVED_FILES = 2_000


@dataclass(frozen=True, slots=True)
class AddedLatency:
    """Milliseconds that `contender` adds to this quantile of the server's latency.

    `others_busy`: the share of the machine, from 0 to 1, that other programs used meanwhile.
    """

    clients: int
    contender: str
    quantile: float
    direct: float
    added: LatencyDifference
    others_busy: float

    def as_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)


def client_counts(max_files: int) -> list[int]:
    """Return the client counts to measure, limited to what `max_files` open files per process allow.

    The load client and the server need two files per client: one directly, one through the proxy. A proxy
    needs two as well.
    """
    max_clients = max(1, (max_files - _RESERVED_FILES) // 2)
    return sorted({min(count, max_clients) for count in _CLIENT_COUNTS})


async def measure(
    server: Contender,
    contenders: Sequence[Contender],
    site: ProxySite,
    client: LoadClient,
    pinning: CpuPinning | None,
    *,
    counts: Sequence[int] = (),
    blocks: int = _BLOCKS,
) -> list[AddedLatency]:
    """Compare each contender with the server itself, in short alternating slices.

    `counts`: client counts; default: `client_counts`. Raises ProcessFailed or TimeoutError.
    """
    import numpy as np  # the import is slow, and most commands do not need it

    results = []
    async with start_all([server, *contenders], site, Encryption.NONE, pinning) as proxies:
        for clients in counts or client_counts(raise_file_limit()):
            for contender in contenders:
                print_note(f"latency that {contender.name} adds, {clients:,} clients")
                pair = {name: proxies[name] for name in (server.name, contender.name)}
                workload = ProxyWorkload("", clients, rate=STATEMENTS_PER_SECOND, seconds=_SLICE_SECONDS)
                measurement = await interleaving.measure(workload, pair, client, pinning, blocks=blocks)
                direct, proxied = (
                    [block.latencies for block in measurement.blocks[name]]
                    for name in (server.name, contender.name)
                )
                for quantile in QUANTILES:
                    results.append(
                        AddedLatency(
                            clients,
                            contender.name,
                            quantile,
                            float(np.quantile(np.concatenate(direct), quantile)),
                            LatencyDifference.of(proxied, direct, quantile),
                            measurement.cpu_usage.others_share,
                        )
                    )
    return results
