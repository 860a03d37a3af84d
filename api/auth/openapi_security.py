"""The security part of the OpenAPI document: how to authenticate, and the responses for denied requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from api.auth.credentials import COOKIE_NAME
from api.auth.policy import SAFE_METHODS, is_public
from api.problems import ProblemKind, openapi_responses
from controlplane.config.api import ApiSettings

_SECURITY_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer TOKEN`."},
    "cookie": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE_NAME,
        "description": "The same token, as `POST /login` sets it for browsers.",
    },
    "certificate": {"type": "mutualTLS", "description": "A certificate that api.clients names."},
}


def add_security(document: dict[str, Any], api: ApiSettings) -> dict[str, Any]:
    """Return the document with security schemes and denial responses, as the current settings require."""
    schemes = [*(["token", "cookie"] if api.tokens else []), *(["certificate"] if api.clients else [])]
    paths = {
        path: {
            method: _secured_operation(operation, path, method, api)
            for method, operation in operations.items()
        }
        for path, operations in document["paths"].items()
    }
    if not schemes:
        return {**document, "paths": paths}
    components = {
        **document["components"],
        "securitySchemes": {scheme: _SECURITY_SCHEMES[scheme] for scheme in schemes},
    }
    security: list[dict[str, list[str]]] = [{scheme: []} for scheme in schemes]
    return {**document, "paths": paths, "components": components, "security": security}


def _secured_operation(operation: dict[str, Any], path: str, method: str, api: ApiSettings) -> dict[str, Any]:
    denials = {
        str(status): response
        for status, response in openapi_responses(*_denial_kinds(path, method, api)).items()
    }
    responses = {**operation["responses"], **denials}
    secured = {**operation, "responses": dict(sorted(responses.items()))}
    return secured | {"security": []} if api.requires_auth and is_public(path, api) else secured


def _denial_kinds(path: str, method: str, api: ApiSettings) -> Iterator[ProblemKind]:
    if api.requires_auth:
        yield ProblemKind.TOO_MANY_REQUESTS
    else:
        yield ProblemKind.MISDIRECTED
    is_write = method.upper() not in SAFE_METHODS
    if is_write:
        yield ProblemKind.FOREIGN_ORIGIN
    if api.requires_auth and not is_public(path, api):
        yield ProblemKind.UNAUTHENTICATED
        if is_write:
            yield ProblemKind.FORBIDDEN
