"""Write profiles as the page `profiles.md` and a flame graph per profile in `profiles/`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import Machine, MachineCondition
from bench.profiling.call_stacks import AREAS, CallStack, area_shares
from bench.profiling.flame_graph import flame_graph_svg
from bench.reporting.report import describe_condition, join_paragraphs, markdown_table, write_files

_PAGE_FILE, _PICTURES_DIRECTORY = "profiles.md", "profiles"
_METHOD = """\
`perf record --all-cpus --event=cpu-clock --freq=997 -g` runs while clients send queries through one proxy
at a time, as in [bench/](../../bench/). Only the samples of the proxy count.

* Sampling costs a little CPU, so the CPU per query is slightly higher than in the benchmark.
* A share of 20 % in 2,000 samples has an error of about 2 percentage points.
* Everything runs on one machine. A process that sends a packet over loopback also runs the receiver's side
  of TCP and wakes the receiver. So the CPU of a proxy includes work that interrupts of a network card would
  do elsewhere.
* The sampling clock cannot fire while interrupts are disabled. This time is attributed to the function that
  enables them again, such as `_raw_spin_unlock_irqrestore`.
* A program without symbols or frame pointers appears under the name of its file."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The CPU profile of a proxy under one workload. `stacks`: samples per stack, at least one.

    `condition`: the machine's condition just before the measurement.
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
        slug = re.sub(r"[^a-z0-9]+", "-", f"{self.workload} {self.proxy}".lower().replace(",", ""))
        return f"{slug.strip('-')}.svg"


def profiles_as_markdown(profiles: Sequence[Profile], machine: Machine) -> str:
    """Return the Markdown page of at least one profile: a table per workload, with a column per proxy."""
    busiest = max((profile.condition for profile in profiles), key=lambda condition: condition.others_busy)
    paragraphs = [
        "# Profiles",
        "Made by `tidevoy profile`; do not edit.",
        f"Machine: {machine.cpu}, {machine.cores} cores, {machine.kernel}."
        f" {describe_condition(asdict(busiest))}",
        _METHOD,
    ]
    for workload in dict.fromkeys(profile.workload for profile in profiles):
        workload_profiles = [profile for profile in profiles if profile.workload == workload]
        paragraphs += [
            f"## {workload[0].upper()}{workload[1:]}",
            "CPU per query in µs, and its share:",
            _table(workload_profiles),
            *(
                f"![{profile.proxy}, {workload}]({_PICTURES_DIRECTORY}/{profile.file})"
                for profile in workload_profiles
            ),
        ]
    return join_paragraphs(*paragraphs)


def write_profiles(profiles: Sequence[Profile], machine: Machine, directory: Path) -> list[Path]:
    """Write the page and the flame graphs to `directory`, and return the written files."""
    pictures = {
        profile.file: flame_graph_svg(
            profile.stacks, f"{profile.proxy} {profile.version}: {profile.workload}"
        )
        for profile in profiles
    }
    return [
        *write_files(directory, {_PAGE_FILE: profiles_as_markdown(profiles, machine)}),
        *write_files(directory / _PICTURES_DIRECTORY, pictures),
    ]


def _table(profiles: Sequence[Profile]) -> str:
    shares = [(profile.cpu_us_per_query, area_shares(profile.stacks)) for profile in profiles]
    rows = [
        (area, *(f"{cpu * by_area[area]:,.1f} ({by_area[area]:.1%})" for cpu, by_area in shares))
        for area in AREAS
    ]
    rows += [
        ("all", *(f"{profile.cpu_us_per_query:,.1f}" for profile in profiles)),
        ("queries/s", *(f"{profile.queries_per_second:,.0f}" for profile in profiles)),
        ("samples", *(f"{sum(profile.stacks.values()):,}" for profile in profiles)),
    ]
    return markdown_table(["", *(f"{profile.proxy} {profile.version}" for profile in profiles)], rows)
