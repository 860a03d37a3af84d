"""Results of `tidevoy bench proxies`, and their JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.proxies.added_latency import AddedLatency
from bench.proxies.comparison import Comparison
from bench.proxies.drains import DrainResult
from bench.proxies.significance import LatencyDifference


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run.

    `versions`: by contender, the reference first; `memory`: 1,000 bytes per idle session by contender.
    `latencies`, `memory` and `moves` are empty in the short form.
    """

    backend: str
    backend_version: str
    at: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    comparisons: tuple[Comparison, ...]
    latencies: tuple[AddedLatency, ...] = ()
    memory: Mapping[str, float] | None = None
    moves: DrainResult | None = None

    @property
    def reference(self) -> str:
        """The contender that the others are compared with."""
        return next(iter(self.versions))

    @property
    def others_busy(self) -> float:
        """The largest share of the machine, from 0 to 1, that other programs used during a measurement."""
        compared = (comparison.others_busy for comparison in self.comparisons)
        return max(*compared, *(latency.others_busy for latency in self.latencies), 0.0)

    def as_json(self) -> dict[str, Any]:
        """Return JSON data; numbers are not rounded."""
        return {
            "backend": self.backend,
            "backend_version": self.backend_version,
            "at": self.at,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "latencies": [latency.as_json() for latency in self.latencies],
            "memory": None if self.memory is None else dict(self.memory),
            "moves": None if self.moves is None else self.moves.as_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Results:
        """Parse the JSON data of `as_json`."""
        return cls(
            data["backend"],
            data["backend_version"],
            data["at"],
            data["machine"],
            data["versions"],
            tuple(Comparison.from_json(comparison) for comparison in data["comparisons"]),
            tuple(
                AddedLatency(**{**latency, "added": LatencyDifference(**latency["added"])})
                for latency in data["latencies"]
            ),
            data["memory"],
            None if data["moves"] is None else DrainResult(**data["moves"]),
        )

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file of `write`."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write a JSON file."""
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def machine_sentence(data: Mapping[str, Any]) -> str:
    """Describe the machine; `data` is that of `bench.machine.Machine.as_json`."""
    memory = data["memory_mib"] / 1024
    return f"{data['cores']} cores ({data['cpu']}), {memory:.0f} GiB of memory, {data['kernel']}"
