"""TLS of the REST server: one context, whose files are read again when they change."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import structlog

from api.auth.access_control import AccessController
from controlplane.config.api import ApiTls

log = structlog.get_logger("tidevoy.doors")

_POLL_SECONDS = 10.0  # seconds


class ReloadingServerContext:
    """The context for connections to come. The files have been checked when the settings were read."""

    def __init__(self, files: ApiTls, access: AccessController) -> None:
        """OSError (ssl.SSLError too) when they cannot be read any more."""
        self._files, self._access = files, access
        self._stamps = self._file_stamps()
        self._context = _load_context(files)

    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        # Tokens may come and go by a reload; while there are any, a certificate is one way of two.
        if self._files.client_ca is not None:
            tokens_suffice = bool(self._access.api.tokens)
            self._context.verify_mode = ssl.CERT_OPTIONAL if tokens_suffice else ssl.CERT_REQUIRED
        return self._context

    async def reload_on_change(self) -> None:
        """Read the files again when they change, until cancelled. What cannot be used changes nothing."""
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
                log.warning("the old certificate of REST stays in use", setting="api.tls", error=reason)
            else:
                log.info("the certificate of REST was read again", setting="api.tls")

    def _file_stamps(self) -> list[tuple[int, int, int] | None]:
        files = (self._files.cert, self._files.key, self._files.client_ca)
        return [_file_stamp(file) for file in files if file is not None]


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _load_context(files: ApiTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["http/1.1"])
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
    return context
