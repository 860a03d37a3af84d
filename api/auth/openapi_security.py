"""What the OpenAPI document says of the doors: how to say who is calling, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from api.auth.credentials import COOKIE
from api.auth.policy import is_open
from api.problems import Kind, declared
from controlplane.config.api import Api

_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer TOKEN`."},
    "cookie": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "The same token, as `POST /login` sets it for browsers.",
    },
    "certificate": {"type": "mutualTLS", "description": "A certificate that api.clients names."},
}


def describe(document: dict[str, Any], api: Api) -> dict[str, Any]:
    """The document with what the doors add to each operation, as the settings in force have it."""
    ways = [*(["token", "cookie"] if api.tokens else []), *(["certificate"] if api.clients else [])]
    paths = {
        path: {method: _operation(found, path, method, api) for method, found in operations.items()}
        for path, operations in document["paths"].items()
    }
    if not ways:
        return {**document, "paths": paths}
    components = {**document["components"], "securitySchemes": {way: _SCHEMES[way] for way in ways}}
    return {**document, "paths": paths, "components": components, "security": [{way: []} for way in ways]}


def _operation(found: dict[str, Any], path: str, method: str, api: Api) -> dict[str, Any]:
    added = {str(status): text for status, text in declared(*_refusals(path, method, api)).items()}
    responses = {**found["responses"], **added}
    operation = {**found, "responses": dict(sorted(responses.items()))}
    return operation | {"security": []} if api.asks and is_open(path, api) else operation


def _refusals(path: str, method: str, api: Api) -> Iterator[Kind]:
    yield Kind.TOO_MANY_REQUESTS
    yield Kind.TOO_SLOW
    if not api.asks:
        yield Kind.MISDIRECTED
    if method not in ("get", "head", "options"):
        yield Kind.FOREIGN_ORIGIN
    if api.asks and not is_open(path, api):
        yield Kind.UNAUTHENTICATED
        if method not in ("get", "head", "options"):
            yield Kind.FORBIDDEN
