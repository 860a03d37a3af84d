"""Finds settings of a TiDB server that prevent its sessions from migrating to other nodes. No I/O.

The input is the configuration of the server as JSON, the response to `GET /config` on the status port
(pingcap/tidb pkg/server/http_status.go, pkg/config/config.go).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from controlplane.model.health import CANNOT_MIGRATE

# A server that is stopped must keep serving for this many intervals of status checks, so that the checks
# detect the stop and its sessions migrate. At most `_MAX_REQUIRED_WAIT_SECONDS` are required.
_MIN_CHECKS_BEFORE_STOP = 3
_MAX_REQUIRED_WAIT_SECONDS = 30

_CERT_SETTING, _KEY_SETTING = "session-token-signing-cert", "session-token-signing-key"


def find_migration_blockers(config: bytes, check_interval: float) -> tuple[str, ...] | None:
    """Return the migration blockers, one sentence each; None if `config` is not a configuration of TiDB.

    `check_interval`: seconds between two status checks.
    """
    try:
        document = json.loads(config)
        security, wait = document["security"], document.get("graceful-wait-before-shutdown")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(security, dict):
        return None
    required_wait = min(math.ceil(_MIN_CHECKS_BEFORE_STOP * check_interval), _MAX_REQUIRED_WAIT_SECONDS)
    blockers = []
    missing_files = [name for name, is_present in _signing_files_present(security).items() if not is_present]
    if missing_files:
        blockers.append(
            f"{CANNOT_MIGRATE}: it has no {' and no '.join(missing_files)} to sign session tokens with; set"
            f" security.{_CERT_SETTING} and {_KEY_SETTING}, the same on all nodes, and restart it"
        )
    if isinstance(wait, int | float) and wait < required_wait:
        blockers.append(
            "its sessions have no time to migrate when it is stopped without a drain: set"
            f" graceful-wait-before-shutdown, now {wait:g} s, to {required_wait} s or more"
        )
    return tuple(blockers)


def _signing_files_present(security: Mapping[str, Any]) -> Mapping[str, bool]:
    """Return which signing files are set. If the setting of the key is missing, the key counts as set."""
    return {"certificate": bool(security.get(_CERT_SETTING)), "key": bool(security.get(_KEY_SETTING, True))}
