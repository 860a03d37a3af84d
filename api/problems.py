"""Errors as RFC 9457 `application/problem+json`: the table of problem types, and the exception handlers.

`type` is a URN that never changes, so that programs can compare it; docs/reference/api.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from controlplane.config.rule_checks import RuleEngineUnavailable
from controlplane.errors import (
    AmbiguousSession,
    CaptureRunning,
    CapturesOff,
    ConfigError,
    ConfigErrors,
    EnvoyConnected,
    InvalidRules,
    ModuleRequired,
    NodeExists,
    RolloutRejected,
    RuleExists,
    StateUnavailable,
    TidevoyError,
    UnknownEnvoy,
    UnknownGroup,
    UnknownNode,
    UnknownRollout,
    UnknownRule,
    UnknownSession,
    UnknownVerification,
)

MEDIA_TYPE = "application/problem+json"


class ProblemKind(Enum):
    """The problem types. The name in kebab case is the last part of the `type` URN."""

    INVALID_REQUEST = (422, "The request contains an invalid value")
    BAD_CONFIGURATION = (422, "The configuration is invalid")
    UNKNOWN_NODE = (404, "No node has that address")
    NODE_EXISTS = (409, "The node already exists")
    UNKNOWN_ENVOY = (404, "No Envoy has that id")
    UNKNOWN_SESSION = (404, "No session has that id")
    AMBIGUOUS_SESSION = (409, "The id means several sessions")
    ENVOY_CONNECTED = (409, "The Envoy is still connected")
    NEEDS_MODULE = (409, "The operation requires Tidevoy's module in every Envoy")
    UNKNOWN_RULE = (404, "No rule has that name")
    RULE_EXISTS = (409, "A rule has that name already")
    CAPTURE_RUNNING = (409, "A capture is running")
    CAPTURES_OFF = (409, "The settings do not allow captures")
    UNKNOWN_GROUP = (404, "No group has that name")
    UNKNOWN_ROLLOUT = (404, "No rollout has that id")
    UNKNOWN_VERIFICATION = (404, "The rollout has no comparison of that node")
    ROLLOUT_PRECONDITION_FAILED = (409, "The rollout cannot be started or continued in the current state")
    UNAUTHENTICATED = (401, "The caller is not authenticated")
    FORBIDDEN = (403, "The caller is not authorized for this operation")
    FOREIGN_ORIGIN = (403, "A web page of another origin may not change anything")
    NOT_FOUND = (404, "This path does not exist")
    METHOD_NOT_ALLOWED = (405, "This path does not support that method")
    TOO_LARGE = (413, "The request body is too large")
    UNSUPPORTED_MEDIA_TYPE = (415, "The request body is not JSON")
    MISDIRECTED = (421, "The requested host name is not allowed")
    TOO_MANY_REQUESTS = (429, "The caller sends too many requests")
    INTERNAL = (500, "An internal error occurred in the control plane")
    UNAVAILABLE = (503, "The operation is temporarily unavailable")
    NOT_READY = (503, "The control plane is not ready")

    def __init__(self, status: int, title: str) -> None:
        """`status` is the status of the HTTP response."""
        self.status, self.title = status, title

    @property
    def type(self) -> str:
        return f"urn:tidevoy:problem:{self.name.lower().replace('_', '-')}"


WRITE_PROBLEMS = (ProblemKind.INVALID_REQUEST, ProblemKind.UNAVAILABLE, ProblemKind.FOREIGN_ORIGIN)
"""The problems that any write request may get."""
BODY_PROBLEMS = (*WRITE_PROBLEMS, ProblemKind.TOO_LARGE, ProblemKind.UNSUPPORTED_MEDIA_TYPE)
"""The problems that any request with a body may get."""


class FieldProblem(BaseModel):
    """One invalid value."""

    field: str = Field(description="Path of the value in the request, e.g. `labels.zone`.")
    problem: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="The problem type, a URN that never changes.")
    title: str = Field(description="Summary of the problem type; the same for all problems of one type.")
    status: int = Field(description="The HTTP status of the response.")
    detail: str = Field(description="What went wrong, and what to do.")
    instance: str | None = Field(None, description="The requested path.")
    errors: list[FieldProblem] | None = Field(None, description="The invalid values.")
    reasons: list[str] | None = Field(None, description="The reasons as a list.")


class ProblemError(Exception):
    """An error that a route raises when the control plane has no specific error class for the problem."""

    def __init__(self, kind: ProblemKind, detail: str, *, reasons: list[str] | None = None) -> None:
        self.kind, self.detail, self.reasons = kind, detail, reasons
        super().__init__(detail)


def problem_response(
    request: Request,
    kind: ProblemKind,
    detail: str,
    *,
    errors: list[FieldProblem] | None = None,
    reasons: list[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response for one problem."""
    problem = ProblemDetails(
        type=kind.type,
        title=kind.title,
        status=kind.status,
        detail=detail,
        instance=request.url.path,
        errors=errors,
        reasons=reasons,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        kind.status,
        dict(headers) if headers else None,
        media_type=MEDIA_TYPE,
    )


