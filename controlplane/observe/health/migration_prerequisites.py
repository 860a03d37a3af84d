"""What a TiDB server's own configuration lacks for its sessions to leave it without a disconnect. Pure.

It is read from `GET /config` of the status port, which answers with the whole of it as JSON
(pingcap/tidb pkg/server/http_status.go, pkg/config/config.go).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from controlplane.model.health import CANNOT_MIGRATE

# A server that is told to stop is to serve on for so many checks, so that they see it and its sessions can
# leave; it need not be longer than that.
_MIN_CHECKS_BEFORE_STOP = 3
_MAX_REQUIRED_WAIT_SECONDS = 30  # seconds

_CERT_SETTING, _KEY_SETTING = "session-token-signing-cert", "session-token-signing-key"


def find_migration_blockers(config: bytes, check_interval: float) -> tuple[str, ...] | None:
    """What is missing, a sentence each; None when this is no configuration of a TiDB server.

    `check_interval`: seconds between two checks of its status.
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
    missing_files = [noun for noun, is_there in _signing_files_present(security).items() if not is_there]
    if missing_files:
        blockers.append(
            f"{CANNOT_MIGRATE}: it has no {' and no '.join(missing_files)} to sign session tokens with; set"
            f" security.{_CERT_SETTING} and {_KEY_SETTING}, the same on all nodes, and start it again"
        )
    if isinstance(wait, int | float) and wait < required_wait:
        blockers.append(
            "its sessions have no time to move when it is stopped without a drain: set"
            f" graceful-wait-before-shutdown, now {wait:g} s, to {required_wait} s or more"
        )
    return tuple(blockers)


def _signing_files_present(security: Mapping[str, Any]) -> Mapping[str, bool]:
    """Whether it has what tokens are signed with. That it says nothing at all of a key is no news of one."""
    return {"certificate": bool(security.get(_CERT_SETTING)), "key": bool(security.get(_KEY_SETTING, True))}
