"""The sandbox starts, kills and restarts etcd, MariaDB and Envoy, and reports their failures."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path

import httpx2
import pymysql
import pytest
import trustme

from sandbox.child_process import ProcessFailed
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd, EtcdCluster, EtcdPorts, EtcdTls
from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from tests.conftest import StartEnvoy

BOOTSTRAP = """
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  clusters:
  - name: away
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: away
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9}}}
        - endpoint: {address: {socket_address: {address: "::1", port_value: 9}}}
"""


async def _version(url: str, verify: ssl.SSLContext | bool = False) -> str:
    async with httpx2.AsyncClient(trust_env=False, verify=verify) as client:
        version: dict[str, str] = (await client.get(f"{url}/version")).raise_for_status().json()
        return version["etcdserver"]


async def _revision(url: str) -> int:
    async with http_client(timeout=20.0) as client:
        page = (await client.post(f"{url}/v3/kv/range", json={"key": "YQ=="})).raise_for_status().json()
        return int(page["header"]["revision"])


async def _put(url: str) -> None:
    async with http_client(timeout=20.0) as client:
        (await client.post(f"{url}/v3/kv/put", json={"key": "YQ==", "value": "Yg=="})).raise_for_status()


async def _wait_serving(etcd: Etcd) -> None:
    async with asyncio.timeout(30):
        while not await etcd.is_serving():  # noqa: ASYNC110 - another process: there is no event to wait for
            await asyncio.sleep(0.05)


async def test_etcd_keeps_port_and_data_across_kill(etcd: Etcd) -> None:
    await _put(etcd.url)
    before, url = await _revision(etcd.url), etcd.url
    await etcd.kill()
    assert etcd.process.returncode == -signal.SIGKILL
    with pytest.raises(httpx2.ConnectError):
        await _revision(url)
    await etcd.restart()
    assert etcd.url == url
    assert await _revision(url) == before


async def test_etcd_cluster_survives_loss_of_one_member_only(tmp_path: Path) -> None:
    async with EtcdCluster(tmp_path) as cluster:
        await cluster.members[0].kill()
        await _wait_serving(cluster.members[1])  # The killed member may have been the leader.
        await _put(cluster.urls[1])
        assert await _revision(cluster.urls[2]) == 2
        await cluster.members[1].kill()
        assert not await cluster.members[2].is_serving()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.members[0].restart())
            tasks.create_task(cluster.members[1].restart())
        assert await _revision(cluster.urls[0]) == 2


async def test_etcd_with_tls_requires_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client.example")
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "key.pem").write_bytes(server.private_key_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in server.cert_chain_pems))
    tls = EtcdTls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    async with Etcd.start(tmp_path / "etcd", tls=tls) as etcd:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with pytest.raises((httpx2.TransportError, ssl.SSLError)):
            await _version(etcd.url, context)
        client.configure_cert(context)
        assert (await _version(etcd.url, context)).startswith("3.")


async def test_etcd_reports_port_conflict(tmp_path: Path, etcd: Etcd) -> None:
    clash = Etcd(tmp_path / "other", EtcdPorts(etcd.port, 1, 1), name="clash")
    with pytest.raises(ProcessFailed, match=f"clash cannot start: port {etcd.port} is taken"):
        await clash.launch()
    assert not clash.is_running


async def test_mariadb_serves_port_and_socket(mariadb: MariaDb, database: str) -> None:
    by_port = pymysql.connect(user="root", database=database, host="127.0.0.1", port=mariadb.port)
    by_socket = pymysql.connect(user="root", database=database, unix_socket=str(mariadb.socket))
    for connection in (by_port, by_socket):
        with connection, connection.cursor() as cursor:
            cursor.execute("select database()")
            assert cursor.fetchone() == (database,)


async def test_mariadb_keeps_data_across_restart(tmp_path: Path) -> None:
    async with MariaDb.start(tmp_path) as mariadb:
        with pymysql.connect(user="root", host="127.0.0.1", port=mariadb.port) as connection:
            connection.query("create database kept")
        await mariadb.restart()
        with pymysql.connect(user="root", host="127.0.0.1", port=mariadb.port, database="kept"):
            pass
        await mariadb.kill()
        assert not mariadb.is_running


async def test_envoy_returns_stats_and_hosts(envoy_process: StartEnvoy) -> None:
    first, second = await envoy_process(BOOTSTRAP), await envoy_process(BOOTSTRAP)
    assert first.admin_url != second.admin_url
    assert await first.is_live()
    assert (await first.stats("^server.live$")) == {"server.live": 1}
    assert set(await first.hosts("away")) == {"127.0.0.1:9", "[::1]:9"}
    assert await first.hosts("unknown") == {}
    await first.kill()
    await first.restart()
    assert await first.is_live()


async def test_envoy_failure_quotes_its_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"(?s)envoy did not start: .*no such field: 'nonsense'"):
        await EnvoyProcess("nonsense: 1", tmp_path).launch()
