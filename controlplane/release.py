"""Parse the TiDB release out of the version texts that servers report. No I/O."""

from __future__ import annotations

import re
from functools import lru_cache

_RELEASE_PATTERN = re.compile(r"(?:^|TiDB-)(v[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9})(?![0-9])")


@lru_cache(maxsize=1024)  # called for every node in each planner run, with few distinct versions
def parse_release(version: str) -> str:
    """Return `v8.5.3` for `v8.5.3` (from PD) or `8.0.11-TiDB-v8.5.3-alpha` (from a greeting); else empty.

    A server with `server-version` set may report anything: `8.0.11` alone is not a release of TiDB.
    """
    match = _RELEASE_PATTERN.search(version)
    return match[1] if match is not None else ""
