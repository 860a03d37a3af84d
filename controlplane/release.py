"""The release of a TiDB server, out of the texts in which servers name it. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

_RELEASE_PATTERN = re.compile(r"(?:^|TiDB-)(v[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9})(?![0-9])")


@lru_cache(maxsize=1024)  # asked for every node in each decision, and there are few of them
def parse_release(version: str) -> str:
    """`v8.5.3` of `v8.5.3`, as PD has it, or of `8.0.11-TiDB-v8.5.3-alpha`, as servers greet; else empty.

    A server whose `server-version` is set may say anything: `8.0.11` alone is no release of TiDB.
    """
    match = _RELEASE_PATTERN.search(version)
    return match[1] if match is not None else ""
