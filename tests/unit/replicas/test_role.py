"""The role of a control plane: leader, follower or standalone, from its view of the election."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.replicas.leader_election import ElectionView, Role, decide_role

LEASE = 5.0
NEVER = float("-inf")


@pytest.mark.parametrize(
    ("view", "now", "expected"),
    [
        (ElectionView(is_leader_record_ours=True, has_valid_lease=True), 0.0, Role.LEADER),
        # The leader's lease expired: standalone at once, so that its Envoys still learn of failed nodes.
        (
            ElectionView(is_leader_record_ours=True, has_valid_lease=False, leader_last_seen=NEVER),
            0.0,
            Role.STANDALONE,
        ),
        # A former leader has a new lease, but no leader record: standalone until another replica leads.
        (ElectionView(has_valid_lease=True, leader_last_seen=NEVER), 0.0, Role.STANDALONE),
        (
            ElectionView(has_valid_lease=True, has_other_leader=True, leader_last_seen=0.0),
            99.0,
            Role.FOLLOWER,
        ),
        (ElectionView(has_other_leader=True), 99.0, Role.FOLLOWER),
        # PD is unreachable, or the leader died: the follower waits three lease times for the next leader.
        (ElectionView(leader_last_seen=10.0), 10.0 + 3 * LEASE - 0.1, Role.FOLLOWER),
        (ElectionView(leader_last_seen=10.0), 10.0 + 3 * LEASE, Role.STANDALONE),
        # This version cannot read the shared plan.
        (ElectionView(has_other_leader=True, is_plan_readable=False), 0.0, Role.STANDALONE),
        (
            ElectionView(is_leader_record_ours=True, has_valid_lease=True, is_plan_readable=False),
            0.0,
            Role.LEADER,
        ),
    ],
)
def test_decide_role(view: ElectionView, now: float, expected: Role) -> None:
    assert decide_role(view, now, LEASE) is expected


@given(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 100), st.booleans(), st.floats(0, 100))
def test_only_an_owner_of_a_valid_lease_leads(
    is_leader_record_ours: bool,
    has_valid_lease: bool,
    has_other_leader: bool,
    leader_last_seen: float,
    is_plan_readable: bool,
    now: float,
) -> None:
    view = ElectionView(
        is_leader_record_ours,
        has_valid_lease,
        has_other_leader and not is_leader_record_ours,
        leader_last_seen,
        is_plan_readable,
    )
    assert (decide_role(view, now, LEASE) is Role.LEADER) == (is_leader_record_ours and has_valid_lease)
