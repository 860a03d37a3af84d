"""Rollouts: what may be done to nodes, and how it is seen that they are back."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, model_validator

from controlplane import address as addresses
from controlplane.config.types import File, SettingError, SettingsSection, ValueFormat, section, setting
from controlplane.model.rollout import MANUAL

PLACEHOLDERS = ("address", "host", "port", "version", "rollout", "attempt")
"""What is filled in where an argument of a command has it in braces."""

PLACEHOLDER_PATTERN = re.compile(r"\{([a-z_]+)\}")
_ACTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _validate_argument(value: str) -> str:
    for placeholder in PLACEHOLDER_PATTERN.findall(value):
        if placeholder not in PLACEHOLDERS:
            raise SettingError(
                f"nothing is known as {{{placeholder}}}",
                f"write {', '.join(f'{{{each}}}' for each in PLACEHOLDERS)}",
            )
    if "\0" in value:
        raise SettingError("no argument of a command may hold a NUL", "leave it out")
    return value


def _validate_webhook_url(value: str) -> str:
    if "@" in value or "?" in value or "#" in value:  # not shown: it may hold a secret
        raise SettingError(
            "the URL has a user, a query or a fragment", "leave these out, and put a secret into token_file"
        )
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise SettingError(f"{value!r} does not begin with http:// or https://")
    authority, slash, path = rest.partition("/")
    try:
        explicit = (
            authority
            if re.search(r":[0-9]+\Z", authority)
            else f"{authority}:{443 if scheme == 'https' else 80}"
        )
        host = addresses.join(*addresses.split(explicit))
    except ValueError as error:
        raise SettingError(str(error)) from None
    return f"{scheme}://{host}{slash}{path}"


Argument = Annotated[str, AfterValidator(_validate_argument), ValueFormat("text")]
WebhookUrl = Annotated[
    str, AfterValidator(_validate_webhook_url), ValueFormat("a URL, such as https://deploy.internal/restart")
]


class ActionSettings(SettingsSection):
    """What restarts or upgrades a node, under the name that orders have it by: a command or a webhook.

    The leader runs it, at most once for each attempt, when the node is drained. A command is run without a
    shell; one that outlasts `timeout` is ended with all that it started. A webhook gets a POST with JSON
    (`rollout`, `node`, `version`, `attempt`) and an `Idempotency-Key`; 2xx is success.
    """

    command: tuple[Argument, ...] = setting(
        (),
        "The program and its arguments; {address}, {host}, {port}, {version}, {rollout} and {attempt} are"
        " filled in.",
        "now",
    )
    webhook: WebhookUrl | None = setting(None, "Where to POST to, in place of a command.", "now")
    token_file: File | None = setting(
        None, "File with a token that the webhook gets as `Authorization: Bearer`; read each time.", "now"
    )
    timeout: float = setting(
        300.0, "Seconds after which it has failed.", "now", unit="seconds", gt=0, le=86_400
    )

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


class LoginProbeSettings(SettingsSection):
    """A session that is opened on a node that came back, before clients are led to it."""

    user: str | None = setting(None, "User to log in as; default: nobody logs in, and no SQL is run.", "now")
    password_file: File | None = setting(
        None, "File with the user's password; default: an empty one. Read each time.", "now"
    )
    statement: str = setting("SELECT 1", "Statement that must succeed.", "now", max_length=65_536)
    ca: File | None = setting(
        None, "CA bundle (PEM) that nodes' certificates must chain to; default: without TLS.", "now"
    )
    timeout: float = setting(
        5.0, "Seconds that each step of it may take.", "now", unit="seconds", ge=1, le=60
    )


def _validate_action_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if _ACTION_NAME.fullmatch(name) is None:
            raise SettingError(
                f"{name!r} is no name of an action", "take up to 64 letters, digits, hyphens and underscores"
            )
        if name == MANUAL:
            raise SettingError(f"{name!r} is the action that nobody runs", "choose another name")
    return value


Actions = Annotated[
    dict[str, ActionSettings],
    AfterValidator(_validate_action_names),
    ValueFormat("a mapping of names to a command or a webhook each"),
]


class RolloutSettings(SettingsSection):
    """Rolling operations (`tidevoy rollout`)."""

    actions: Actions = setting({}, "What may be done to nodes, by name; `manual` is always there.", "now")
    probe: LoginProbeSettings = section(LoginProbeSettings, "Whether a node serves SQL.")
