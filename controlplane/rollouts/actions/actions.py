"""What is done to a node that is drained: the action of that name, filled in for this node and attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane import address as addresses
from controlplane.config.rollouts import PLACEHOLDER_PATTERN, ActionSettings
from controlplane.rollouts.actions import command_action, webhook_action


@dataclass(frozen=True, slots=True)
class ActionContext:
    """For whom an action is run."""

    rollout: str
    action: str  # its name
    address: str
    attempt: int
    version: str = ""  # that the node is to have; empty: any

    @property
    def placeholders(self) -> Mapping[str, str]:
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


async def run_action(action: ActionSettings, context: ActionContext) -> str:
    """Run it to its end; how it failed, to be put after its name, or nothing when it did not.

    Cancelled, it ends what it began: a command is killed, a request is given up.
    """
    if action.webhook is None:
        argv = [expand(argument, context.placeholders) for argument in action.command]
        return await command_action.run_command(argv, build_environment(os.environ, context), action.timeout)
    body = {
        "rollout": context.rollout,
        "node": context.address,
        "version": context.version or None,
        "attempt": context.attempt,
    }
    idempotency_key = f"{context.rollout}/{context.address}/{context.attempt}"
    return await webhook_action.post(action.webhook, body, idempotency_key, action.timeout, action.token_file)


def command_placeholders(action: ActionSettings) -> frozenset[str]:
    """The words that a command fills in."""
    return frozenset(word for argument in action.command for word in PLACEHOLDER_PATTERN.findall(argument))


def expand(argument: str, values: Mapping[str, str]) -> str:
    """An argument with its words filled in, once: what is filled in is not looked at again."""
    return PLACEHOLDER_PATTERN.sub(lambda found: values.get(found[1], found[0]), argument)


def build_environment(inherited: Mapping[str, str], context: ActionContext) -> dict[str, str]:
    """A command's environment: ours without our settings, which may hold secrets, and what it is run for."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TIDEVOY_")}
    return kept | {
        "TIDEVOY_NODE": context.address,
        "TIDEVOY_ROLLOUT": context.rollout,
        "TIDEVOY_ACTION": context.action,
        "TIDEVOY_ATTEMPT": str(context.attempt),
        "TIDEVOY_VERSION": context.version,
    }
