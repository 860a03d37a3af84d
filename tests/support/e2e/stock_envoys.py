"""Envoys without Tidevoy, for a comparison. Each balances by least connections and knows only its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports

_TCP_PROXY = "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"


@asynccontextmanager
async def run_stock_envoys(
    directory: Path, ports: Ports, nodes: Sequence[str], count: int
) -> AsyncIterator[list[int]]:
    """Run `count` Envoys. Yield their SQL ports."""
    sql_ports = [ports.allocate() for _ in range(count)]
    envoys = [
        EnvoyProcess(json.dumps(stock_bootstrap(port, nodes)), directory, name=f"stock-{number}")
        for number, port in enumerate(sql_ports, 1)
    ]
    try:
        await asyncio.gather(*(envoy.launch() for envoy in envoys))
        yield sql_ports
    finally:
        await asyncio.gather(*(envoy.kill() for envoy in envoys if envoy.is_running))


def stock_bootstrap(port: int, nodes: Sequence[str]) -> dict[str, Any]:
    """Return a plain configuration, as a user without Tidevoy would write it."""
    proxy = {"@type": f"type.googleapis.com/{_TCP_PROXY}", "stat_prefix": "sql", "cluster": "tidb"}
    filters = [{"name": "tcp_proxy", "typed_config": proxy}]
    endpoints = [{"endpoint": {"address": _socket_address(node)}} for node in nodes]
    return {
        "admin": {"address": _socket_address("127.0.0.1:0")},
        "static_resources": {
            "listeners": [
                {
                    "name": "sql",
                    "address": _socket_address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": filters}],
                }
            ],
            "clusters": [
                {
                    "name": "tidb",
                    "type": "STATIC",
                    "lb_policy": "LEAST_REQUEST",
                    "connect_timeout": "5s",
                    "load_assignment": {
                        "cluster_name": "tidb",
                        "endpoints": [{"lb_endpoints": endpoints}],
                    },
                }
            ],
        },
    }


def _socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
