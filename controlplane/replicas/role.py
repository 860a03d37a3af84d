"""What a control plane is to the others: it leads, it follows, or it is on its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_STANDALONE_AFTER_LEASES = (
    3.0  # leases without a leader that is known, after which each decides for its own Envoys
)


class Role(StrEnum):
    """Who decides."""

    LEADER = "leads"  # we do, for all
    FOLLOWER = "follows"  # the leader does, and we publish its plan; or there will be one in a moment
    STANDALONE = "alone"  # nobody whom we could hear of: we decide for our own Envoys


@dataclass(frozen=True, slots=True)
class ElectionView:
    """What a control plane knows of who leads."""

    is_own_record: bool = False  # the leader in PD is us
    has_valid_lease: bool = False  # our lease surely has not ended
    has_other_leader: bool = False  # the leader in PD is another one, and we would hear if that ended
    leader_last_seen: float = (
        0.0  # when that was so last; when we began; or never, since we have led ourselves
    )
    is_plan_readable: bool = True  # the plan in PD is one that we can follow


def decide_role(view: ElectionView, now: float, lease_seconds: float) -> Role:
    """What to be now.

    A leader whose lease has run out decides on for its own Envoys: nodes that die do matter to them. One who
    follows waits for the next leader first, so that plans do not drift apart whenever a leader changes.
    """
    if view.is_own_record and view.has_valid_lease:
        return Role.LEADER
    if not view.is_plan_readable:
        return Role.STANDALONE
    if view.has_other_leader or now - view.leader_last_seen < _STANDALONE_AFTER_LEASES * lease_seconds:
        return Role.FOLLOWER
    return Role.STANDALONE
