"""Expiry times of certificates in `/metrics`, also after a file is replaced or deleted."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme
from prometheus_client import CollectorRegistry

from controlplane.config.settings import Settings
from controlplane.metrics.certificates import CertificateMetrics

EARLIER, LATER = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2030, 2035))


def test_certificate_expiry_follows_the_files(tmp_path: Path) -> None:
    ca, other_ca = trustme.CA(), trustme.CA()
    files = {name: tmp_path / name for name in ("cert", "key", "client_ca")}

    def replace_cert(not_after: datetime.datetime) -> None:
        leaf = ca.issue_cert("127.0.0.1", not_after=not_after)
        chain = b"".join([leaf.cert_chain_pems[0].bytes(), ca.cert_pem.bytes()])
        (tmp_path / "new").write_bytes(chain)
        (tmp_path / "new").replace(files["cert"])

    replace_cert(EARLIER)
    files["client_ca"].write_bytes(ca.cert_pem.bytes() + other_ca.cert_pem.bytes())
    registry = CollectorRegistry()
    settings = Settings.model_validate({"xds": {"tls": {name: str(path) for name, path in files.items()}}})
    CertificateMetrics(lambda: settings, registry)

    def expiry(setting: str) -> float | None:
        return registry.get_sample_value("tidevoy_certificate_expiry_timestamp_seconds", {"setting": setting})

    assert expiry("xds.tls.cert") == EARLIER.timestamp()
    bundle_expiry = expiry("xds.tls.client_ca")
    assert bundle_expiry is not None
    assert bundle_expiry > LATER.timestamp()
    replace_cert(LATER)
    assert expiry("xds.tls.cert") == LATER.timestamp()
    files["cert"].write_text("no certificate")
    assert expiry("xds.tls.cert") is None
    files["cert"].unlink()
    assert expiry("xds.tls.cert") is None
    assert expiry("xds.tls.client_ca") == bundle_expiry
