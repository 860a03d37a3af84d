"""Proxies are compared as `tidevoy bench proxies` does it, with real ones, in a few slices.

That there are figures, not what they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.proxies import added_latency, memory
from bench.proxies.command import ProxyBenchSetup, prepare_setup
from bench.proxies.comparison import compare
from bench.proxies.contenders import (
    ENVOY,
    HAPROXY,
    TIDEVOY,
    Contender,
    ModuleBuild,
    direct_contender,
    envoy_starter,
    find_built_module,
    standard_contenders,
)
from bench.proxies.workloads import WORKLOADS, Encryption

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),  # the first build of the load client takes minutes
]
BLOCKS = 3
NAMES = ("point select, 4,000/s", "300 new connections/s", "TLS to clients", "TLS to clients and server")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[ProxyBenchSetup]:
    async with prepare_setup() as made:
        yield made


async def test_workloads_are_measured_with_all_proxies_that_can_end_their_tls(bench: ProxyBenchSetup) -> None:
    workloads = [each for each in WORKLOADS if each.name in NAMES]
    found = await compare(
        standard_contenders(), workloads, bench.site, bench.client, bench.pinning, blocks=BLOCKS
    )
    for workload in workloads:
        here = [each for each in found if each.workload == workload.name]
        others = {TIDEVOY} if workload.encryption is not Encryption.NONE else {ENVOY, TIDEVOY}
        assert {each.contender for each in here} == others
        figures = set(workload.figures) - (set() if workload.new_connections else {"new_connection"})
        assert {each.figure for each in here} == figures
        assert {each.reference for each in here} == {HAPROXY}
        assert all(each.value > 0 and each.reference_value > 0 for each in here)


async def test_another_build_of_the_module_is_a_contender(
    bench: ProxyBenchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEVOY_TIDB_BIN", "/nowhere")  # tidevoy refuses it as a setting
    builds = [
        Contender(name, "", envoy_starter(ModuleBuild(find_built_module()))) for name in ("this", "other")
    ]
    found = await compare(builds, WORKLOADS[:1], bench.site, bench.client, bench.pinning, blocks=BLOCKS)
    assert [(each.contender, each.reference) for each in found] == [("other", "this")] * 3
    assert all(0.5 < each.ratio.value < 2 for each in found)


async def test_a_proxy_adds_to_latency_and_needs_memory(bench: ProxyBenchSetup) -> None:
    contenders = standard_contenders()
    parts = (bench.site, bench.client, bench.pinning)
    latencies = await added_latency.measure(
        direct_contender(bench.site.backend), contenders, *parts, counts=[4], blocks=BLOCKS
    )
    assert len(latencies) == len(contenders) * len(added_latency.QUANTILES)
    medians = [each for each in latencies if each.quantile == 0.5]
    assert all(each.direct > 0 and each.added.value > 0 for each in medians)
    held = await memory.measure(contenders, *parts)
    assert list(held) == [HAPROXY, ENVOY, TIDEVOY]
    assert all(1 < kilobytes < 100 for kilobytes in held.values())
