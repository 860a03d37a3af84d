"""Compare contenders under several workloads, as ratios to one of them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from bench.machine import MachineCondition
from bench.proxies import interleaving
from bench.proxies.contenders import Contender
from bench.proxies.interleaving import BLOCKS, FIGURES, Measurement
from bench.proxies.setup import ProxyBenchSetup
from bench.proxies.significance import Ratio, RatioVerdict
from bench.proxies.workloads import ProxyWorkload
from cli.output import print_note, show_table


@dataclass(frozen=True)
class Comparison:
    """One figure of one contender under one workload, compared with the reference (the first contender).

    `value` and `reference_value`: medians of all blocks, in the unit of the figure. `others_busy`: fraction
    of the machine, from 0 to 1, that other programs used during the measurement.
    """

    workload: str
    figure: str
    contender: str
    reference: str
    value: float
    reference_value: float
    ratio: Ratio
    others_busy: float

    @computed_field  # type: ignore[prop-decorator]  # mypy does not support decorated properties
    @property
    def verdict(self) -> RatioVerdict:
        """The verdict on the ratio, or UNCLEAR if other programs used too much of the machine."""
        return RatioVerdict.UNCLEAR if self.is_disturbed else self.ratio.verdict

    @property
    def is_disturbed(self) -> bool:
        return self.others_busy > MachineCondition.MAX_OTHERS_BUSY

    def describe_verdict(self) -> str:
        if self.is_disturbed:
            return f"unclear: other programs used {self.others_busy:.0%} of the machine"
        return self.ratio.describe_verdict()


def compare_measurement(
    workload: ProxyWorkload, measurement: Measurement, reference: str
) -> list[Comparison]:
    """Compare the workload's figures of each contender with those of the reference."""
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


async def compare(
    contenders: Sequence[Contender],
    workloads: Sequence[ProxyWorkload],
    bench: ProxyBenchSetup,
    *,
    blocks: int = BLOCKS,
) -> list[Comparison]:
    """Compare all contenders with the first one, in the order of the workloads.

    Prints progress on standard error. A contender that does not support a workload's TLS mode is left out.
    Raises ProcessFailed or TimeoutError.
    """
    comparisons = []
    number = 0
    for encryption, group in itertools.groupby(workloads, lambda workload: workload.encryption):
        participants = [contender for contender in contenders if encryption in contender.encryptions]
        async with bench.run(participants, encryption) as proxies:
            for workload in group:
                number += 1
                print_note(f"{number} of {len(workloads)}: {workload.name}")
                measurement = await interleaving.measure(workload, proxies, bench, blocks=blocks)
                comparisons += compare_measurement(workload, measurement, participants[0].name)
    return comparisons


def show_comparisons(comparisons: Sequence[Comparison], reference: str) -> None:
    """Print comparisons as a table."""
    rows = []
    for comparison in comparisons:
        figure = FIGURES[comparison.figure]
        values = (f"{value:.4g} {figure.unit}" for value in (comparison.reference_value, comparison.value))
        verdict = comparison.describe_verdict()
        rows.append(
            (comparison.workload, comparison.contender, figure.title, *values, str(comparison.ratio), verdict)
        )
    headers = (
        "workload",
        "contender",
        "figure",
        reference,
        "contender's",
        "ratio (99 % interval)",
        "verdict",
    )
    show_table(headers, rows)
