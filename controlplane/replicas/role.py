"""Decides the role of a control plane: leader, follower or standalone. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# After this many lease durations without a known leader, each replica decides for its own Envoys.
_STANDALONE_AFTER_LEASES = 3.0


class Role(StrEnum):
    """Which replica decides for our Envoys."""

    LEADER = "leads"  # this replica, for all replicas
    FOLLOWER = "follows"  # another replica, whose plan this one publishes; nobody during an election
    STANDALONE = "alone"  # this replica, for its own Envoys only: no leader is reachable


@dataclass(frozen=True, slots=True)
class ElectionView:
    """What a control plane knows about the leader."""

    is_own_record: bool = False  # the leader record in PD is ours
    has_valid_lease: bool = False  # our lease has certainly not expired
    has_other_leader: bool = False  # another replica leads in PD, and our view of PD is current
    # When another replica was last seen as leader; before that, our start time; -inf after this replica led.
    leader_last_seen: float = 0.0
    is_plan_readable: bool = True  # this version can read the plan in PD


def decide_role(view: ElectionView, now: float, lease_seconds: float) -> Role:
    """Return the role to take now.

    A leader whose lease has expired goes on deciding for its own Envoys, so that they still learn of failed
    nodes. A follower waits for the next leader first, so that plans do not diverge at every leader change.
    """
    if view.is_own_record and view.has_valid_lease:
        return Role.LEADER
    if not view.is_plan_readable:
        return Role.STANDALONE
    if view.has_other_leader or now - view.leader_last_seen < _STANDALONE_AFTER_LEASES * lease_seconds:
        return Role.FOLLOWER
    return Role.STANDALONE
