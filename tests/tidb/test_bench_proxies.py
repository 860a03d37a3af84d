"""The parts of `tidevoy bench proxies --backend tidb` that need real TiDB servers, in a short run."""

from __future__ import annotations

import pytest

from bench.proxies import drains
from bench.proxies.comparison import compare
from bench.proxies.contenders import TIDEVOY, standard_contenders
from bench.proxies.setup import prepare_setup
from bench.proxies.workloads import WORKLOADS, Encryption
from sandbox.tidb_binaries import TidbBinaries


@pytest.mark.timeout(900)  # the first build of the load client takes minutes
async def test_bench_compares_proxies_and_drains_a_server(tidb_bin: TidbBinaries) -> None:
    contenders = standard_contenders()
    workloads = [workload for workload in WORKLOADS if workload.encryption is not Encryption.CLIENTS][-2:]
    async with prepare_setup(tidb_bin) as bench:
        results = await compare(contenders, workloads, bench, blocks=3)
        tidevoy = next(workload for workload in contenders if workload.name == TIDEVOY)
        drain_result = await drains.measure(tidevoy, bench, sessions=50, drains=2, seconds=8.0)
    assert {workload.workload for workload in results} == {workload.name for workload in workloads}
    assert drain_result.per_second > 5
    assert 0 < drain_result.slowest < 5_000
