"""Until when certificates are good, as `/metrics` shows it, also when a file is replaced or goes."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme
from prometheus_client import CollectorRegistry

from controlplane.config.settings import Settings
from controlplane.metrics.certificates import CertificateMetrics

SOON, LATE = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2030, 2035))


def test_the_end_of_each_certificate_is_shown(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    files = {name: tmp_path / name for name in ("cert", "key", "client_ca")}

    def put(until: datetime.datetime) -> None:
        leaf = first.issue_cert("127.0.0.1", not_after=until)
        chain = b"".join([leaf.cert_chain_pems[0].bytes(), first.cert_pem.bytes()])
        (tmp_path / "new").write_bytes(chain)
        (tmp_path / "new").replace(files["cert"])

    put(SOON)
    files["client_ca"].write_bytes(first.cert_pem.bytes() + second.cert_pem.bytes())
    registry = CollectorRegistry()
    settings = Settings.model_validate({"xds": {"tls": {name: str(path) for name, path in files.items()}}})
    CertificateMetrics(lambda: settings, registry)

    def shown(setting: str) -> float | None:
        return registry.get_sample_value("tidevoy_certificate_expiry_timestamp_seconds", {"setting": setting})

    assert shown("xds.tls.cert") == SOON.timestamp()
    bundle = shown("xds.tls.client_ca")
    assert bundle is not None
    assert bundle > LATE.timestamp()
    put(LATE)
    assert shown("xds.tls.cert") == LATE.timestamp()
    files["cert"].write_text("no certificate")
    assert shown("xds.tls.cert") is None
    files["cert"].unlink()
    assert shown("xds.tls.cert") is None
    assert shown("xds.tls.client_ca") == bundle
