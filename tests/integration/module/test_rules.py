"""Rules for statements arrive with the live configuration, and their hits are reported."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, write_live_config
from tests.support.module.envoy import ModuleEnvoy, connect_logged_in, run_envoy, serve_ok
from tests.support.waiting import wait_until

LOG = {"name": "everything", "log": True}
BLOCK = {"name": "no-sleep", "pattern": r"sleep\(", "block": {}, "dry_run": True}


class RuledEnvoy:
    """An Envoy whose rules may change."""

    def __init__(self, proxy: ModuleEnvoy, endpoints: Path, node: Host) -> None:
        self.proxy, self._endpoints, self._node = proxy, endpoints, node

    def set_rules(self, *rules: dict[str, Any]) -> None:
        write_live_config(self._endpoints, [self._node], {"rules": list(rules)})

    async def reported_rules(self) -> set[str]:
        """Return the rules whose hits the module reports."""
        page = (await self.proxy.get("/stats/prometheus?filter=rule_hits")).text
        return set(re.findall(r'rule="([^"]+)"', page))

    async def rejections(self) -> str:
        return (await self.proxy.get("/stats/prometheus?filter=config_refusals")).text


@asynccontextmanager
async def run_ruled_envoy(directory: Path) -> AsyncIterator[RuledEnvoy]:
    async with run_fake_server(serve_ok) as server:
        endpoints, node = directory / "endpoints.json", Host(server.endpoint)
        async with run_envoy(directory, [node], ModuleConfig(endpoints=endpoints)) as proxy:
            yield RuledEnvoy(proxy, endpoints, node)


async def test_rules_take_effect_while_envoy_runs(tmp_path: Path) -> None:
    async with run_ruled_envoy(tmp_path) as envoy:
        assert await envoy.reported_rules() == set()
        envoy.set_rules(BLOCK, LOG)
        start = time.monotonic()

        async def are_reported() -> bool:
            return await envoy.reported_rules() == {"no-sleep", "everything"}

        await wait_until(are_reported)
        # The module reports once a second.
        assert time.monotonic() - start < 5.0
        page = (await envoy.proxy.get("/stats/prometheus?filter=rule_hits")).text
        assert set(re.findall(r'dry_run="([^"]+)"', page)) == {"false", "true"}


async def test_unusable_rules_leave_nodes_and_earlier_rules_in_force(tmp_path: Path) -> None:
    async with run_ruled_envoy(tmp_path) as envoy:
        for wrong in ({"name": "new", "colour": "red"}, LOG | {"pattern": "("}):
            envoy.set_rules(LOG, wrong)

            async def is_rejected(wrong: dict[str, Any] = wrong) -> bool:
                reason = "unknown field" if "colour" in wrong else "unclosed group"
                page = await envoy.rejections()
                return 'extension="rules"' in page and reason in page

            await wait_until(is_rejected)
        client = await connect_logged_in(envoy.proxy)
        client.writer.close()
        assert await envoy.reported_rules() == set()