def openapi_responses(*kinds: ProblemKind) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route for these problems; always includes 500."""
    by_status: dict[int, list[str]] = {}
    for kind in (*kinds, ProblemKind.INTERNAL):
        by_status.setdefault(kind.status, []).append(kind.title)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {
        status: {"description": "; or: ".join(titles), "content": content}
        for status, titles in sorted(by_status.items())
    }


def install(app: FastAPI) -> None:
    """Register the handlers that convert every error to a problem response."""
    for error_class in (ProblemError, TidevoyError, RequestValidationError, HTTPException):
        app.add_exception_handler(error_class, error_response)
    app.add_exception_handler(Exception, _on_unexpected_error)


_KIND_BY_ERROR: Mapping[type[TidevoyError], ProblemKind] = {
    UnknownNode: ProblemKind.UNKNOWN_NODE,
    NodeExists: ProblemKind.NODE_EXISTS,
    ModuleRequired: ProblemKind.NEEDS_MODULE,
    UnknownEnvoy: ProblemKind.UNKNOWN_ENVOY,
    UnknownSession: ProblemKind.UNKNOWN_SESSION,
    AmbiguousSession: ProblemKind.AMBIGUOUS_SESSION,
    EnvoyConnected: ProblemKind.ENVOY_CONNECTED,
    UnknownRollout: ProblemKind.UNKNOWN_ROLLOUT,
    UnknownVerification: ProblemKind.UNKNOWN_VERIFICATION,
    UnknownRule: ProblemKind.UNKNOWN_RULE,
    RuleExists: ProblemKind.RULE_EXISTS,
    CaptureRunning: ProblemKind.CAPTURE_RUNNING,
    CapturesOff: ProblemKind.CAPTURES_OFF,
    UnknownGroup: ProblemKind.UNKNOWN_GROUP,
    RuleEngineUnavailable: ProblemKind.UNAVAILABLE,
    RolloutRejected: ProblemKind.ROLLOUT_PRECONDITION_FAILED,
}


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an error that is meant for callers; re-raise any other error."""
    match error:
        case ProblemError():
            return problem_response(request, error.kind, error.detail, reasons=error.reasons)
        case RequestValidationError():
            errors = [_field_problem(entry) for entry in error.errors()]
            detail = "; ".join(f"{entry.field}: {entry.problem}" for entry in errors)
            return problem_response(request, ProblemKind.INVALID_REQUEST, detail, errors=errors)
        case HTTPException():
            return _http_error_response(request, error)
        case ConfigError():
            config_errors = error.errors if isinstance(error, ConfigErrors) else (error,)
            errors = [
                FieldProblem(field=each.key or each.where, problem=each.problem) for each in config_errors
            ]
            return problem_response(request, ProblemKind.BAD_CONFIGURATION, str(error), errors=errors)
        case InvalidRules():
            errors = [FieldProblem(field=place, problem=problem) for place, problem in error.problems]
            return problem_response(request, ProblemKind.INVALID_REQUEST, str(error), errors=errors)
        case TidevoyError() if type(error) in _KIND_BY_ERROR:
            reasons = list(error.problems) if isinstance(error, RolloutRejected) else None
            return problem_response(request, _KIND_BY_ERROR[type(error)], str(error), reasons=reasons)
        case StateUnavailable() | TidevoyError(retryable=True):
            headers = {"Retry-After": "1"} if error.retryable else None
            return problem_response(request, ProblemKind.UNAVAILABLE, str(error), headers=headers)
        case _:
            raise error


def _field_problem(entry: Mapping[str, Any]) -> FieldProblem:
    location, *path = entry["loc"]
    if entry["type"] == "json_invalid":
        return FieldProblem(field="body", problem=f"not JSON: {entry['ctx']['error']}")
    problem = str(entry["ctx"]["error"]) if entry["type"] == "value_error" else entry["msg"]
    if path and path[-1] == "[key]":  # pydantic's mark for an invalid key, as opposed to an invalid value
        return FieldProblem(
            field=".".join(str(part) for part in path[:-1]), problem=f"invalid name: {problem}"
        )
    return FieldProblem(field=".".join(str(part) for part in path) or location, problem=problem)


def _http_error_response(request: Request, error: HTTPException) -> JSONResponse:
    path = request.url.path
    match error.status_code:
        case 404:
            detail = f"{path} does not exist; /openapi.json lists all paths"
            return problem_response(request, ProblemKind.NOT_FOUND, detail)
        case 405:
            allowed = ", ".join(_allowed_methods(request)) or (error.headers or {}).get("Allow", "")
            detail = f"{path} does not support {request.method}; it supports {allowed}"
            headers = {"Allow": allowed}
            return problem_response(request, ProblemKind.METHOD_NOT_ALLOWED, detail, headers=headers)
        case 413:
            return problem_response(request, ProblemKind.TOO_LARGE, error.detail, headers=error.headers)
        case _:
            detail = "the request cannot be read"
            return problem_response(request, ProblemKind.INVALID_REQUEST, detail, headers=error.headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return all methods of the path; the framework reports only those of the first matching route."""
    route = request.scope.get("route")
    operations = request.app.openapi()["paths"].get(getattr(route, "path_format", None), {})
    return sorted(method.upper() for method in operations)


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # The server logs the error with its traceback; the response must not reveal internals.
    detail = "this is a bug in Tidevoy; see the control plane's log for details"
    return problem_response(request, ProblemKind.INTERNAL, detail)
