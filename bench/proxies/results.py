"""Results of `tidevoy bench proxies`, and their JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.proxies.comparison import Comparison
from bench.proxies.drains import DrainResult
from bench.proxies.latency_and_memory import AddedLatency


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run.

    `versions`: by contender, the reference first; `memory`: 1,000 bytes per idle session, by contender.
    `latencies`, `memory` and `moves` are empty in the short form of the benchmark.
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
        return next(iter(self.versions))

    @property
    def others_busy(self) -> float:
        """The largest fraction of the machine, from 0 to 1, that other programs used in any measurement."""
        shares = [comparison.others_busy for comparison in self.comparisons]
        return max([*shares, *(latency.others_busy for latency in self.latencies)], default=0.0)

    def as_json_text(self) -> str:
        """Return the content of the JSON file. Numbers are not rounded."""
        data = _ADAPTER.dump_python(self, mode="json")
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Results:
        return _ADAPTER.validate_json(path.read_text(encoding="utf-8"))


_ADAPTER = TypeAdapter(Results)
