"""What a proxy adds to the latency of the server itself, with few and with many clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load_client import LoadClient
from bench.proxies import interleaving
from bench.proxies.comparison import running
from bench.proxies.contenders import Contender, Site
from bench.proxies.pinning import Pinning
from bench.proxies.significance import Added
from bench.proxies.workloads import Encryption, Workload
from bench.resource_usage import most_files
from cli.output import remark

QUANTILES = (0.5, 0.95, 0.99, 0.999)
RATE = 1_000.0
"""Statements per second of all clients: few enough that none waits for another's answer."""
_CLIENTS = (1, 16, 64, 1_000, 10_000)
_BLOCKS = 20
_SLICE_SECONDS = 0.1
_OTHER_FILES = 2_000


@dataclass(frozen=True, slots=True)
class AddedLatency:
    """Milliseconds that `contender` adds to this quantile of the server's latency.

    `others_busy`: the share of the machine, from 0 to 1, that something else used meanwhile.
    """

    clients: int
    contender: str
    quantile: float
    direct: float
    added: Added
    others_busy: float

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def client_counts(files: int) -> list[int]:
    """The numbers of clients, of which the last is reduced to what `files` open files of a process allow.

    The load client and the server need two files for each client: one directly, one through the proxy. A
    proxy needs two as well.
    """
    most = max(1, (files - _OTHER_FILES) // 2)
    return sorted({min(count, most) for count in _CLIENTS})


async def measure(
    server: Contender,
    contenders: Sequence[Contender],
    site: Site,
    client: LoadClient,
    pinning: Pinning | None,
    *,
    counts: Sequence[int] = (),
    blocks: int = _BLOCKS,
) -> list[AddedLatency]:
    """Compare each contender with the server itself, in short slices in turn.

    ProcessFailed, TimeoutError.

    `counts`: of clients; without, as many as open files allow.
    """
    import numpy as np  # takes long, and most commands do not need it

    found = []
    async with running([server, *contenders], site, Encryption.NONE, pinning) as proxies:
        for clients in counts or client_counts(most_files()):
            for contender in contenders:
                remark(f"latency that {contender.name} adds, {clients:,} clients")
                pair = {name: proxies[name] for name in (server.name, contender.name)}
                workload = Workload("", clients, rate=RATE, seconds=_SLICE_SECONDS)
                measured = await interleaving.measure(workload, pair, client, pinning, blocks=blocks)
                direct, through = (
                    [block.latencies for block in measured.blocks[name]]
                    for name in (server.name, contender.name)
                )
                for quantile in QUANTILES:
                    found.append(
                        AddedLatency(
                            clients,
                            contender.name,
                            quantile,
                            float(np.quantile(np.concatenate(direct), quantile)),
                            Added.of(through, direct, quantile),
                            measured.shares.others,
                        )
                    )
    return found
