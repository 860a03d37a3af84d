"""Who leads, follows or is on its own, by what is known of the leader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.replicas.role import Outlook, Stance, stance

LEASE = 5.0
NEVER = float("-inf")


@pytest.mark.parametrize(
    ("outlook", "now", "expected"),
    [
        (Outlook(is_ours=True, holds=True), 0.0, Stance.LEADS),
        # Its lease ran out: at once on its own, for nodes that die matter to its Envoys.
        (Outlook(is_ours=True, holds=False, last_led=NEVER), 0.0, Stance.ALONE),
        # It has lost its lease, and its key is gone: until another one leads.
        (Outlook(holds=True, last_led=NEVER), 0.0, Stance.ALONE),
        (Outlook(holds=True, another_leads=True, last_led=0.0), 99.0, Stance.FOLLOWS),
        (Outlook(another_leads=True), 99.0, Stance.FOLLOWS),
        # PD is not heard, or the leader has died: another one comes soon.
        (Outlook(last_led=10.0), 10.0 + 3 * LEASE - 0.1, Stance.FOLLOWS),
        (Outlook(last_led=10.0), 10.0 + 3 * LEASE, Stance.ALONE),
        # It cannot read the plan that others follow.
        (Outlook(another_leads=True, is_readable=False), 0.0, Stance.ALONE),
        (Outlook(is_ours=True, holds=True, is_readable=False), 0.0, Stance.LEADS),
    ],
)
def test_what_to_be(outlook: Outlook, now: float, expected: Stance) -> None:
    assert stance(outlook, now, LEASE) is expected


@given(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 100), st.booleans(), st.floats(0, 100))
def test_nobody_leads_whose_lease_may_be_over(
    ours: bool, holds: bool, another: bool, last: float, readable: bool, now: float
) -> None:
    outlook = Outlook(ours, holds, another and not ours, last, readable)
    assert (stance(outlook, now, LEASE) is Stance.LEADS) == (ours and holds)
