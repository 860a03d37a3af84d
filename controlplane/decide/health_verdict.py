"""Combine the check results of a node into one verdict. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.model.plan import Policy


class VerdictKind(Enum):
    """What the checks of a node say together."""

    UP = "up"
    DOWN = "down"
    STOPPING = "stopping"  # it still serves, and reports that it will stop
    UNDECIDED = "hold"  # not enough results to change the state


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """A verdict and, unless the node is up, the reason from the check that decided it."""

    kind: VerdictKind
    reason: str = ""


def evaluate_health(
    health: Health, *, has_status_address: bool, recovering: bool, serving: bool, policy: Policy
) -> HealthVerdict:
    """Evaluate the check results of a node.

    `recovering` nodes need `rise` consecutive passes, others one. `serving` nodes are down after `fall`
    consecutive failures, others after one. A node that responds "starting up or shutting down" is STOPPING
    as long as its SQL port is not known to be down: new sessions would soon be cut (TiDB sets its status to
    HTTP 500 before it closes the listener; pingcap/tidb pkg/server/server.go).
    """
    sql = (
        _evaluate_check(health.sql, policy.sql_rise, policy.sql_fall, recovering, serving)
        if policy.sql_check
        else _UP
    )
    if sql.kind is VerdictKind.DOWN:
        return sql
    status = _UP
    if policy.status_check and has_status_address:
        status = _evaluate_check(health.status, policy.status_rise, policy.status_fall, recovering, serving)
    if status.kind in (VerdictKind.DOWN, VerdictKind.STOPPING):
        return status
    return sql if sql.kind is VerdictKind.UNDECIDED else status


def checks_pending(health: Health, *, has_status_address: bool, policy: Policy) -> bool:
    """Return whether an enabled check has not completed once yet."""
    return (policy.sql_check and health.sql is None) or (
        policy.status_check and has_status_address and health.status is None
    )


_UP = HealthVerdict(VerdictKind.UP)


def _evaluate_check(
    probe: CheckResult | None, rise: int, fall: int, recovering: bool, serving: bool
) -> HealthVerdict:
    if probe is None:
        return HealthVerdict(VerdictKind.UNDECIDED, "it has not been checked yet")
    if probe.status is CheckStatus.STOPPING:
        return HealthVerdict(VerdictKind.STOPPING, probe.reason)
    if probe.status is CheckStatus.FAIL:
        is_down = probe.consecutive >= (fall if serving else 1)
        return HealthVerdict(VerdictKind.DOWN if is_down else VerdictKind.UNDECIDED, probe.reason)
    if probe.consecutive >= (rise if recovering else 1):
        return _UP
    return HealthVerdict(VerdictKind.UNDECIDED, "it passes its checks again, but not for long enough yet")
