"""Compare real proxies in a few slices. The tests check that the figures exist, but not their values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from bench.load_client import LoadTarget
from bench.programs import find_built_module
from bench.proxies.comparison import compare
from bench.proxies.contenders import (
    ENVOY,
    HAPROXY,
    TIDEVOY,
    Contender,
    ProxySite,
    RunningProxy,
    envoy_starter,
    standard_contenders,
)
from bench.proxies.latency_and_memory import QUANTILES, measure_added_latency, measure_memory
from bench.proxies.setup import ProxyBenchSetup, prepare_setup
from bench.proxies.workloads import WORKLOADS, Encryption
from bench.revisions import ModuleBuild
from tests.support.slow_relay import SlowStatementRelay

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),  # the first build of the load client takes minutes
]
BLOCKS = 3
RELAY_DELAY_SECONDS = 0.01
# One workload without TLS suffices, because it has all figures. Each TLS mode starts other proxies.
NAMES = ("300 new connections/s", "TLS to clients", "TLS to clients and server")


@asynccontextmanager
async def start_slow_relay(site: ProxySite) -> AsyncIterator[RunningProxy]:
    server = f"127.0.0.1:{site.backend.port}"
    async with SlowStatementRelay(server, b"SELECT", RELAY_DELAY_SECONDS) as relay:
        relay.is_slow = True
        yield RunningProxy(LoadTarget(int(relay.address.rpartition(":")[2])))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[ProxyBenchSetup]:
    async with prepare_setup() as setup:
        yield setup


async def test_measures_workloads_with_capable_proxies(bench: ProxyBenchSetup) -> None:
    workloads = [workload for workload in WORKLOADS if workload.name in NAMES]
    comparisons = await compare(standard_contenders(), workloads, bench, blocks=BLOCKS)
    for workload in workloads:
        own_comparisons = [comparison for comparison in comparisons if comparison.workload == workload.name]
        others = {TIDEVOY} if workload.encryption is not Encryption.NONE else {ENVOY, TIDEVOY}
        assert {comparison.contender for comparison in own_comparisons} == others
        figures = set(workload.figures) - (set() if workload.new_connections else {"new_connection"})
        assert {comparison.figure for comparison in own_comparisons} == figures
        assert {comparison.reference for comparison in own_comparisons} == {HAPROXY}
        assert all(comparison.value > 0 and comparison.reference_value > 0 for comparison in own_comparisons)


async def test_compares_another_build_of_the_module(
    bench: ProxyBenchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEVOY_TIDB_BIN", "/nowhere")  # tidevoy would reject it, so must not inherit it
    builds = [
        Contender(name, "", envoy_starter(ModuleBuild(find_built_module()))) for name in ("this", "other")
    ]
    comparisons = await compare(builds, WORKLOADS[:1], bench, blocks=BLOCKS)
    assert [(comparison.contender, comparison.reference) for comparison in comparisons] == [
        ("other", "this")
    ] * 3
    # With so few slices, the ratios depend on the other load of the machine.
    assert all(comparison.ratio.value > 0 for comparison in comparisons)


async def test_measures_added_latency_and_memory(bench: ProxyBenchSetup) -> None:
    contenders = [*standard_contenders(), Contender("slow relay", "", start_slow_relay)]
    latencies = await measure_added_latency(contenders, bench, counts=[4], blocks=BLOCKS)
    assert len(latencies) == len(contenders) * len(QUANTILES)
    assert all(latency.direct > 0 for latency in latencies)
    # What the proxies add is small: on a busy machine, it may be less than the noise.
    assert all(latency.added.value > 0 for latency in latencies if latency.contender == "slow relay")
    contenders.pop()
    held = await measure_memory(contenders, bench)
    assert list(held) == [HAPROXY, ENVOY, TIDEVOY]
    assert all(1 < kilobytes < 100 for kilobytes in held.values())
