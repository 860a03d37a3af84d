"""`/v1/rules`: the rules that block, limit, rewrite or log statements."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import EngineDep, RequireJsonBody
from api.problems import BODY_PROBLEMS, WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas.rules import AddRuleRequest, CheckResult, CheckRulesRequest, RuleList, SetRulesRequest
from controlplane.engine.engine import Engine

router = APIRouter(tags=["rules"])

_RuleName = Annotated[str, Path(description="Name of the rule.", min_length=1)]


def _list(engine: Engine) -> RuleList:
    return RuleList.model_validate({"rules": engine.cluster.rules()})


@router.get(
    "/v1/rules",
    summary="List the rules for statements",
    description="In the order in which they apply: those that the API has set, then those of the settings. A"
    " rule that the API has set replaces one of the settings with the same name.",
    responses=openapi_responses(),
)
async def list_rules(engine: EngineDep) -> RuleList:
    return _list(engine)


@router.put(
    "/v1/rules",
    summary="Set all rules of the API",
    description="Replaces all rules that the API has set; those of the settings stay. If a rule cannot be"
    " used, nothing changes.",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(*BODY_PROBLEMS),
)
async def set_rules(engine: EngineDep, body: SetRulesRequest) -> RuleList:
    await engine.rules.replace([rule.as_rule for rule in body.rules])
    return _list(engine)


@router.post(
    "/v1/rules",
    summary="Add a rule",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(ProblemKind.UNKNOWN_RULE, ProblemKind.RULE_EXISTS, *BODY_PROBLEMS),
)
async def add_rule(engine: EngineDep, body: AddRuleRequest) -> RuleList:
    await engine.rules.add(body.rule.as_rule, body.before)
    return _list(engine)


# Before the route with a name, so that the methods of this path are found.
@router.post(
    "/v1/rules/check",
    summary="Show what the rules would do to a statement",
    description="With the rules in force, or with other ones. Nothing runs, and nothing is counted.",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(*BODY_PROBLEMS),
)
async def check_rules(engine: EngineDep, body: CheckRulesRequest) -> CheckResult:
    return CheckResult.model_validate(await engine.rules.check(body.request, body.rule_list))


@router.delete(
    "/v1/rules/{name}",
    summary="Remove a rule that the API has set",
    responses=openapi_responses(ProblemKind.UNKNOWN_RULE, *WRITE_PROBLEMS),
)
async def remove_rule(engine: EngineDep, name: _RuleName) -> RuleList:
    await engine.rules.remove(name)
    return _list(engine)
