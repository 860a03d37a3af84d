"""Settings of rollouts: the actions on nodes, and the login probe after them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, model_validator

from controlplane import address as addresses
from controlplane.config.types import File, SettingError, SettingsSection, ValueFormat, section, setting
from controlplane.model.rollout import MANUAL

PLACEHOLDERS = ("address", "host", "port", "version", "rollout", "attempt")
"""Names in braces that are replaced in the arguments of a command."""

PLACEHOLDER_PATTERN = re.compile(r"\{([a-z_]+)\}")
_ACTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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


def _validate_webhook_url(value: str) -> str:
    if "@" in value or "?" in value or "#" in value:  # not shown: it may hold a secret
        raise SettingError(
            "the URL has a user, a query or a fragment", "remove them, and put a secret into token_file"
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
    """A named action that restarts or upgrades a node: a command or a webhook.

    The leader runs it at most once per attempt, when the node is drained. A command runs without a shell; if
    it exceeds `timeout`, it is killed with all its child processes. A webhook gets a POST with JSON
    (`rollout`, `node`, `version`, `attempt`) and an `Idempotency-Key`; 2xx is success.
    """

    command: tuple[Argument, ...] = setting(
        (),
        "Program and arguments; {address}, {host}, {port}, {version}, {rollout} and {attempt} are replaced.",
        "now",
    )
    webhook: WebhookUrl | None = setting(None, "URL for a POST request, instead of a command.", "now")
    token_file: File | None = setting(
        None, "File with a token that the webhook gets as `Authorization: Bearer`; read for each call.", "now"
    )
    timeout: float = setting(300.0, "Timeout of the action.", "now", unit="seconds", gt=0, le=86_400)

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
    """A session that is opened on a restarted node before it gets clients again."""

    user: str | None = setting(None, "User to log in as; default: no login, and no statement is run.", "now")
    password_file: File | None = setting(
        None, "File with the user's password, read for each login; default: empty password.", "now"
    )
    statement: str = setting("SELECT 1", "Statement that must succeed.", "now", max_length=65_536)
    ca: File | None = setting(
        None, "CA bundle (PEM) that nodes' certificates must chain to; default: without TLS.", "now"
    )
    timeout: float = setting(5.0, "Timeout of each step of the probe.", "now", unit="seconds", ge=1, le=60)


def _validate_action_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if _ACTION_NAME.fullmatch(name) is None:
            raise SettingError(
                f"{name!r} is not a valid action name",
                "use up to 64 letters, digits, hyphens and underscores",
            )
        if name == MANUAL:
            raise SettingError(f"{name!r} is reserved for the built-in action", "choose another name")
    return value


Actions = Annotated[
    dict[str, ActionSettings],
    AfterValidator(_validate_action_names),
    ValueFormat("a mapping of names to a command or a webhook each"),
]


class RolloutSettings(SettingsSection):
    """Rolling operations (`tidevoy rollout`)."""

    actions: Actions = setting({}, "Actions on nodes by name; `manual` is built in.", "now")
    probe: LoginProbeSettings = section(LoginProbeSettings, "Login probe of a node.")
