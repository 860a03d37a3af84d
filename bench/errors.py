"""Errors of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from controlplane.errors import TidevoyError
from sandbox.local_cluster import WaitTimeout


class BenchmarkFailed(TidevoyError):
    """A benchmark could not be completed, so it has no result."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"benchmark {name} failed: {reason}")


@contextmanager
def convert_errors_to_benchmark_failed(name: str) -> Iterator[None]:
    """Turn timeouts and HTTP errors into BenchmarkFailed, which names the benchmark."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise BenchmarkFailed(name, f"the control plane did not answer ({error!r})") from None
    except (TimeoutError, WaitTimeout):
        raise BenchmarkFailed(name, "a step took too long; try again on a quieter machine") from None
