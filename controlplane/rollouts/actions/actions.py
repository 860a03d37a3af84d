"""What is done to a node that is drained: the action of that name, filled in for this node and attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane import address as addresses
from controlplane.config.rollouts import WORD, Action
from controlplane.rollouts.actions import command_action, webhook_action


@dataclass(frozen=True, slots=True)
class Errand:
    """For whom an action is run."""

    rollout: str
    action: str  # its name
    address: str
    attempt: int
    version: str = ""  # that the node is to have; empty: any

    @property
    def words(self) -> Mapping[str, str]:
        """What the words in braces stand for."""
        host, port = addresses.split(self.address)
        return {
            "address": self.address,
            "host": host,
            "port": str(port),
            "version": self.version,
            "rollout": self.rollout,
            "attempt": str(self.attempt),
        }


async def perform(action: Action, errand: Errand) -> str:
    """Run it to its end; how it failed, to be put after its name, or nothing when it did not.

    Cancelled, it ends what it began: a command is killed, a request is given up.
    """
    if action.webhook is None:
        argv = [filled(argument, errand.words) for argument in action.command]
        return await command_action.run(argv, environment(os.environ, errand), action.timeout)
    body = {
        "rollout": errand.rollout,
        "node": errand.address,
        "version": errand.version or None,
        "attempt": errand.attempt,
    }
    key = f"{errand.rollout}/{errand.address}/{errand.attempt}"
    return await webhook_action.post(action.webhook, body, key, action.timeout, action.token_file)


def words(action: Action) -> frozenset[str]:
    """The words that a command fills in."""
    return frozenset(word for argument in action.command for word in WORD.findall(argument))


def filled(argument: str, words: Mapping[str, str]) -> str:
    """An argument with its words filled in, once: what is filled in is not looked at again."""
    return WORD.sub(lambda found: words.get(found[1], found[0]), argument)


def environment(ours: Mapping[str, str], errand: Errand) -> dict[str, str]:
    """A command's environment: ours without our settings, which may hold secrets, and what it is run for."""
    kept = {name: value for name, value in ours.items() if not name.startswith("TIDEVOY_")}
    return kept | {
        "TIDEVOY_NODE": errand.address,
        "TIDEVOY_ROLLOUT": errand.rollout,
        "TIDEVOY_ACTION": errand.action,
        "TIDEVOY_ATTEMPT": str(errand.attempt),
        "TIDEVOY_VERSION": errand.version,
    }
