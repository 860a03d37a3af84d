"""Runs a configured action for one drained node and attempt: a command, or a webhook."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2

from controlplane import address as addresses
from controlplane.config.bearer_token import InvalidTokenFile, read_bearer_token
from controlplane.config.rollouts import PLACEHOLDER_PATTERN, ActionSettings
from controlplane.rollouts.actions import command_action


@dataclass(frozen=True, slots=True)
class ActionContext:
    """The node, rollout and attempt that an action runs for."""

    rollout: str
    action: str  # its name
    address: str
    attempt: int
    version: str = ""  # that the node must have after the action; an empty string allows any

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The values that replace placeholders such as `{host}` in the arguments of a command."""
        host, port = addresses.split(self.address)
        return {
            "address": self.address,
            "host": host,
            "port": str(port),
            "version": self.version,
            "rollout": self.rollout,
            "attempt": str(self.attempt),
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that a command gets in addition to inherited ones."""
        return {
            "TIDEVOY_NODE": self.address,
            "TIDEVOY_ROLLOUT": self.rollout,
            "TIDEVOY_ACTION": self.action,
            "TIDEVOY_ATTEMPT": str(self.attempt),
            "TIDEVOY_VERSION": self.version,
        }


async def run_action(action: ActionSettings, context: ActionContext) -> str:
    """Run an action to its end; return why it failed, as a clause, or an empty string.

    On cancellation a command is killed, and a request is abandoned.
    """
    if action.webhook is not None:
        return await _call_webhook(action.webhook, action, context)
    argv = [expand(argument, context.placeholders) for argument in action.command]
    # Leave out our own settings, because they may contain secrets.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIDEVOY_")}
    environment = {**inherited, **context.environment}
    return await command_action.run_command(argv, environment, action.timeout)


def expand(argument: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of an argument once; inserted values are not expanded again."""
    return PLACEHOLDER_PATTERN.sub(lambda match: values.get(match[1], match[0]), argument)


async def _call_webhook(url: str, action: ActionSettings, context: ActionContext) -> str:
    """Send one POST of JSON, and ignore the response body.

    Redirects are failures: the configuration alone decides where the token goes.
    """
    body = {
        "rollout": context.rollout,
        "node": context.address,
        "version": context.version or None,
        "attempt": context.attempt,
    }
    headers = {"Idempotency-Key": f"{context.rollout}/{context.address}/{context.attempt}"}
    if (token_file := action.token_file) is not None:
        try:
            token = await asyncio.to_thread(read_bearer_token, token_file)
        except InvalidTokenFile as error:
            return f"was not started: {token_file} {error}"
        headers["Authorization"] = f"Bearer {token}"
    try:
        async with (
            asyncio.timeout(action.timeout),
            httpx2.AsyncClient(timeout=action.timeout, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            status = response.status_code
    except (TimeoutError, httpx2.TimeoutException):
        return f"was not answered within {action.timeout:g} s and may have been executed"
    except httpx2.ConnectError:
        return "was not started: cannot connect to the webhook's server"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"was not answered ({type(error).__name__}) and may have been executed"
    return "" if 200 <= status < 300 else f"was answered with HTTP {status}"
