"""Write profiles as the page `profiles.md` and one flame graph each in `profiles/`."""

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
    """The CPU profile of a proxy: the CPU time per query, and samples by stack (at least one).

    `condition` is the machine's condition just before.
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
        """The file name of its flame graph."""
        slug = re.sub(r"[^a-z0-9]+", "-", f"{self.workload} {self.proxy}".lower().replace(",", ""))
        return f"{slug.strip('-')}.svg"


def profiles_as_markdown(profiles: Sequence[Profile], machine: Machine) -> str:
    """Return the page of at least one profile; its tables have one column per proxy."""
    busiest = max((profile.condition for profile in profiles), key=lambda condition: condition.others_busy)
    paragraphs = [
        "# Profiles",
        "Made by `tidevoy profile`; do not edit.",
        f"Machine: {machine.cpu}, {machine.cores} cores, {machine.kernel}."
        f" {describe_condition(busiest.as_json())}",
        _METHOD,
    ]
    for workload in dict.fromkeys(profile.workload for profile in profiles):
        workload_profiles = [profile for profile in profiles if profile.workload == workload]
        paragraphs += [
            f"## {workload[0].upper()}{workload[1:]}",
            "CPU per query in µs, and its share:",
            "\n".join(_table(workload_profiles)),
            *(
                f"![{profile.proxy}, {workload}]({_PICTURES_DIRECTORY}/{profile.file})"
                for profile in workload_profiles
            ),
        ]
    return "\n\n".join(paragraphs) + "\n"


def write_profiles(profiles: Sequence[Profile], machine: Machine, directory: Path) -> list[Path]:
    """Write the page and the flame graphs to `directory`, and return the written files."""
    pictures = directory / _PICTURES_DIRECTORY
    pictures.mkdir(parents=True, exist_ok=True)
    written = [directory / _PAGE_FILE]
    written[0].write_text(profiles_as_markdown(profiles, machine), encoding="utf-8")
    for profile in profiles:
        path = pictures / profile.file
        title = f"{profile.proxy} {profile.version}: {profile.workload}"
        path.write_text(flame_graph_svg(profile.stacks, title), encoding="utf-8")
        written.append(path)
    return written


def _table(profiles: Sequence[Profile]) -> Iterator[str]:
    shares_by_profile = [area_shares(profile.stacks) for profile in profiles]
    yield f"| | {' | '.join(f'{profile.proxy} {profile.version}' for profile in profiles)} |"
    yield f"|---|{'---:|' * len(profiles)}"
    for area in AREAS:
        cells = (
            f"{profile.cpu_us_per_query * shares[area]:,.1f} ({shares[area]:.1%})"
            for profile, shares in zip(profiles, shares_by_profile, strict=True)
        )
        yield f"| {area} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(f'{profile.cpu_us_per_query:,.1f}' for profile in profiles)} |"
    yield f"| queries/s | {' | '.join(f'{profile.queries_per_second:,.0f}' for profile in profiles)} |"
    yield f"| samples | {' | '.join(f'{sum(profile.stacks.values()):,}' for profile in profiles)} |"
