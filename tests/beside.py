"""Tests that mostly wait, for leases to end, nodes to come back, or clients to be built: in a second process.

`make test` runs `pytest -m beside` and `pytest -m "not beside"` at the same time; `pytest` alone runs all of
them in turn. These bear to be slowed down; tests of how long something takes do not belong here.
"""

from __future__ import annotations

import pytest

MARK = "beside"
_MODULES = frozenset(
    {
        "test_api_rollouts",
        "test_bench_load_client",
        "test_bench_proxies",
        "test_cli_rollouts",
        "test_client_matrix",
        "test_compose",
        "test_console",
        "test_doors",
        "test_doors_limits",
        "test_doors_session",
        "test_doors_tls",
        "test_engine_rollouts",
        "test_etcd_client",
        "test_failover",
        "test_failover_processes",
        "test_install",
        "test_mesh",
        "test_mesh_tls",
        "test_module_vanish_not",
        "test_pd",
        "test_recycle",
        "test_recycle_queue",
        "test_replicas",
        "test_replicas_plan",
        "test_replicas_processes",
        "test_rollout_actions",
        "test_rollout_login",
        "test_rollouts",
        "test_rollouts_killed",
        "test_run",
        "test_sandbox_servers",
        "test_schemathesis",
        "test_shared_store",
    }
)


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of these files."""
    for item in items:
        if item.path.stem in _MODULES and item.path.parent.name != "unit":
            item.add_marker(MARK)
