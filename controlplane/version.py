"""The version of this control plane, and the versions that Envoy modules and TiDB servers report. No I/O."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version

VERSION = version("tidevoy")

_RELEASE_PATTERN = re.compile(r"(?:^|TiDB-)(v[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9})(?![0-9])")


def is_compatible(module_version: str) -> bool:
    """Return whether a module of this version has the major and minor version of this control plane."""
    return module_version.split(".")[:2] == VERSION.split(".")[:2]


@lru_cache(maxsize=1024)  # each planner run parses the versions of all nodes; most are equal
def parse_release(version: str) -> str:
    """Return the TiDB release in a version text, or an empty string if there is none.

    The release in `v8.5.3` (from PD) and `8.0.11-TiDB-v8.5.3-alpha` (from a greeting) is `v8.5.3`. If TiDB's
    `server-version` is set, the text may be anything; `8.0.11` alone is not a release of TiDB.
    """
    match = _RELEASE_PATTERN.search(version)
    return match[1] if match is not None else ""
