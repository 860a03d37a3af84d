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
_CHECKS = 3
_LONG_ENOUGH = 30  # seconds

_CERT, _KEY = "session-token-signing-cert", "session-token-signing-key"


def hindrances(config: bytes, check_interval: float) -> tuple[str, ...] | None:
    """What is missing, a sentence each; None when this is no configuration of a TiDB server.

    `check_interval`: seconds between two checks of its status.
    """
    try:
        told = json.loads(config)
        security, wait = told["security"], told.get("graceful-wait-before-shutdown")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(security, dict):
        return None
    needed = min(math.ceil(_CHECKS * check_interval), _LONG_ENOUGH)
    missing = []
    lacks = [noun for noun, is_there in _signing(security).items() if not is_there]
    if lacks:
        missing.append(
            f"{CANNOT_MIGRATE}: it has no {' and no '.join(lacks)} to sign session tokens with; set"
            f" security.{_CERT} and {_KEY}, the same on all nodes, and start it again"
        )
    if isinstance(wait, int | float) and wait < needed:
        missing.append(
            "its sessions have no time to move when it is stopped without a drain: set"
            f" graceful-wait-before-shutdown, now {wait:g} s, to {needed} s or more"
        )
    return tuple(missing)


def _signing(security: Mapping[str, Any]) -> Mapping[str, bool]:
    """Whether it has what tokens are signed with. That it says nothing at all of a key is no news of one."""
    return {"certificate": bool(security.get(_CERT)), "key": bool(security.get(_KEY, True))}
