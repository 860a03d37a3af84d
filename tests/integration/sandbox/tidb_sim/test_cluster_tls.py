"""Cluster TLS of a simulated server: PD and the status port both require client certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import trustme

from controlplane.config.own_tls import ClientTls
from controlplane.etcd.client import EtcdClient
from sandbox.etcd import Etcd, EtcdTls
from sandbox.mariadb import MariaDb
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings


@dataclass(frozen=True)
class Files:
    """PEM files of a CA, and of a certificate and its key for 127.0.0.1."""

    ca: Path
    cert: Path
    key: Path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    certificate_files = Files(*(tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")))
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(certificate_files.ca)
    issued.cert_chain_pems[0].write_to_path(certificate_files.cert)
    issued.private_key_pem.write_to_path(certificate_files.key)
    return certificate_files


async def test_cluster_tls_covers_pd_and_the_status_port(
    mariadb: MariaDb, tmp_path: Path, files: Files
) -> None:
    tls = ClientTls.model_validate({"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)})
    async with Etcd.start(tmp_path / "etcd", tls=EtcdTls(files.cert, files.key, files.ca)) as etcd:
        rules = SessionRules(str(mariadb.socket))
        async with TidbSim(SimSettings(rules, pd=(etcd.url,), cluster_tls=tls)) as sim:
            async with EtcdClient([etcd.url], tls=tls) as client:
                assert len((await client.range(f"/topology/tidb/{sim.node.name}/")).entries) == 2
            context = ssl.create_default_context(cafile=files.ca)
            url = f"https://{sim.status_address}/status"
            async with httpx2.AsyncClient(verify=context) as http:
                with pytest.raises(httpx2.TransportError):
                    await http.get(url)
            context.load_cert_chain(files.cert, files.key)
            async with httpx2.AsyncClient(verify=context) as http:
                assert (await http.get(url)).json()["version"] == "8.0.11-TiDB-v8.5.3"
