"""Compare contenders under several workloads, as ratios to one of them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.load_client import LoadClient
from bench.machine import MachineCondition
from bench.proxies import interleaving
from bench.proxies.contenders import Contender, ProxySite, RunningProxy
from bench.proxies.interleaving import BLOCKS, FIGURES, SLICES_PER_BLOCK, Measurement
from bench.proxies.pinning import CpuPinning
from bench.proxies.significance import Ratio, RatioVerdict
from bench.proxies.workloads import Encryption, ProxyWorkload
from cli.output import format_duration, print_note

_STARTUP_SECONDS = 8.0  # of all contenders together
_OVERHEAD_FACTOR = 1.15  # slices wait for the last responses


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one contender under one workload, compared with the reference.

    `value` and `reference_value`: medians of all blocks, in the unit of the figure. `others_busy`: the share
    of the machine, from 0 to 1, that other programs used meanwhile.
    """

    workload: str
    figure: str
    contender: str
    reference: str
    value: float
    reference_value: float
    ratio: Ratio
    others_busy: float

    @property
    def verdict(self) -> RatioVerdict:
        """The ratio's verdict, or unclear if other programs used the machine."""
        return RatioVerdict.UNCLEAR if self.is_disturbed else self.ratio.verdict

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used too much of the machine."""
        return self.others_busy > MachineCondition.MAX_OTHERS_BUSY

    def describe_verdict(self) -> str:
        """Return the verdict with its reason."""
        if self.is_disturbed:
            return f"unclear: other programs used {self.others_busy:.0%} of the machine"
        return self.ratio.describe_verdict()

    def as_json(self) -> dict[str, Any]:
        """Return JSON data; numbers are not rounded."""
        return {**asdict(self), "verdict": str(self.verdict)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Parse the JSON data of `as_json`."""
        fields = {name: value for name, value in data.items() if name != "verdict"}
        return cls(**{**fields, "ratio": Ratio.from_json(data["ratio"])})


def compare_measurement(
    workload: ProxyWorkload, measurement: Measurement, reference: str
) -> list[Comparison]:
    """Compare each figure of the workload of each contender with the reference."""
    comparisons = []
    figures = [figure for figure in measurement.figure_names() if figure in workload.figures]
    for figure, contender in itertools.product(figures, measurement.blocks):
        if contender == reference:
            continue
        values = measurement.values(figure, contender)
        reference_values = measurement.values(figure, reference)
        comparisons.append(
            Comparison(
                workload.name,
                figure,
                contender,
                reference,
                statistics.median(values),
                statistics.median(reference_values),
                Ratio.of(values, reference_values),
                measurement.cpu_usage.others_share,
            )
        )
    return comparisons


def estimate_seconds(workloads: Sequence[ProxyWorkload], contenders: int, blocks: int = BLOCKS) -> float:
    """Estimate the seconds that a comparison takes."""
    startups = len({workload.encryption for workload in workloads})
    slice_seconds = sum(workload.seconds for workload in workloads) * blocks * SLICES_PER_BLOCK
    return slice_seconds * contenders * _OVERHEAD_FACTOR + startups * _STARTUP_SECONDS


async def compare(
    contenders: Sequence[Contender],
    workloads: Sequence[ProxyWorkload],
    site: ProxySite,
    client: LoadClient,
    pinning: CpuPinning | None,
    *,
    blocks: int = BLOCKS,
) -> list[Comparison]:
    """Compare all contenders with the first one, in the order of the workloads.

    Prints progress on standard error. Skips workloads with TLS for contenders that cannot terminate it.
    Raises ProcessFailed or TimeoutError.
    """
    comparisons = []
    ends_at = time.monotonic() + estimate_seconds(workloads, len(contenders), blocks)
    number = 0
    for encryption, group in itertools.groupby(workloads, lambda workload: workload.encryption):
        participants = [contender for contender in contenders if encryption in contender.encryptions]
        async with start_all(participants, site, encryption, pinning) as proxies:
            for workload in group:
                number += 1
                time_left = format_duration(max(0.0, ends_at - time.monotonic()))
                print_note(f"{number} of {len(workloads)}: {workload.name} ({time_left} left)")
                measurement = await interleaving.measure(workload, proxies, client, pinning, blocks=blocks)
                comparisons += compare_measurement(workload, measurement, participants[0].name)
    return comparisons


@asynccontextmanager
async def start_all(
    contenders: Sequence[Contender], site: ProxySite, encryption: Encryption, pinning: CpuPinning | None
) -> AsyncIterator[dict[str, RunningProxy]]:
    """Run all contenders, pinned to their cores; yield them by name."""
    async with AsyncExitStack() as stack:
        proxies = {}
        for contender in contenders:
            proxy_site = replace(site, encryption=encryption).for_proxy(contender.name)
            proxies[contender.name] = proxy = await stack.enter_async_context(contender.start(proxy_site))
            if pinning is not None:
                pinning.pin_proxies(proxy.processes())
        yield proxies


def table_row(comparison: Comparison) -> tuple[str, ...]:
    """Return a comparison's row of the terminal table."""
    figure = FIGURES[comparison.figure]
    return (
        comparison.workload,
        comparison.contender,
        figure.title,
        f"{comparison.reference_value:.4g} {figure.unit}",
        f"{comparison.value:.4g} {figure.unit}",
        str(comparison.ratio),
        comparison.describe_verdict(),
    )


def column_titles(reference: str) -> tuple[str, ...]:
    """Return the headers of the terminal table."""
    return ("workload", "contender", "figure", reference, "contender's", "ratio (99 % interval)", "verdict")
