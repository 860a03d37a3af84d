"""Prometheus metrics: expiry times of the certificates in the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.config import certificate_checks
from controlplane.config.schema import format_path
from controlplane.config.settings import Settings

_FileFingerprint = tuple[int, int, int]


class CertificateMetrics(Collector):
    """Collects expiry times at each scrape. A file is parsed again only if it changed."""

    def __init__(self, settings: Callable[[], Settings], registry: CollectorRegistry) -> None:
        self._settings = settings
        self._expiry_cache: dict[Path, tuple[_FileFingerprint, float]] = {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield one series per readable certificate file."""
        expiry = GaugeMetricFamily(
            "tidevoy_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate of this setting expires; for a bundle, the latest expiry.",
            labels=["setting"],
        )
        for path, tls in certificate_checks.tls_sections(self._settings()):
            ca_name, ca = certificate_checks.ca_setting(tls)
            for name, file, is_bundle in (("cert", tls.cert, False), (ca_name, ca, True)):
                expires_at = None if file is None else self._expiry(file, is_bundle=is_bundle)
                if expires_at is not None:
                    expiry.add_metric([format_path((*path, name))], expires_at)
        yield expiry

    def _expiry(self, file: Path, *, is_bundle: bool) -> float | None:
        try:
            file_stat = file.stat()
            fingerprint = (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns)
            cached = self._expiry_cache.get(file)
            if cached is not None and cached[0] == fingerprint:
                return cached[1]
            certs = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError, x509.InvalidVersion):
            return None
        # The leaf certificate comes first in a chain. A bundle may contain an expiring CA and its successor.
        expiry_times = [cert.not_valid_after_utc.timestamp() for cert in certs]
        self._expiry_cache[file] = fingerprint, max(expiry_times) if is_bundle else expiry_times[0]
        return self._expiry_cache[file][1]
