"""Runs a configured action for one drained node and attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane import address as addresses
from controlplane.config.rollouts import PLACEHOLDER_PATTERN, ActionSettings
from controlplane.rollouts.actions import command_action, webhook_action


@dataclass(frozen=True, slots=True)
class ActionContext:
    """The node, rollout and attempt that an action runs for."""

    rollout: str
    action: str  # its name
    address: str
    attempt: int
    version: str = ""  # the version that the node is to get; empty: any

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The values of the placeholders in braces."""
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
    """Run an action to its end; return why it failed, as a clause about it, or an empty string.

    On cancellation a command is killed, and a request is abandoned.
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
    """Return the placeholders that a command uses."""
    return frozenset(name for argument in action.command for name in PLACEHOLDER_PATTERN.findall(argument))


def expand(argument: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of an argument once; inserted values are not expanded again."""
    return PLACEHOLDER_PATTERN.sub(lambda match: values.get(match[1], match[0]), argument)


def build_environment(inherited: Mapping[str, str], context: ActionContext) -> dict[str, str]:
    """Return a command's environment: ours without our settings, which may hold secrets, plus the context."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("TIDEVOY_")}
    return environment | {
        "TIDEVOY_NODE": context.address,
        "TIDEVOY_ROLLOUT": context.rollout,
        "TIDEVOY_ACTION": context.action,
        "TIDEVOY_ATTEMPT": str(context.attempt),
        "TIDEVOY_VERSION": context.version,
    }
