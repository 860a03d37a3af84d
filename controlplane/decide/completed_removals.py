"""When what was asked for a removed node has been done, so that it need not be remembered. Pure."""

from __future__ import annotations

from controlplane.decide.node_sources import all_sources_complete, has_other_source
from controlplane.intents import changes as intent_changes
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.plan import Plan


def forget_completed_removals(intents: Intents, plan: Plan, facts: Facts) -> Intents:
    """The intents that are left when those for nodes that have gone are forgotten.

    Nothing is forgotten before each source has said which nodes there are.
    """
    if not all_sources_complete(facts):
        return intents
    remaining = intents
    for address in intents.removed.keys() - plan.nodes.keys():
        # What operators did not add is excluded until they do, however often it registers anew.
        is_named_elsewhere = has_other_source(address, facts) or address not in intents.added
        remaining = intent_changes.forget(remaining, address, has_other_source=is_named_elsewhere)
    return remaining
