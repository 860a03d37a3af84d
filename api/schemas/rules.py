"""Schemas of the rules for statements."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from api.schemas.common import ResponseModel, StrictRequest, attribute
from controlplane.config.statement_rules import StatementRuleSettings
from controlplane.config.statements import MAX_RULES
from controlplane.model.rules import RuleAction, RuleSource, StatementRule


def _check_ip(text: str) -> str:
    return str(ipaddress.ip_address(text))


class RuleDetails(ResponseModel):
    """A rule, and how often it applied."""

    name: str = attribute("rule.name", "Name of the rule.")
    source: RuleSource = Field(
        description="`api`: an operator has set it; `settings`: it is one of the settings."
    )
    action: RuleAction = Field(description="What the rule does.")
    enabled: bool = attribute("rule.is_enabled", "Whether the rule applies.")
    dry_run: bool = attribute("is_dry_run", "Whether the rule only counts statements.")
    hits: int = Field(description="Statements to which it applied, at all Envoys since their start.")
    dry_run_hits: int = Field(description="Statements to which it would have applied.")
    rule: dict[str, Any] = attribute("rule.definition", "The rule as it was set, without defaults.")


class RuleList(ResponseModel):
    """All rules in the order in which they apply; empty if there are none."""

    rules: list[RuleDetails]


class SetRulesRequest(StrictRequest):
    """All rules that the API sets."""

    rules: list[StatementRuleSettings] = Field(max_length=MAX_RULES, description="The rules in their order.")


class AddRuleRequest(StrictRequest):
    """A new rule."""

    rule: StatementRuleSettings
    before: str | None = Field(None, description="The rule before which it is added; default: at the end.")


class CheckRulesRequest(StrictRequest):
    """A request of a client that is judged, but not run."""

    statement: str = Field(
        min_length=1, max_length=1_000_000, description="The text, which may have several statements."
    )
    command: Literal["query", "prepare", "execute"] = Field("query", description="How the client runs it.")
    user: str = Field("", max_length=64, description="The user.")
    database: str = Field("", max_length=64, description="The current database.")
    client: Annotated[str, AfterValidator(_check_ip)] | None = Field(
        None, description="The address of the client."
    )
    group: str = Field("", max_length=64, description="The group of nodes.")
    rules: list[StatementRuleSettings] | None = Field(
        None, max_length=MAX_RULES, description="The rules; default: those in force."
    )

    @property
    def request(self) -> dict[str, Any]:
        """The request, as the engine reads it."""
        return self.model_dump(mode="json", exclude={"rules"})

    @property
    def rule_list(self) -> list[StatementRule] | None:
        return None if self.rules is None else [rule.as_rule for rule in self.rules]


class CheckedStatement(ResponseModel):
    """A statement of the text."""

    text: str = Field(description="The text without comments, which `pattern` must match.")
    normalized: str = Field(description="The normalized text, which `normalized` must match.")
    digest: str = Field(description="The digest.")


class RuleHit(ResponseModel):
    """A rule that applies to a statement."""

    rule: str = Field(description="Name of the rule.")
    dry_run: bool = Field(description="Whether it has no effect.")


class ClientError(ResponseModel):
    """The error that the client gets."""

    code: int
    state: str = Field(description="The SQLSTATE.")
    message: str


class CheckResult(ResponseModel):
    """What would happen to the request."""

    statements: list[CheckedStatement]
    hits: list[RuleHit] = Field(description="The rules that apply, in order, for each statement.")
    error: ClientError | None = Field(description="The error that the client gets; null: it gets none.")
    text: str | None = Field(description="The text that the node gets; null: that of the client.")
    limits: list[str] = Field(description="The rules whose limits must allow the request.")
    must_log: bool = Field(description="Whether the statement log contains it in any case.")
