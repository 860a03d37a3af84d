"""Profiles as a page, `profiles.md`, and a flame graph each in `profiles/` beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import Machine, MachineCondition
from bench.profiling.call_stacks import AREAS, CallStack, area_shares
from bench.profiling.flame_graph import flame_graph_svg
from bench.reporting.report import describe_condition

_PAGE_FILE, _PICTURES_DIRECTORY = "profiles.md", "profiles"
_METHOD = (
    "`perf record --all-cpus --event=cpu-clock --freq=997 -g` while clients send queries through one"
    " proxy at a time, as in [bench/](../bench/); of the samples those of the proxy are taken. Sampling"
    " costs a little, so the CPU per query is rather more than in the benchmark. A share of 20 % in 2,000"
    " samples may as well be 18 or 22 %.\n\nEverything is on one machine. What sends a packet over"
    " loopback also runs the receiver's side of TCP and wakes the receiver, so a proxy's account holds"
    " what elsewhere a network card's interrupts would do. While interrupts are off the clock cannot"
    " strike; such time is seen in the function that lets them on again, such as"
    " `_raw_spin_unlock_irqrestore`. Where a program has no symbols or frame pointers, the name of its"
    " file stands for all of it."
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a proxy spent its CPU: `cpu_us` per query, and samples by stack, at least one.

    `per_second` are queries. `condition` is that of the machine just before.
    """

    workload: str
    proxy: str
    version: str
    condition: MachineCondition
    cpu_us_per_query: float
    queries_per_second: float
    stacks: Mapping[CallStack, int]

    @property
    def file(self) -> str:
        """The name of its flame graph."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.workload} {self.proxy}".lower().replace(",", ""))
        return f"{words.strip('-')}.svg"


def profiles_as_markdown(profiles: Sequence[Profile], machine: Machine) -> str:
    """The page; tables have a column for each proxy. At least one profile."""
    busiest = max((each.condition for each in profiles), key=lambda condition: condition.others_busy)
    paragraphs = [
        "# Profiles",
        "Made by `tidevoy profile`; do not edit.",
        f"Machine: {machine.cpu}, {machine.cores} cores, {machine.kernel}."
        f" {describe_condition(busiest.as_json())}",
        _METHOD,
    ]
    for workload in dict.fromkeys(each.workload for each in profiles):
        of_workload = [each for each in profiles if each.workload == workload]
        paragraphs += [
            f"## {workload[0].upper()}{workload[1:]}",
            "CPU per query in µs, and its share:",
            "\n".join(_table(of_workload)),
            *(f"![{each.proxy}, {workload}]({_PICTURES_DIRECTORY}/{each.file})" for each in of_workload),
        ]
    return "\n\n".join(paragraphs) + "\n"


def write_profiles(profiles: Sequence[Profile], machine: Machine, directory: Path) -> list[Path]:
    """Write page and flame graphs into `directory`; what was written."""
    pictures = directory / _PICTURES_DIRECTORY
    pictures.mkdir(parents=True, exist_ok=True)
    written = [directory / _PAGE_FILE]
    written[0].write_text(profiles_as_markdown(profiles, machine), encoding="utf-8")
    for each in profiles:
        path = pictures / each.file
        path.write_text(
            flame_graph_svg(each.stacks, f"{each.proxy} {each.version}: {each.workload}"), encoding="utf-8"
        )
        written.append(path)
    return written


def _table(profiles: Sequence[Profile]) -> Iterator[str]:
    area_shares_by_profile = [area_shares(each.stacks) for each in profiles]
    yield f"| | {' | '.join(f'{each.proxy} {each.version}' for each in profiles)} |"
    yield f"|---|{'---:|' * len(profiles)}"
    for area in AREAS:
        cells = (
            f"{each.cpu_us_per_query * parts[area]:,.1f} ({parts[area]:.1%})"
            for each, parts in zip(profiles, area_shares_by_profile, strict=True)
        )
        yield f"| {area} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(f'{each.cpu_us_per_query:,.1f}' for each in profiles)} |"
    yield f"| queries/s | {' | '.join(f'{each.queries_per_second:,.0f}' for each in profiles)} |"
    yield f"| samples | {' | '.join(f'{sum(each.stacks.values()):,}' for each in profiles)} |"
