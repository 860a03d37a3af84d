"""Marks tests that mostly wait (for leases, nodes or builds), which run in a second process.

`make test` runs `pytest -m slow` and `pytest -m "not slow"` at the same time; `pytest` alone runs all of
them one after the other. The marked tests tolerate a slow machine; tests that measure durations do not belong
here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW_MARK = "slow"
_TESTS = Path(__file__).parents[1]
FILES = frozenset(
    {
        "e2e/clients/test_matrix.py",
        "e2e/console/test_browser.py",
        "e2e/deploy/test_compose.py",
        "e2e/envoy_replacement/test_accept_queue.py",
        "e2e/envoy_replacement/test_replacement.py",
        "e2e/rollouts/test_killed_leader.py",
        "e2e/rollouts/test_rollouts.py",
        "e2e/sandbox/test_run.py",
        "integration/api/test_auth.py",
        "integration/api/test_rate_limits.py",
        "integration/api/test_rollouts.py",
        "integration/api/test_schemathesis.py",
        "integration/api/test_tls.py",
        "integration/bench/test_load_client.py",
        "integration/bench/test_proxies.py",
        "integration/cli/test_auth.py",
        "integration/cli/test_rollouts.py",
        "integration/console/test_pages.py",
        "integration/engine/test_rollouts.py",
        "integration/etcd/test_client.py",
        "integration/module/test_silent_but_reachable.py",
        "integration/observe/test_pd_discovery.py",
        "integration/replicas/test_failover.py",
        "integration/replicas/test_failover_processes.py",
        "integration/replicas/test_peer_sync.py",
        "integration/replicas/test_peer_sync_tls.py",
        "integration/replicas/test_plan_replication.py",
        "integration/replicas/test_processes.py",
        "integration/replicas/test_replica_set.py",
        "integration/rollouts/test_actions.py",
        "integration/rollouts/test_login_probe.py",
        "integration/sandbox/test_install.py",
        "integration/sandbox/test_servers.py",
        "integration/storage/test_etcd_store.py",
    }
)


def mark_slow_tests(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow files."""
    for item in items:
        if item.path.relative_to(_TESTS).as_posix() in FILES:
            item.add_marker(SLOW_MARK)
