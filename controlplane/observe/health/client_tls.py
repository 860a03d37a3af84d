"""TLS client context for the nodes' status ports and for Prometheus, reloaded when its files change."""

from __future__ import annotations

import ssl
from pathlib import Path

from controlplane.config.settings import ClientTls
from controlplane.errors import ConfigError


class ReloadingClientContext:
    """A TLS context that reloads changed files: certificates are renewed more often than we restart."""

    def __init__(self, tls: ClientTls, key: str) -> None:
        """`key` is the path of `tls` in the configuration. Raises ConfigError if the files are unusable."""
        self._tls = tls
        try:
            self._loaded_stamps = self._file_stamps()
            self._context = _load_context(tls)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the configuration",
                key,
                f"the TLS files cannot be used ({error})",
                "name PEM files that belong together and that this user may read",
            ) from error

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection; it stays the previous one while the files are unusable."""
        try:
            stamps = self._file_stamps()
            if stamps != self._loaded_stamps:
                self._context = _load_context(self._tls)
                self._loaded_stamps = stamps
        except (OSError, ssl.SSLError):
            pass  # key and certificate are two files, only one is replaced yet; the next connection retries
        return self._context

    def _file_stamps(self) -> list[tuple[int, int]]:
        stats = [path.stat() for path in _tls_files(self._tls)]
        return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _tls_files(tls: ClientTls) -> list[Path]:
    return [path for path in (tls.ca, tls.cert, tls.key) if path is not None]


def _load_context(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
