"""Rules for statements: no statement that a rule blocks reaches a node, however a client sends it.

With TIDEVOY_SOAK=1, clients send 100,000 requests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import run_envoy, with_timeout
from tests.support.module.statement_rules import (
    BLOCK_FORBIDDEN,
    QUERY_ATTRIBUTES,
    RecordingNode,
    StatementGenerator,
    run_round,
)
from tests.support.soak import SOAK
from tests.support.tidb_sim_clients import CAPABILITIES

_REQUESTS = 100_000 if SOAK else 3_000
_CLIENTS = 4


@pytest.mark.timeout(900 if SOAK else 120)
@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "query attributes"])
async def test_no_forbidden_statement_reaches_the_node(tmp_path: Path, attributes: bool) -> None:
    node = RecordingNode(attributes=attributes)
    config = ModuleConfig(live_settings={"rules": [BLOCK_FORBIDDEN]})
    async with (
        run_fake_server(node.handler) as server,
        run_envoy(tmp_path, [server.endpoint], config) as envoy,
    ):

        async def run_client(number: int) -> int:
            client = await envoy.connect()
            capabilities = CAPABILITIES | QUERY_ATTRIBUTES if attributes else CAPABILITIES
            assert (await with_timeout(client.login(capabilities)))[0] == 0
            huge = 1 / 2_000 if SOAK else 1 / 500
            generator = StatementGenerator(number, attributes=attributes, huge=huge)
            sent = 0
            while sent < _REQUESTS / _CLIENTS:
                sent += await run_round(client, generator)
            return sent

        sent = sum(await asyncio.gather(*(run_client(number) for number in range(_CLIENTS))))
        arrived = [payload for payload in node.requests if b"forbidden_" in payload.lower()]
        print(f"{sent} requests, {len(node.requests)} with statements have arrived")
        assert not arrived, arrived[:3]
        assert len(node.requests) > sent / 4
