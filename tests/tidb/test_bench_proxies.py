"""The parts of `tidevoy bench proxies --backend tidb` that only real TiDB servers can show, made short."""

from __future__ import annotations

import pytest

from bench.proxies import drains
from bench.proxies.command import prepare_setup
from bench.proxies.comparison import compare
from bench.proxies.contenders import TIDEVOY, standard_contenders
from bench.proxies.workloads import WORKLOADS, Encryption
from sandbox.tidb_binaries import TidbBinaries


@pytest.mark.timeout(900)  # the first build of the load client takes minutes
async def test_proxies_are_compared_and_a_server_is_drained(tidb_bin: TidbBinaries) -> None:
    contenders = standard_contenders()
    workloads = [each for each in WORKLOADS if each.encryption is not Encryption.CLIENTS][-2:]
    async with prepare_setup(tidb_bin) as bench:
        found = await compare(contenders, workloads, bench.site, bench.client, bench.pinning, blocks=3)
        tidevoy = next(each for each in contenders if each.name == TIDEVOY)
        moves = await drains.measure(
            tidevoy, bench.site, bench.client, bench.pinning, sessions=50, drains=2, seconds=8.0
        )
    assert {each.workload for each in found} == {each.name for each in workloads}
    assert moves.per_second > 5
    assert 0 < moves.slowest < 5_000
