"""A long run under load, with operations all the time: clients notice nothing, and no resource grows.

`make soak` runs it for 8 hours. `TIDEVOY_LONG_RUN_SECONDS` sets another time, `TIDEVOY_LONG_RUN_OUTPUT` the
directory for the samples (CSV) and the chart (SVG). `TIDEVOY_SEED` repeats the order of the operations.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.migration.differential import choose_seed
from tests.support.soak import SOAK
from tests.support.tidb.long_run import SESSIONS, Load, run_load
from tests.support.tidb.long_run_chart import write_chart
from tests.support.tidb.long_run_judgement import MIB, MIN_SECONDS, judge, new_series, warm_up_seconds
from tests.support.tidb.long_run_operations import Operations
from tests.support.tidb.long_run_samples import CONTROL_PLANE, ENVOY, Sampler, write_series
from tests.support.tidb.node_operations import migration_counts
from tests.support.waiting import wait_until

SECONDS = float(os.environ.get("TIDEVOY_LONG_RUN_SECONDS") or (28_800 if SOAK else 25))
_MAX_SAMPLES = 500
_PROGRESS_SECONDS = min(180.0, SECONDS / 5)
_MAX_NODE_SERIES = 90
"""What docs/operate/monitoring.md says about the size of a node's metrics."""
_MAX_SERIES_SECONDS = 30.0
_EXTRA_SECONDS = 900
"""For the start of the cluster, the last operation and the end."""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return the directory for the samples and the chart."""
    directory = Path(os.environ.get("TIDEVOY_LONG_RUN_OUTPUT") or tmp_path / "long-run").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.mark.timeout(SECONDS + _EXTRA_SECONDS)
async def test_long_run_is_invisible_to_clients_and_no_resource_grows(
    tmp_path: Path, cluster: TidbCluster, database: str, output: Path
) -> None:
    seed = choose_seed()
    print(f"long run: {SECONDS:.0f} s; samples and chart in {output}", flush=True)
    # The default settings, so sessions are rebalanced.
    async with LocalCluster.start(tmp_path / "stack", cluster=cluster) as stack:
        async with run_load(stack, database) as load:
            operations = Operations(stack, load, seed, SECONDS)
            sampler = Sampler(stack, load, operations, output, interval=max(1.0, SECONDS / _MAX_SAMPLES))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(sampler.run())
                    progress = tasks.create_task(report_progress(sampler, load, operations))
                    await operations.run()
                    migrations = (await migration_counts(stack)).items()
                    await check_removed_servers(sampler)
                    load.stopping.set()
                    progress.cancel()
            finally:
                write_series(output, sampler)
                if sampler.samples:
                    write_chart(output)
        moved = sum(count for (_, result, _), count in migrations if result == "moved")
        print(progress_line(sampler, load, operations), f"{moved} migrations", sep=", ", flush=True)
        assert stack.violations() == []
        assert stack.bugs() == []
    check_coverage(sampler, load, operations, moved)
    if SECONDS >= MIN_SECONDS:
        check_growth(sampler)


async def report_progress(sampler: Sampler, load: Load, operations: Operations) -> None:
    """Print a line every few minutes."""
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        print(progress_line(sampler, load, operations), flush=True)


def progress_line(sampler: Sampler, load: Load, operations: Operations) -> str:
    """Describe the run so far in one line."""
    sample = sampler.samples[-1]
    envoy, control_plane = (
        "none" if size is None else f"{size / MIB:.1f} MiB"
        for size in (sample.envoy_memory, sample.control_plane_memory)
    )
    return (
        f"long run: {operations.elapsed / 60:.1f} min, {len(operations.finished)} operations,"
        f" {load.statements} statements, {load.short_sessions} short sessions, {len(load.errors)} errors,"
        f" Envoy {envoy}, control plane {control_plane}"
    )


async def check_removed_servers(sampler: Sampler) -> None:
    """Check that the control plane has no series about removed servers, and an Envoy not too many of each."""

    async def are_gone() -> bool:
        await sampler.take()
        return not sampler.removed_series(CONTROL_PLANE)

    with suppress(TimeoutError):
        await wait_until(are_gone, _MAX_SERIES_SECONDS)
    assert sampler.removed_series(CONTROL_PLANE) == []
    count = Counter(re.findall(r'node="([^"]*)"', "".join(sampler.removed_series(ENVOY))))
    assert max(count.values(), default=0) <= _MAX_NODE_SERIES, count


def check_coverage(sampler: Sampler, load: Load, operations: Operations, moved: int) -> None:
    """Check that all operations ran under load, that sessions have migrated, and that the sampler works."""
    assert operations.missing == set()
    assert min(load.rounds) > 0
    assert load.short_sessions > SECONDS
    assert moved >= SESSIONS / 3
    samples = sampler.samples
    assert len(samples) >= 0.5 * min(SECONDS, _MAX_SAMPLES)
    last = samples[-1]
    for name in ("memory", "descriptors", "threads", "series", "log"):
        assert getattr(last, f"{ENVOY}_{name}"), (name, last)
        assert getattr(last, f"{CONTROL_PLANE}_{name}"), (name, last)
    assert last.state
    assert max(sample.envoy_sessions or 0 for sample in samples) >= SESSIONS


def check_growth(sampler: Sampler) -> None:
    """Check that nothing grows after the warm-up."""
    comparisons = judge(sampler)
    for comparison in comparisons:
        print(f"long run: {comparison}", flush=True)
    end = sampler.samples[-1].seconds
    for process in (ENVOY, CONTROL_PLANE):
        for name in new_series(sampler, process, warm_up_seconds(end)):
            print(f"long run: series of {process} since the warm-up: {name}", flush=True)
    assert [str(comparison) for comparison in comparisons if comparison.after > comparison.limit] == []
