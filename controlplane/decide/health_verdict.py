"""From the outcomes of checks to one verdict on a node. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.plan import Policy


class Verdict(Enum):
    """What the checks together say."""

    UP = "up"
    DOWN = "down"
    STOPPING = "stopping"  # it serves, and says that it will not for long
    HOLD = "hold"  # not enough is known to change anything


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and, unless all is well, the sentence of the check that decided it."""

    verdict: Verdict
    reason: str = ""


def judge(health: Health, *, has_status: bool, recovering: bool, serving: bool, policy: Policy) -> Judgement:
    """Judge a node.

    `recovering` nodes need `rise` passes in a row, others one. `serving` nodes are down after `fall` failures
    in a row, others after one. A node that answers "starting up or shutting down" is STOPPING as long as its
    SQL port is not known to be down: new sessions would soon be cut (TiDB sets its status to HTTP 500 before
    it closes the listener; pingcap/tidb pkg/server/server.go).
    """
    sql = _one(health.sql, policy.sql_rise, policy.sql_fall, recovering, serving) if policy.sql_check else _UP
    if sql.verdict is Verdict.DOWN:
        return sql
    status = _UP
    if policy.status_check and has_status:
        status = _one(health.status, policy.status_rise, policy.status_fall, recovering, serving)
    if status.verdict in (Verdict.DOWN, Verdict.STOPPING):
        return status
    return sql if sql.verdict is Verdict.HOLD else status


def unchecked(health: Health, *, has_status: bool, policy: Policy) -> bool:
    """Whether a check that is to be made has not ended once yet."""
    return (policy.sql_check and health.sql is None) or (
        policy.status_check and has_status and health.status is None
    )


_UP = Judgement(Verdict.UP)


def _one(probe: Probe | None, rise: int, fall: int, recovering: bool, serving: bool) -> Judgement:
    if probe is None:
        return Judgement(Verdict.HOLD, "it has not been checked yet")
    if probe.outcome is Outcome.STOPPING:
        return Judgement(Verdict.STOPPING, probe.reason)
    if probe.outcome is Outcome.FAIL:
        down = probe.streak >= (fall if serving else 1)
        return Judgement(Verdict.DOWN if down else Verdict.HOLD, probe.reason)
    up = probe.streak >= (rise if recovering else 1)
    return _UP if up else Judgement(Verdict.HOLD, "it passes its checks again, but not for long enough yet")
