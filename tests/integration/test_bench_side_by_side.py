"""One round of proxies side by side, with real ones: that there are figures, not what they are."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.comparison import FIGURES
from bench.costs import CannotCount, SystemCalls
from bench.machine import Machine
from bench.peers import AGAIN, DIRECT, REFERENCE, TIDEVOY, ours
from bench.side_by_side import Plan, document, measure
from bench.workloads import chosen
from sandbox.process import Process

PEERS = (DIRECT, REFERENCE, AGAIN, TIDEVOY)


@pytest.mark.timeout(900)  # the first build of the load client takes minutes
@pytest.mark.parametrize("name", ["point select, text", "point select, TLS to clients"])
async def test_a_workload_is_measured_with_real_proxies(name: str) -> None:
    workload = chosen([name], [1])[0]
    tables: list[dict[str, Any]] = []
    peers = [peer for peer in ours() if peer.name in PEERS]
    await measure(Plan([workload], peers, rounds=1, seconds=1.0), tables.append)

    [table] = json.loads(json.dumps(document(Machine.here(), tables)))["tables"]
    assert (table["workload"], table["threads"], table["workers"]) == (name, workload.threads, 1)
    assert (table["reference"], table["again"], table["rounds"]) == (REFERENCE, AGAIN, 1)
    measured = {peer["name"]: peer for peer in table["peers"]}
    assert tuple(measured) == PEERS
    assert set(measured[DIRECT]["figures"]) == {"qps", "p95_ms", "machine_us"}
    for proxy in PEERS[1:]:
        figures = measured[proxy]["figures"]
        # Of a short run the kernel may see no tick, and not everybody may count system calls.
        optional = {"user_us", "system_us", "system_calls", "connection_kb", "kept"}
        assert {figure for figure, _, _ in FIGURES} - optional <= set(figures)
        assert all(spread["min"] == spread["median"] == spread["max"] >= 0 for spread in figures.values())
        assert figures["cpu_us"]["median"] < figures["machine_us"]["median"]
        assert measured[proxy]["ratios"]["cpu_us"]["median"] > 0
    assert [target["figure"] for target in table["targets"]] == [target.figure for target in workload.targets]
    assert {target["verdict"] for target in table["targets"]} <= {"met", "missed", "undecided"}


async def test_the_system_calls_of_a_process_are_counted(tmp_path: Path) -> None:
    # It waits for somebody to write there, makes its calls, and ends.
    told = tmp_path / "told"
    os.mkfifo(told)
    program = f"import os; open({str(told)!r}).read(); [os.getppid() for _ in range(20_000)]"
    child = Process.start("child", [sys.executable, "-c", program], directory=tmp_path)
    try:
        async with asyncio.timeout(20), SystemCalls([child.pid], tmp_path) as calls:
            await asyncio.to_thread(told.write_text, "")
            assert await child.wait() == 0
    except CannotCount as problem:
        pytest.skip(str(problem))
    finally:
        await child.kill()
    # The interpreter makes some itself when it starts and ends.
    assert 20_000 <= calls.count < 25_000
