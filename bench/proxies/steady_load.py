"""Compare the queries per second of proxies, second by second, while a part of the machine is idle.

At full speed, every cost is a loss of queries. In operation, machines have reserves, and what matters is
whether there is a second in which these do not suffice. A pause that is caught up within the second shows
in the latencies only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, quantiles

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from bench.load_client import SliceResult, SliceRunner
from bench.machine import CpuUsage, MachineBusy, MachineCondition
from bench.proxies.contenders import Contender, RunningProxy
from bench.proxies.interleaving import measuring_order
from bench.proxies.setup import ProxyBenchSetup
from bench.proxies.workloads import ProxyWorkload
from cli.output import print_note, show_table
from sandbox.child_process import ProcessFailed

_SLICE_SECONDS = 1.0
_ROUNDS = 10  # each with SLICES_PER_BLOCK slices for each contender
_CALIBRATION_ROUNDS = 12
_CALIBRATION_SLICES = 4
_TOLERANCE = 0.01  # of the machine's CPU
_FIRST_RATE = 2_000.0


@dataclass(frozen=True)
class SteadyComparison:
    """The throughput of a contender when clients send at a fixed rate, compared with the reference contender.

    `rate`: queries per second that the clients send. `cpu`: fraction of the machine, from 0 to 1, that was
    busy with the reference; the clients and the server are included. `qps`: the mean of all seconds;
    `worst`: of the slowest second. `p99` and `slowest`: latencies of statements, in milliseconds.
    """

    workload: str
    contender: str
    reference: str
    rate: float
    cpu: float
    qps: float
    worst: float
    reference_qps: float
    p99: float
    slowest: float

    @computed_field  # type: ignore[prop-decorator]  # mypy does not support decorated properties
    @property
    def change(self) -> float:
        """The change of the mean from that of the reference, as a fraction; negative: fewer queries."""
        return self.qps / self.reference_qps - 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def worst_change(self) -> float:
        """The change of the slowest second from the mean of the reference, as a fraction."""
        return self.worst / self.reference_qps - 1


def compare_seconds(
    workload: ProxyWorkload, slices: Mapping[str, Sequence[SliceResult]], cpu: float
) -> list[SteadyComparison]:
    """Compare the slices of each contender, each of a second, with those of the first contender.

    The first contender is compared with its own mean, which shows the noise of the machine.
    """
    reference = next(iter(slices))
    qps = {name: [len(one.latencies) / one.seconds for one in its] for name, its in slices.items()}
    latencies = {name: [latency for one in its for latency in one.latencies] for name, its in slices.items()}
    return [
        SteadyComparison(
            workload=workload.name,
            contender=name,
            reference=reference,
            rate=workload.rate or 0.0,
            cpu=cpu,
            qps=fmean(qps[name]),
            worst=min(qps[name]),
            reference_qps=fmean(qps[reference]),
            p99=quantiles(latencies[name], n=100)[-1],
            slowest=max(latencies[name]),
        )
        for name in slices
    ]


async def compare_at_cpu(
    contenders: Sequence[Contender], workloads: Sequence[ProxyWorkload], bench: ProxyBenchSetup, *, cpu: float
) -> list[SteadyComparison]:
    """Compare all contenders at the rate with which the first one keeps a fraction `cpu` of the machine busy.

    Prints progress on standard error. Raises MachineBusy, ProcessFailed or TimeoutError.
    """
    comparisons = []
    async with bench.run(contenders) as proxies:
        for number, workload in enumerate(workloads, start=1):
            async with bench.connect(workload, proxies.values()) as slices:
                steady = await _at_cpu(slices, workload, cpu)
                print_note(f"{number} of {len(workloads)}: {steady.name}")
                comparisons += await _measure(slices, steady, proxies)
    return comparisons


async def _at_cpu(slices: SliceRunner, workload: ProxyWorkload, cpu: float) -> ProxyWorkload:
    """Return the workload at the rate with which the first target keeps this fraction of the machine busy.

    Raises ProcessFailed if no rate was found.
    """
    rate = _FIRST_RATE
    for _ in range(_CALIBRATION_ROUNDS):
        busy = await _busy_fraction(slices, rate)
        if abs(busy - cpu) <= _TOLERANCE:
            subject, _, _ = workload.name.partition(",")
            return replace(workload, name=f"{subject}, {rate:,.0f}/s", rate=rate)
        rate *= min(2.0, cpu / busy)
    reason = f"keeps {busy:.0%} of the machine busy at {rate:,.0f}/s, not {cpu:.0%}; try another --at-cpu"
    raise ProcessFailed("the benchmark", reason, "")


async def _busy_fraction(slices: SliceRunner, rate: float) -> float:
    before = CpuUsage.now()
    for _ in range(_CALIBRATION_SLICES):
        await slices.run(0, _SLICE_SECONDS, rate=rate)
    usage = CpuUsage.now().since(before)
    return usage.busy / usage.total


async def _measure(
    slices: SliceRunner, workload: ProxyWorkload, proxies: Mapping[str, RunningProxy]
) -> list[SteadyComparison]:
    names = list(proxies)
    results: dict[str, list[SliceResult]] = {name: [] for name in names}
    reference_usage: list[float] = []
    for index in range(len(names)):
        await slices.run(index, _SLICE_SECONDS, rate=workload.rate)  # to warm up
    usage_before = CpuUsage.now()
    for number in range(_ROUNDS):
        for name in measuring_order(names, number):
            before = CpuUsage.now()
            result = await slices.run(names.index(name), _SLICE_SECONDS, rate=workload.rate)
            usage = CpuUsage.now().since(before)
            results[name].append(result)
            if name == names[0]:
                reference_usage.append(usage.busy / usage.total)
    others_share = CpuUsage.now().since(usage_before).others_share
    if others_share > MachineCondition.MAX_OTHERS_BUSY:
        raise MachineBusy(others_share)
    return compare_seconds(workload, results, fmean(reference_usage))


def show_steady_comparisons(comparisons: Sequence[SteadyComparison]) -> None:
    """Print comparisons as a table."""
    headers = (
        *("workload", "contender", "CPU", "queries/s", "change", "slowest second"),
        *("99th percentile", "slowest statement"),
    )
    rows = [
        (
            one.workload,
            one.contender,
            f"{one.cpu:.0%}",
            f"{one.qps:,.0f}",
            f"{one.change:+.1%}",
            f"{one.worst_change:+.1%}",
            f"{one.p99:.3g} ms",
            f"{one.slowest:.3g} ms",
        )
        for one in comparisons
    ]
    show_table(headers, rows)
