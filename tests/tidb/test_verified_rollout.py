"""A rollout of real TiDB servers replays captured reads on an upgraded server before clients see it.

A relay in front of the server answers one statement slowly.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.tidb_cluster import TidbCluster
from tests.support.e2e.restart_action import get_rollout, start_rollout, wait_for_phase, wait_for_rollout
from tests.support.slow_relay import SlowStatementRelay
from tests.support.tidb.sessions import connect_directly, query_rows
from tests.support.traffic.capture_writer import Capture
from tests.support.traffic.replay_program import require_replay_program
from tests.tidb.conftest import STACK_SETTINGS

SESSIONS, STATEMENTS = 4, 50  # of each digest in each session
DELAY_SECONDS = 0.03
MAX_RATIO = 5.0  # above what the relay adds to a fast statement
RELAY_HOST = "127.0.0.2"


def write_capture(directory: Path, database: str) -> None:
    """Write sessions that read single rows, and count rows."""
    capture = Capture()
    for number in range(SESSIONS * STATEMENTS):
        session = 1 + number % SESSIONS
        capture.add(session, f"select note from {database}.orders where id = {number % 100}")
        capture.add(session, f"select count(*) from {database}.orders where id < {number % 100}")
    capture.write(directory)


@pytest.mark.timeout(240)
async def test_server_that_answers_one_digest_slowly_stays_out_of_service(
    cluster: TidbCluster, database: str, tmp_path: Path
) -> None:
    require_replay_program()
    node = cluster.tidb[-1]
    with connect_directly(cluster.tidb[0], database) as root:
        query_rows(root, "create table orders (id int primary key, note varchar(20))")
        query_rows(root, "insert into orders values " + ", ".join(f"({id_}, 'a note')" for id_ in range(100)))
    write_capture(tmp_path / "captures" / "monday", database)
    verification = {"directory": str(tmp_path / "captures"), "user": "root", "warm_up": 20}
    # The server registers with the address of the relay.
    node.arguments = (*node.arguments, f"--advertise-address={RELAY_HOST}")
    await node.restart()
    address = f"{RELAY_HOST}:{node.port}"
    async with AsyncExitStack() as resources:
        relay = SlowStatementRelay(node.address, b"count(*)", DELAY_SECONDS, listen=address)
        status_relay = SlowStatementRelay(
            f"127.0.0.1:{node.status_port}", b"\0", 0.0, listen=f"{RELAY_HOST}:{node.status_port}"
        )
        await resources.enter_async_context(relay)
        await resources.enter_async_context(status_relay)
        stack = await resources.enter_async_context(
            LocalCluster.start(
                tmp_path / "stack",
                cluster=cluster,
                settings={**STACK_SETTINGS, "rollouts": {"verification": verification}},
            )
        )
        name = await start_rollout(
            stack.api,
            nodes=address,
            action="manual",
            version="",
            verify="replay:monday",
            verify_ratio=MAX_RATIO,
        )
        await wait_for_rollout(stack.api, name, lambda rollout: rollout["steps"][0]["stage"] == "returning")
        relays = (relay, status_relay)
        for each in relays:  # the server starts only if nothing else uses its ports
            await each.close()
        await node.restart()
        for each in relays:
            await each.open()
        relay.is_slow = True
        paused = await wait_for_phase(stack.api, name, "paused")
        assert "`select count ( ? ) from" in paused["reason"], paused["reason"]
        assert (await stack.states())[address] == "drained"
        report = (await stack.api.get(f"/v1/rollouts/{name}/verifications/{address}")).json()
        slow = [finding for finding in report["findings"] if finding["is_blocking"]]
        assert [finding["kind"] for finding in slow] == ["slower"], report["findings"]
        assert report["digests"][0]["digest"] == slow[0]["digest"]
        assert report["digests"][0]["new"]["median_us"] > DELAY_SECONDS * 1e6
        assert report["totals"]["differing_results"] == 0
        relay.is_slow = False
        (await stack.api.post(f"/v1/rollouts/{name}/resume")).raise_for_status()
        done = await wait_for_phase(stack.api, name, "done", "paused")
        assert done["phase"] == "done", done["reason"]
        assert (await get_rollout(stack.api, name))["steps"][0]["verification"] == "passed"
        assert (await stack.states())[address] == "active"
