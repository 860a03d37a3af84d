"""What a control plane is to the others: it leads, it follows, or it is on its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_PATIENCE = 3.0  # leases without a leader that is known, after which each decides for its own Envoys


class Stance(StrEnum):
    """Who decides."""

    LEADS = "leads"  # we do, for all
    FOLLOWS = "follows"  # the leader does, and we publish its plan; or there will be one in a moment
    ALONE = "alone"  # nobody whom we could hear of: we decide for our own Envoys


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a control plane knows of who leads."""

    is_ours: bool = False  # the leader in PD is us
    holds: bool = False  # our lease surely has not ended
    another_leads: bool = False  # the leader in PD is another one, and we would hear if that ended
    last_led: float = 0.0  # when that was so last; when we began; or never, since we have led ourselves
    is_readable: bool = True  # the plan in PD is one that we can follow


def stance(outlook: Outlook, now: float, lease: float) -> Stance:
    """What to be now.

    A leader whose lease has run out decides on for its own Envoys: nodes that die do matter to them. One who
    follows waits for the next leader first, so that plans do not drift apart whenever a leader changes.
    """
    if outlook.is_ours and outlook.holds:
        return Stance.LEADS
    if not outlook.is_readable:
        return Stance.ALONE
    if outlook.another_leads or now - outlook.last_led < _PATIENCE * lease:
        return Stance.FOLLOWS
    return Stance.ALONE
