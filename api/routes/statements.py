"""`/v1/statements`: statistics of statements."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.dependencies import EngineDep
from api.problems import ProblemKind, openapi_responses
from api.schemas.statements import StatementList, StatementListQuery, build_statement_list

router = APIRouter(tags=["statements"])


@router.get(
    "/v1/statements",
    summary="List the statements with the most time, executions, errors or rows",
    description="Statistics of all Envoys with the module, as they reported them in the last seconds."
    " `statements.digests` must be on.",
    responses=openapi_responses(ProblemKind.INVALID_REQUEST),
)
async def list_statements(engine: EngineDep, query: Annotated[StatementListQuery, Query()]) -> StatementList:
    return build_statement_list(await engine.statements.list(query.as_query, query.window))
