"""Settings of rules for statements, which block, limit, rewrite or log them."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, create_model, model_validator

from controlplane.config.types import (
    Cidr,
    SettingError,
    SettingsSection,
    ValueFormat,
    setting,
)
from controlplane.model.rules import RuleAction, StatementRule

_MAX_VALUES = 1000


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


RuleName = Annotated[str, ValueFormat("small letters, digits, `_` and `-`, at most 64 characters")]
Digests = Annotated[
    tuple[Annotated[str, ValueFormat("a digest of 64 hexadecimal digits")], ...],
    BeforeValidator(_as_list),
    ValueFormat("one or several digests of 64 hexadecimal digits"),
]
Names = Annotated[
    tuple[Annotated[str, ValueFormat("a name")], ...],
    BeforeValidator(_as_list),
    ValueFormat("one or several names"),
]
Networks = Annotated[
    tuple[Cidr, ...], BeforeValidator(_as_list), ValueFormat("one or several networks, such as 10.0.0.0/8")
]
Commands = Annotated[
    tuple[Literal["query", "prepare", "execute"], ...],
    BeforeValidator(_as_list),
    ValueFormat("some of query, prepare, execute"),
]
Scopes = Annotated[
    tuple[Literal["user", "digest", "client"], ...],
    BeforeValidator(_as_list),
    ValueFormat("some of user, digest, client"),
]


class BlockSettings(SettingsSection):
    """The client gets an error, and its session goes on."""

    message: str | None = setting(None, min_length=1, max_length=512)
    """Text of the error; default: a text that names the rule."""
    code: int = setting(1148, ge=1000, le=65_535)
    """Code of the error, but none from 2000 to 2999: those are the codes of client libraries."""

    @model_validator(mode="after")
    def _check(self) -> BlockSettings:
        if 2000 <= self.code < 3000:
            raise SettingError(
                f"{self.code} is a code of client libraries", "write 1000 to 1999, or at least 3000", "code"
            )
        if self.message is not None and not self.message.isprintable():
            raise SettingError("the text has control characters", "remove them", "message")
        return self


class StatementLimitSettings(SettingsSection):
    """Statements above a limit get error 1226. Each Envoy process has the limit for itself."""

    per_second: float | None = setting(None, ge=0.001, le=1_000_000)
    """Maximum number of statements per second; after a pause, those of one second may run at once."""
    concurrent: int | None = setting(None, ge=1, le=1_000_000)
    """Maximum number of statements at the same time."""
    by: Scopes = setting(())
    """What has a limit of its own; default: all statements together."""
    client_prefix: int | None = setting(None, ge=1, le=128)
    """Bits of the clients' addresses; clients with the same bits share a limit. Default: all bits."""
    wait: float = setting(0.0, unit="seconds", ge=0, le=60)
    """Seconds for which a statement may wait before it gets the error."""

    @model_validator(mode="after")
    def _check(self) -> StatementLimitSettings:
        if self.per_second is None and self.concurrent is None:
            raise SettingError("the limit allows everything", "set per_second or concurrent")
        if self.client_prefix is not None and "client" not in self.by:
            raise SettingError("needs client in by", "add it, or remove client_prefix", "client_prefix")
        return self


class RewriteSettings(SettingsSection):
    """The node gets another text. Exactly one of the keys is set."""

    replace: str | None = setting(None, max_length=65_536)
    """The text that replaces what `pattern` matches; `$1` is its first group."""
    text: str | None = setting(None, max_length=65_536)
    """The statement that runs instead."""
    tables: dict[str, str] = setting({}, max_length=_MAX_VALUES)
    """New names of tables, each `table` or `database.table`."""

    @model_validator(mode="after")
    def _check_is_one(self) -> RewriteSettings:
        if sum((self.replace is not None, self.text is not None, bool(self.tables))) != 1:
            raise SettingError("is unclear", "set exactly one of replace, text and tables")
        return self


if TYPE_CHECKING:
    _Continuing = SettingsSection
else:
    # A class statement cannot define this field, because `continue` is a keyword of Python.
    _Continuing = create_model(
        "_Continuing",
        __base__=SettingsSection,
        # pydantic would look for the source of this class, which fails in a directory that is not readable.
        __cls_kwargs__={"use_attribute_docstrings": False},
        **{
            "continue": (
                bool | None,
                setting(
                    None,
                    description="Whether the following rules apply, too, with the rewritten text; default:"
                    " only if the action is log.",
                ),
            )
        },
    )


class StatementRuleSettings(_Continuing, use_attribute_docstrings=True):
    """A rule for statements. It applies if all its conditions hold; a rule without any applies to all.

    The first rule that applies decides. A rule has exactly one action: block, limit, rewrite, or log.
    """

    name: RuleName = setting(..., pattern=r"^[a-z0-9_-]{1,64}$")
    """Name of the rule in errors, metrics and `tidevoy rules`."""
    enabled: bool = setting(True)
    """Whether the rule applies."""
    dry_run: bool = setting(False)
    """Whether the rule only counts statements, without effect."""
    digest: Digests = setting((), max_length=_MAX_VALUES)
    """Digests of statements, as in `information_schema.statements_summary`."""
    pattern: str | None = setting(None, max_length=4096)
    """Regular expression for the text without comments; upper and lower case are equal."""
    normalized: str | None = setting(None, max_length=4096)
    """Regular expression for the normalized text, as in `information_schema.statements_summary`."""
    commands: Commands = setting(())
    """How clients run the statement; default: all that suit the action."""
    user: Names = setting((), max_length=_MAX_VALUES)
    """Users, upper and lower case as in TiDB."""
    database: Names = setting((), max_length=_MAX_VALUES)
    """Current databases of sessions."""
    client: Networks = setting((), max_length=_MAX_VALUES)
    """Networks of clients."""
    group: Names = setting((), max_length=_MAX_VALUES)
    """Groups of nodes."""
    block: BlockSettings | None = setting(None)
    """Block the statement."""
    limit: StatementLimitSettings | None = setting(None)
    """Limit the statement."""
    rewrite: RewriteSettings | None = setting(None)
    """Rewrite the statement."""
    log: bool = setting(False)
    """Write the statement to the statement log in any case."""

    @model_validator(mode="after")
    def _check_actions(self) -> StatementRuleSettings:
        if len(self._actions()) != 1:
            raise SettingError(
                f"the rule {self.name} has {len(self._actions()) or 'no'} actions",
                "set exactly one of block, limit, rewrite and log",
            )
        return self

    def _actions(self) -> list[str]:
        return [action.value for action in RuleAction if getattr(self, action.value)]

    @cached_property
    def as_rule(self) -> StatementRule:
        """The rule as it is stored and sent. It is computed once, because each plan needs it."""
        definition = self.model_dump(mode="json", exclude_defaults=True)
        return StatementRule(self.name, json.dumps({"name": self.name, **definition}, ensure_ascii=False))
