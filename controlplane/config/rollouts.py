"""Settings of rollouts: the actions on nodes, and the login probe and the verification after them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from controlplane.config.login import LoginSettings, UserSettings
from controlplane.config.types import (
    Directory,
    File,
    HttpUrl,
    SettingError,
    SettingsSection,
    ValueFormat,
    section,
    setting,
)
from controlplane.model.rollout import MANUAL

PLACEHOLDERS = ("address", "host", "port", "version", "rollout", "attempt")
"""Names in braces that are replaced in the arguments of a command."""

PLACEHOLDER_PATTERN = re.compile(r"\{([a-z_]+)\}")


def _validate_argument(value: str) -> str:
    for placeholder in PLACEHOLDER_PATTERN.findall(value):
        if placeholder not in PLACEHOLDERS:
            raise SettingError(
                f"{{{placeholder}}} is not a placeholder",
                f"write {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}",
            )
    if "\0" in value:
        raise SettingError("an argument of a command contains a NUL character", "remove it")
    return value


Argument = Annotated[str, AfterValidator(_validate_argument)]


class ActionSettings(SettingsSection):
    """A named action that restarts or upgrades a node: a command or a webhook.

    The leader runs it at most once per attempt, when the node is drained. A command runs without a shell; if
    it exceeds `timeout`, it is killed with all its child processes. A webhook gets a POST with JSON
    (`rollout`, `node`, `version`, `attempt`) and an `Idempotency-Key`; 2xx is success.
    """

    command: tuple[Argument, ...] = setting(())
    """Program and arguments; {address}, {host}, {port}, {version}, {rollout} and {attempt} are replaced."""
    webhook: HttpUrl | None = setting(None)
    """URL for a POST request, instead of a command."""
    token_file: File | None = setting(None)
    """File with a token that the webhook gets as `Authorization: Bearer`; read for each call."""
    timeout: float = setting(300.0, unit="seconds", gt=0, le=86_400)
    """Timeout of the action."""

    @model_validator(mode="after")
    def _check_command_or_webhook(self) -> ActionSettings:
        if bool(self.command) == (self.webhook is not None):
            raise SettingError(
                "has both a command and a webhook" if self.command else "has neither a command nor a webhook",
                "set one of them",
                key="command",
            )
        if self.token_file is not None and self.webhook is None:
            raise SettingError("is set without webhook", "remove it", key="token_file")
        return self


class LoginProbeSettings(LoginSettings):
    """A session that is opened on a restarted node before it gets clients again."""

    user: str | None = setting(None, min_length=1)
    """User to log in as; default: no login, and no statement is run."""
    timeout: float = setting(5.0, unit="seconds", ge=1, le=60)
    """Timeout of the login and the statement together."""


class VerificationSettings(UserSettings):
    """Replays of captured reads, on a node after its action and on an old node, before clients return.

    `tidevoy rollout start --verify replay:NAME` uses them. The leader runs the program `tidevoy-replay`.
    """

    directory: Directory | None = setting(None)
    """Directory with the captures, on the machine of each control plane; default: no verification."""
    user: str | None = setting(None, min_length=1)
    """User of all replayed sessions. It needs to read what the captured statements read, and no more."""
    warm_up: int = setting(1_000, unit="records", ge=0, le=100_000_000)
    """Number of records before those that are compared. It includes writes, which are skipped."""
    max_running: int = setting(8, unit="statements", ge=1, le=10_000)
    """Number of statements that a replay runs at the same time. The old node serves clients meanwhile."""
    max_connections: int = setting(1_000, ge=1, le=10_000)
    """Maximum number of connections of a replay: one for each captured session that has not ended."""
    timeout: float = setting(3_600.0, unit="seconds", ge=1, le=604_800)
    """Timeout of a replay."""


def _validate_action_name(value: str) -> str:
    if value == MANUAL:
        raise SettingError(f"{value!r} is reserved for the built-in action", "choose another name")
    return value


ActionName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_-]{1,64}$"),
    AfterValidator(_validate_action_name),
    ValueFormat("up to 64 letters, digits, hyphens and underscores"),
]


class RolloutSettings(SettingsSection):
    """Rolling operations (`tidevoy rollout`)."""

    actions: dict[ActionName, ActionSettings] = setting({})
    """Actions on nodes by name; `manual` is built in."""
    probe: LoginProbeSettings = section(LoginProbeSettings, "Login probe of a node.")
    verification: VerificationSettings = section(
        VerificationSettings, "Comparison of a node with an old one, on captured reads."
    )
