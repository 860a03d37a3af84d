"""Our side of TLS to the nodes' status ports, from files that may be replaced while we run."""

from __future__ import annotations

import ssl
from pathlib import Path

from controlplane.config.settings import ClientTls
from controlplane.errors import ConfigError


class ReloadingClientContext:
    """A TLS context that follows its files: certificates are renewed more often than we are restarted."""

    def __init__(self, tls: ClientTls, key: str) -> None:
        """`key` is the path of these settings in the configuration. ConfigError: unusable files."""
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
        """The context for a new connection. Files that cannot be used now leave the former one in force."""
        try:
            stamps = self._file_stamps()
            if stamps != self._loaded_stamps:
                self._context = _load_context(self._tls)
                self._loaded_stamps = stamps
        except (OSError, ssl.SSLError):
            pass  # half replaced: key and certificate are two files; the next connection looks again
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
