"""Until when the certificates are good that the settings name, so that nobody learns it at night."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.config import certificate_checks
from controlplane.config.schema import dotted
from controlplane.config.settings import Settings

_Stamp = tuple[int, int, int]


class CertificateMetrics(Collector):
    """Reads the files when it is scraped, each anew only when it is another one."""

    def __init__(self, settings: Callable[[], Settings], registry: CollectorRegistry) -> None:
        self._settings = settings
        self._known: dict[Path, tuple[_Stamp, float]] = {}
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the files are not read before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One series a file; none for one that cannot be read."""
        expiry = GaugeMetricFamily(
            "tidevoy_certificate_expiry_timestamp_seconds",
            "When the certificate in the file of this setting ends, in Unix time; of a bundle the last one.",
            labels=["setting"],
        )
        for path, tls in certificate_checks.sections(self._settings()):
            ca_name, ca = certificate_checks.authority(tls)
            for name, file, last in (("cert", tls.cert, False), (ca_name, ca, True)):
                at = None if file is None else self._expiry(file, last=last)
                if at is not None:
                    expiry.add_metric([dotted((*path, name))], at)
        yield expiry

    def _expiry(self, file: Path, *, last: bool) -> float | None:
        try:
            state = file.stat()
            stamp = (state.st_ino, state.st_size, state.st_mtime_ns)
            past = self._known.get(file)
            if past is not None and past[0] == stamp:
                return past[1]
            found = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError, x509.InvalidVersion):
            return None
        # What is shown to others stands first, before its chain. Of a bundle a CA that is replaced may end.
        ends = [each.not_valid_after_utc.timestamp() for each in found]
        self._known[file] = stamp, max(ends) if last else ends[0]
        return self._known[file][1]
