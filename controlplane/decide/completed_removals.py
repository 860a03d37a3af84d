"""When what was asked for a removed node has been done, so that it need not be remembered. Pure."""

from __future__ import annotations

from controlplane.decide.node_sources import complete, named_by_others
from controlplane.intents import changes as wishes
from controlplane.model.facts import Facts
from controlplane.model.intents import Intents
from controlplane.model.plan import Plan


def finished(intents: Intents, plan: Plan, facts: Facts) -> Intents:
    """The intents that are left when those for nodes that have gone are forgotten.

    Nothing is forgotten before each source has said which nodes there are.
    """
    if not complete(facts):
        return intents
    left = intents
    for address in intents.removed.keys() - plan.nodes.keys():
        # What operators did not add is excluded until they do, however often it registers anew.
        elsewhere = named_by_others(address, facts) or address not in intents.added
        left = wishes.forget(left, address, named_elsewhere=elsewhere)
    return left
