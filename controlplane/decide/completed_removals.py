"""Detect completed removals of nodes, so that their intents can be dropped. No I/O."""

from __future__ import annotations

from controlplane.decide.node_sources import all_sources_complete, has_other_source
from controlplane.intents import changes as intent_changes
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.plan import Plan


def forget_completed_removals(intents: Intents, plan: Plan, facts: Facts) -> Intents:
    """Return the intents without those of removed nodes that have left the plan.

    Nothing is dropped before every source has delivered a complete list of nodes.
    """
    if not all_sources_complete(facts):
        return intents
    remaining = intents
    for address in intents.removed.keys() - plan.nodes.keys():
        # A node that no operator added stays excluded until one adds it, however often it registers again.
        is_defined_elsewhere = has_other_source(address, facts) or address not in intents.added
        remaining = intent_changes.forget(remaining, address, has_other_source=is_defined_elsewhere)
    return remaining
