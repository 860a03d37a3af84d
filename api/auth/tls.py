"""The TLS context of the REST server, reloaded when its files change."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import structlog

from api.auth.access_control import AccessController
from controlplane.config.api import ApiTls

log = structlog.get_logger("tidevoy.auth")

_POLL_SECONDS = 10.0


class ReloadingServerContext:
    """The TLS context for new connections. The config loader has already validated the files."""

    def __init__(self, files: ApiTls, access: AccessController) -> None:
        """Load the files. Raises OSError (of which ssl.SSLError is a subclass) if they cannot be read."""
        self._files, self._access = files, access
        self._stamps = self._file_stamps()
        self._context = _load_context(files)

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        # A reload may add or remove tokens; while any are configured, a client certificate is optional.
        if self._files.client_ca is not None:
            tokens_suffice = bool(self._access.api.tokens)
            self._context.verify_mode = ssl.CERT_OPTIONAL if tokens_suffice else ssl.CERT_REQUIRED
        return self._context

    async def reload_on_change(self) -> None:
        """Reload the files when they change, until cancelled. Invalid files leave the context unchanged."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            stamps = self._file_stamps()
            if stamps == self._stamps:
                continue
            self._stamps = stamps
            try:
                self._context = await asyncio.to_thread(_load_context, self._files)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                log.warning(
                    "cannot reload the REST API certificate; the previous one stays in use",
                    setting="api.tls",
                    error=reason,
                )
            else:
                log.info("reloaded the REST API certificate", setting="api.tls")

    def _file_stamps(self) -> list[tuple[int, int, int] | None]:
        files = (self._files.cert, self._files.key, self._files.client_ca)
        return [_file_stamp(file) for file in files if file is not None]


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load_context(files: ApiTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["http/1.1"])
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
    return context
