"""Settings change under load, by reloads of a real control plane: no session and no login fails."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.packets import MySqlCommand
from tests.support.clients.server import PemFiles
from tests.support.e2e.cluster import counting_client, get_envoys, is_up_to_date, reload_settings, run_cluster
from tests.support.e2e.envoy_replacement import run_working_sessions, wait_for_statements
from tests.support.e2e.sql_load import run_short_sessions
from tests.support.tidb_sim_clients import error_code
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

SESSIONS = 12
_PROXY = "127.0.0.5/32"


def _changes(certificates: PemFiles) -> list[tuple[str, Any]]:
    """Return the changed settings, in order. Each keeps the previous ones."""
    certificate = {"cert": str(certificates.cert), "key": str(certificates.key)}
    return [
        ("sql.max_connections", 1000),
        ("sql.login_limits.max_logins", 500),
        ("sql.login_limits.max_logins_per_address", 400),
        ("sql.login_limits.max_bytes", 1 << 20),
        ("sql.login_limits.max_bytes_per_address", 1 << 19),
        ("sql.login_limits.max_decryptions_per_second", 100.0),
        ("sql.login_limits.max_decryptions_per_second_per_address", 50.0),
        ("sql.login_limits.shared_addresses", ["127.0.0.0/8"]),
        ("sql.idle_timeout", 600.0),
        ("sql.keepalive_idle", 30),
        ("sql.keepalive_interval", 5),
        ("sql.keepalive_probes", 4),
        ("sql.trusted_proxies", [_PROXY]),
        ("sql.proxy_protocol", "optional"),
        ("sql.compression", "passthrough"),
        ("backend.connect_timeout", 2.5),
        ("backend.max_connect_attempts", 5),
        ("backend.max_connections", 1000),
        ("backend.ejection_time", 2.0),
        ("backend.health_connections", False),
        ("backend.keepalive_idle", 30),
        ("backend.keepalive_interval", 5),
        ("backend.keepalive_probes", 4),
        ("migration.max_per_second", 100.0),
        ("migration.max_concurrent", 8),
        ("migration.max_state_bytes", 1 << 20),
        ("migration.max_total_state_bytes", 1 << 26),
        ("tls.client", {"mode": "optional", **certificate}),
        ("tls.client.min_version", "TLSv1.3"),
        ("tls.backend", {"mode": "preferred", "ca": str(certificates.ca), "verify": "ca"}),
        ("tls.backend.min_version", "TLSv1.3"),
        ("tls.allow_cleartext_backend", True),
        ("health.sql.fall", 4),  # a setting of the control plane
    ]


def _set(settings: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for name in sections:
        settings = settings.setdefault(name, {})
    settings[key] = value


async def _wait_applied(cluster: LocalCluster) -> None:
    await wait_until(lambda: is_up_to_date(cluster, "envoy-1"), 10)
    envoy = (await get_envoys(cluster))["envoy-1"]
    assert (envoy["stale_resources"], envoy["config_rejection"], envoy["last_nack"]) == ([], None, None)


async def test_each_setting_changes_under_load(tmp_path: Path, mariadb: MariaDb) -> None:
    certificates = PemFiles.create(tmp_path / "certificates")
    async with run_cluster(tmp_path, mariadb, nodes=3, arguments=certificates.arguments()) as cluster:
        first = {name: dict(cluster.control_plane.settings.get(name, {})) for name in ("sql", "drain")}
        async with (
            run_short_sessions(cluster.sql_port) as short,
            run_working_sessions(cluster.sql_port, SESSIONS) as (sessions, tasks),
        ):
            changed: dict[str, Any] = {name: dict(values) for name, values in first.items()}
            for path, value in _changes(certificates):
                _set(changed, path, value)
                result = await reload_settings(cluster, **changed)
                reported = [*result["applied"], *result["applied_by_module"]]
                assert any(name == path or name.startswith(f"{path}.") for name in reported), (path, result)
                assert (result["needs_new_envoys"], result["needs_restart"]) == ([], []), path
                await _wait_applied(cluster)
                await short.wait_for_attempts(4)
                await wait_for_statements(sessions, tasks, 2)
                assert short.failures() == [], path
            # New clients use the settings.
            context = ssl.create_default_context(cafile=str(certificates.ca))
            async with counting_client(cluster.sql_port) as client:
                assert error_code(await client.log_in(tls=context)) == 0
            # And back, all at once.
            empty: dict[str, Any] = {name: {} for name in ("backend", "migration", "tls", "health")}
            result = await reload_settings(cluster, **first, **empty)
            assert (result["needs_new_envoys"], result["needs_restart"]) == ([], [])
            await _wait_applied(cluster)
            await short.wait_for_attempts(20)
            await wait_for_statements(sessions, tasks)
            assert short.failures() == []
        print(f"\n{len(short.attempts)} short sessions")


async def test_migrations_begin_when_their_limit_is_raised(
    tmp_path: Path, mariadb: MariaDb, signing: SessionCertificate
) -> None:
    settings = {"migration": {"max_per_second": 0}, "rebalance": {"enabled": False}}
    async with (
        run_cluster(tmp_path, mariadb, nodes=2, arguments=signing.arguments, settings=settings) as cluster,
        counting_client(cluster.sql_port) as client,
    ):
        assert error_code(await client.log_in()) == 0
        nodes = await cluster.nodes()
        await wait_until(lambda: _has_sessions(cluster, 1))
        (address,) = [name for name, node in (await cluster.nodes()).items() if node["sessions"]]
        assert len(nodes) == 2
        (await cluster.api.post(f"/v1/nodes/{address}/drain")).raise_for_status()
        await wait_until(lambda: _has_state(cluster, address, "draining"))
        assert error_code(await client.send_command(MySqlCommand.QUERY, b"do 1")) == 0
        assert await _has_state(cluster, address, "draining")
        await reload_settings(cluster, migration={"max_per_second": 500})
        await wait_until(lambda: _has_state(cluster, address, "drained"))
        assert error_code(await client.send_command(MySqlCommand.QUERY, b"do 1")) == 0


async def _has_sessions(cluster: LocalCluster, count: int) -> bool:
    return sum(node["sessions"] or 0 for node in (await cluster.nodes()).values()) == count


async def _has_state(cluster: LocalCluster, address: str, state: str) -> bool:
    return (await cluster.states())[address] == state
