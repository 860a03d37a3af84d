"""Certificate files that are loaded again when they change, without a restart."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from controlplane.clock import Clock
from controlplane.config import certificate_checks, schema
from controlplane.config.api import ApiTls
from controlplane.config.own_tls import ClientTls, ServerTls
from controlplane.errors import ConfigError

CHECK_INTERVAL_SECONDS = 1.0
# Unusable files are reported again after this time, because the certificates in use will expire, and metrics
# show only the expiry of the certificates in the files.
_REMINDER_SECONDS = 3600.0

OnEvent = Callable[[str, str, str], None]
Loaded = TypeVar("Loaded")


class ReloadingCertificates(Generic[Loaded]):
    """The certificates loaded from the TLS files of one settings section.

    While the files are unusable, the previous certificates stay in use, and `problem` describes the fault.
    """

    def __init__(
        self,
        path: schema.SettingPath,
        tls: ClientTls | ServerTls | ApiTls,
        load: Callable[[], Loaded],
        clock: Clock,
        on_event: OnEvent,
    ) -> None:
        """`path` is the settings path of `tls`; `on_event` gets kind, subject and message.

        `load` reads the files, possibly in another thread. Raises ConfigError if the files are unusable.
        """
        _, ca = certificate_checks.ca_setting(tls)
        self._files = [file for file in (tls.cert, tls.key, ca) if file is not None]
        self._path, self._tls, self._load = path, tls, load
        self._clock, self._on_event = clock, on_event
        self.problem = ""
        self._last_failure = ""
        self._reported_at = 0.0
        for fault in certificate_checks.check_section(path, tls):
            key = schema.format_path(fault.path)
            raise ConfigError("the configuration", key, fault.problem, fault.remedy)
        self._digests = _digests(self._files)
        self._current = load()

    def current(self) -> Loaded:
        """Return the last result of `load`, for a new connection. May be called in any thread."""
        return self._current

    async def watch(self) -> None:
        """Check the files periodically until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Load the files if they have changed and are usable; else report the problem."""
        section, subject = str(self._path[0]), schema.format_path(self._path)
        loaded = await asyncio.to_thread(self._load_if_changed)
        if isinstance(loaded, str):
            # Certificate and key are replaced one after the other, and do not match in between, so a failure
            # is reported only if the next check finds it again.
            now = self._clock()
            is_due = loaded != self.problem or now >= self._reported_at + _REMINDER_SECONDS
            if loaded == self._last_failure and is_due:
                self.problem, self._reported_at = loaded, now
                message = f"the old certificates stay in use: {loaded}"
                self._on_event(f"{section}.certificates_rejected", subject, message)
            self._last_failure = loaded
            return
        if loaded is not None:
            self._digests, self._current = loaded
            message = "new connections use the new certificates"
            self._on_event(f"{section}.certificates_reloaded", subject, message)
        self.problem = self._last_failure = ""

    def _load_if_changed(self) -> tuple[list[bytes], Loaded] | str | None:
        """Return (digests, loaded value), why the files are unusable, or None if there is nothing new."""
        try:
            digests = _digests(self._files)
            if digests == self._digests:
                return None
            if faults := certificate_checks.check_section(self._path, self._tls):
                return "; ".join(f"{fault.problem}; {fault.remedy}" for fault in faults)
            loaded = self._load()
            # `load` has read the files again, so its result counts only if no file has changed meanwhile.
            if _digests(self._files) != digests:
                return "the files changed while they were loaded"
            return digests, loaded
        except OSError as error:
            return f"{error.filename or 'a file'} cannot be read: {error.strerror}"


def _digests(files: list[Path]) -> list[bytes]:
    return [hashlib.sha256(file.read_bytes()).digest() for file in files]
