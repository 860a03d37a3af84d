"""Settings of the statistics of statements."""

from __future__ import annotations

from typing import Literal

from controlplane.config.types import SettingsSection, setting


class StatementSettings(SettingsSection):
    """Statistics of SQL statements: `tidevoy top`, the console, and `GET /v1/statements`.

    Envoys with the module compute TiDB's digest of each statement. Statements are shown without their values.
    """

    digests: Literal["on", "off"] = setting("off", takes_effect="now with the module")
    """on: Envoys collect statistics by digest, user and node, and report them. Turning it off deletes the
    statistics."""
    max_rows: int = setting(500, takes_effect="now with the module", ge=10, le=5000)
    """Rows in a report of an Envoy: combinations of digest, user and node, those with the most time. The rest
    is reported as one row per node."""
    interval: float = setting(5.0, takes_effect="now with the module", unit="seconds", ge=1, le=60)
    """Time between two reports of an Envoy."""
    metrics_digests: int = setting(20, ge=0, le=50)
    """Number of digests that `GET /metrics` shows, those with the most time."""

    @property
    def is_on(self) -> bool:
        return self.digests == "on"
