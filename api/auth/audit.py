"""Audit events: each write emits and logs an event `audit.<verb>` with caller, address, and outcome.

Request bodies are never recorded, because they may contain secrets. Events about denials and logins are
rate-limited per caller: otherwise one caller could flood the log and displace the events of other callers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from api.auth.caller import ANONYMOUS, Caller
from api.auth.credentials import TOKEN_PREFIX
from api.auth.policy import LOGIN_PATH, LOGOUT_PATH
from api.auth.rate_limit import TokenBuckets
from controlplane.model.nodes import EMPTY_MAP

_SUBJECT_PARAMETERS = ("address", "id", "envoy")  # path parameters that identify the subject, by priority

_TOKEN_PATTERN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]+")
_MAX_SUBJECT_LENGTH = 255  # characters
_EVENTS_PER_SECOND, _EVENT_BURST = 1.0, 10.0  # denial and login events for one caller
_MAX_TRACKED_CALLERS = 512

RecordEvent = Callable[[str, str, str, Mapping[str, Any]], None]


class Auditor:
    """Record writes as audit events. `routes` returns the current routes of the app."""

    def __init__(
        self,
        record_event: RecordEvent,
        routes: Callable[[], list[BaseRoute]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record_event, self._routes = record_event, routes
        self._event_rates = TokenBuckets(_MAX_TRACKED_CALLERS, clock)

    def record_write(self, scope: Scope, caller: Caller, status: int) -> None:
        """Record an authorized write that was answered with this status."""
        if "endpoint" not in scope or scope["path"] in (LOGIN_PATH, LOGOUT_PATH):
            return  # no route matched, or the route of the login or logout itself records the request
        outcome = scope["state"].get("audit_outcome") or ("done" if status < 400 else "failed")
        self._emit(scope, scope["endpoint"].__name__, caller, outcome, status)

    def record_denial(self, scope: Scope, caller: Caller, status: int) -> None:
        """Record a denied write by an authenticated caller."""
        if scope["path"] in (LOGIN_PATH, LOGOUT_PATH) or self._is_rate_limited(caller):
            return
        for route in _iter_routes(self._routes()):
            match, child_scope = route.matches(scope)
            if match is Match.FULL and "endpoint" in child_scope:
                denied_scope = {**scope, "path_params": child_scope.get("path_params", {})}
                self._emit(denied_scope, child_scope["endpoint"].__name__, caller, "refused", status)
                return

    def record_login(self, caller: Caller, verb: str = "login") -> None:
        """Record a login to the console or, with the verb `logout`, a logout from it."""
        if caller.name == ANONYMOUS or self._is_rate_limited(caller):
            return
        self._record(verb, caller.name, caller, verb, outcome="done")

    def _is_rate_limited(self, caller: Caller) -> bool:
        key = (caller.name, caller.client_ip)
        return self._event_rates.take(key, _EVENTS_PER_SECOND, _EVENT_BURST) > 0

    def _emit(self, scope: Mapping[str, Any], verb: str, caller: Caller, outcome: str, status: int) -> None:
        parameters = scope.get("path_params", EMPTY_MAP)
        default_subject = next(
            (str(parameters[key]) for key in _SUBJECT_PARAMETERS if key in parameters), scope["path"]
        )
        subject = _redacted_subject(scope.get("state", {}).get("audit_subject") or default_subject)
        text = f"{verb.replace('_', ' ')} {subject}: {outcome}"
        self._record(verb, subject, caller, text, outcome=outcome, status=status)

    def _record(self, verb: str, subject: str, caller: Caller, text: str, **data: Any) -> None:
        origin = caller.client_ip or "unknown address"
        message = f"{caller.name} ({caller.role.value}, from {origin}): {text}"
        data |= {"principal": caller.name, "role": caller.role.value, "client_address": caller.client_ip}
        self._record_event(f"audit.{verb}", subject, message, data)


def _redacted_subject(subject: str) -> str:
    """Truncate the subject, and mask a token that a path may contain."""
    return _TOKEN_PATTERN.sub(f"{TOKEN_PREFIX}...", subject)[:_MAX_SUBJECT_LENGTH]


def _iter_routes(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Iterate over all routes. FastAPI keeps an included router as one route, so its routes are unpacked."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from _iter_routes(included.routes)
