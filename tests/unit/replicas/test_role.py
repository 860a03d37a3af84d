"""Who leads, follows or is on its own, by what is known of the leader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.replicas.role import ElectionView, Role, decide_role

LEASE = 5.0
NEVER = float("-inf")


@pytest.mark.parametrize(
    ("outlook", "now", "expected"),
    [
        (ElectionView(is_own_record=True, has_valid_lease=True), 0.0, Role.LEADER),
        # Its lease ran out: at once on its own, for nodes that die matter to its Envoys.
        (
            ElectionView(is_own_record=True, has_valid_lease=False, leader_last_seen=NEVER),
            0.0,
            Role.STANDALONE,
        ),
        # It has lost its lease, and its key is gone: until another one leads.
        (ElectionView(has_valid_lease=True, leader_last_seen=NEVER), 0.0, Role.STANDALONE),
        (
            ElectionView(has_valid_lease=True, has_other_leader=True, leader_last_seen=0.0),
            99.0,
            Role.FOLLOWER,
        ),
        (ElectionView(has_other_leader=True), 99.0, Role.FOLLOWER),
        # PD is not heard, or the leader has died: another one comes soon.
        (ElectionView(leader_last_seen=10.0), 10.0 + 3 * LEASE - 0.1, Role.FOLLOWER),
        (ElectionView(leader_last_seen=10.0), 10.0 + 3 * LEASE, Role.STANDALONE),
        # It cannot read the plan that others follow.
        (ElectionView(has_other_leader=True, is_plan_readable=False), 0.0, Role.STANDALONE),
        (ElectionView(is_own_record=True, has_valid_lease=True, is_plan_readable=False), 0.0, Role.LEADER),
    ],
)
def test_what_to_be(outlook: ElectionView, now: float, expected: Role) -> None:
    assert decide_role(outlook, now, LEASE) is expected


@given(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 100), st.booleans(), st.floats(0, 100))
def test_nobody_leads_whose_lease_may_be_over(
    ours: bool, holds: bool, another: bool, last: float, readable: bool, now: float
) -> None:
    outlook = ElectionView(ours, holds, another and not ours, last, readable)
    assert (decide_role(outlook, now, LEASE) is Role.LEADER) == (ours and holds)
