"""Settings of what Envoys record about statements."""

from __future__ import annotations

from typing import Literal

from controlplane.config.sql import EnvoyLogFile
from controlplane.config.types import SettingsSection, section, setting


class StatementLogSettings(SettingsSection):
    """A log of statements that are slow or have failed (module only).

    Tidevoy measures what clients see: from the arrival of the request to the last byte of the result.
    """

    path: EnvoyLogFile | None = setting(None)
    """File to which each Envoy writes the entries; default: no log."""
    format: Literal["json", "tidb"] = setting("json")
    """json: one line of JSON per statement. tidb: the format of TiDB's slow log, which TiDB and tools for
    slow logs read."""
    threshold: float = setting(0.3, unit="seconds", ge=0, le=3600)
    """Duration from which on a statement is slow; 0: all statements are logged."""
    sample: float = setting(1.0, ge=0, le=1)
    """Fraction of the slow statements that is logged, chosen at random. With a `threshold` of 0, it is a
    sample of all statements."""
    errors: bool = setting(False)
    """Whether all statements that end with an error are logged, whatever their duration and `sample`."""
    redact: bool = setting(True)
    """Whether the log shows normalized texts, in which literals are replaced, instead of the texts that
    clients send. Texts that may hold passwords or keys are normalized in any case."""
    max_bytes: int = setting(100 << 20, unit="bytes", ge=0, le=1 << 40)
    """Size at which the module rotates the file; 0: never. Standard output is not rotated."""
    keep: int = setting(5, ge=0, le=100)
    """Number of rotated files that are kept; their names end in `.1`, `.2` and so on."""


class StatementSettings(SettingsSection):
    """What Envoys record about statements (module only)."""

    log: StatementLogSettings = section(StatementLogSettings, "Log of slow and failed statements.")
