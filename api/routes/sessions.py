"""`/v1/sessions`: list live sessions, and end one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from api.dependencies import EngineDep
from api.problems import WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas.sessions import (
    MAX_ID,
    EndSessionQuery,
    SessionDetails,
    SessionList,
    SessionListQuery,
    build_session_list,
)

router = APIRouter(tags=["sessions"])

_SessionId = Annotated[
    int, Path(ge=1, le=MAX_ID, description="Id from the client's handshake, or at its present node.")
]


@router.get(
    "/v1/sessions",
    summary="List the live sessions of all Envoys",
    description="Asks all Envoys with the module, and waits for at most 2 s. Busy sessions come first.",
    responses=openapi_responses(ProblemKind.INVALID_REQUEST, ProblemKind.UNKNOWN_ENVOY),
)
async def list_sessions(engine: EngineDep, query: Annotated[SessionListQuery, Query()]) -> SessionList:
    listing = await engine.sessions.list(query.as_query)
    return build_session_list(listing, engine.cluster.now())


@router.delete(
    "/v1/sessions/{id}",
    summary="End a session",
    description="An idle session gets an error for its next command. If the id means several sessions, or an"
    " Envoy does not answer, no session is ended.",
    responses=openapi_responses(
        ProblemKind.UNKNOWN_SESSION,
        ProblemKind.UNKNOWN_ENVOY,
        ProblemKind.AMBIGUOUS_SESSION,
        *WRITE_PROBLEMS,
    ),
)
async def end_session(
    engine: EngineDep, id: _SessionId, query: Annotated[EndSessionQuery, Query()]
) -> SessionDetails:
    session = await engine.sessions.end(id, query.envoy)
    return SessionDetails.read(session, datetime.fromtimestamp(engine.cluster.now(), UTC))
