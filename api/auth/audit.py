"""Who changed what, from where, and what came of it: for each write an event `audit.<verb>`, also in the log.

A request's body is never told: it may hold what nobody else is to know. Nor is everything that a caller had
refused, or each login: who sends many would wash away what others did.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from api.auth.caller import ANONYMOUS, Caller
from api.auth.credentials import PREFIX
from api.auth.policy import LOGIN, LOGOUT
from api.auth.rate_limit import Buckets
from controlplane.model.nodes import NOTHING

_SUBJECTS = ("address", "id", "envoy")  # path parameters that name what is acted on, in this order

_TOKEN = re.compile(rf"{PREFIX}[A-Za-z0-9_-]+")
_LONGEST_SUBJECT = 255  # characters
_PER_SECOND, _AT_ONCE = 1.0, 10.0  # refusals and logins that are told of one caller
_CALLERS = 512

Note = Callable[[str, str, str, Mapping[str, Any]], None]


class Auditor:
    """Tells of writes. `routes`: those of the app, as they are when a request comes."""

    def __init__(
        self,
        note: Note,
        routes: Callable[[], list[BaseRoute]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._routes, self._clock = note, routes, clock
        self._telling = Buckets(_CALLERS)

    def ended(self, scope: Scope, caller: Caller, status: int) -> None:
        """A write was let in, and answered with this status."""
        if "endpoint" not in scope or scope["path"] in (LOGIN, LOGOUT):
            return  # there is nothing at that path; and what becomes of a login is told where it is known
        outcome = scope["state"].get("audit_outcome") or ("done" if status < 400 else "failed")
        self._tell(scope, scope["endpoint"].__name__, caller, outcome, status)

    def refused(self, scope: Scope, caller: Caller, status: int) -> None:
        """A write by a caller that we know was not let in."""
        if scope["path"] in (LOGIN, LOGOUT) or self._is_much(caller):
            return
        for route in _flat(self._routes()):
            match, found = route.matches(scope)
            if match is Match.FULL and "endpoint" in found:
                about = {**scope, "path_params": found.get("path_params", {})}
                self._tell(about, found["endpoint"].__name__, caller, "refused", status)
                return

    def logged_in(self, caller: Caller, verb: str = "login") -> None:
        """A person has shown a token in the console, or has left it."""
        if caller.name == ANONYMOUS or self._is_much(caller):
            return
        data = {"who": caller.name, "role": caller.role.value, "from": caller.origin, "outcome": "done"}
        message = f"{caller.name} ({caller.role.value}, from {caller.origin}): {verb}"
        self._note(f"audit.{verb}", caller.name, message, data)

    def _is_much(self, caller: Caller) -> bool:
        return self._telling.take((caller.name, caller.origin), _PER_SECOND, _AT_ONCE, self._clock()) > 0

    def _tell(self, scope: Mapping[str, Any], verb: str, caller: Caller, outcome: str, status: int) -> None:
        parameters = scope.get("path_params", NOTHING)
        named = next((str(parameters[key]) for key in _SUBJECTS if key in parameters), scope["path"])
        subject = _tellable(scope.get("state", {}).get("audit_subject") or named)
        who = f"{caller.name} ({caller.role.value}, from {caller.origin or 'nowhere'})"
        data = {
            "who": caller.name,
            "role": caller.role.value,
            "from": caller.origin,
            "outcome": outcome,
            "status": status,
        }
        message = f"{who}: {verb.replace('_', ' ')} {subject}: {outcome}"
        self._note(f"audit.{verb}", subject, message, data)


def _tellable(subject: str) -> str:
    """What somebody asked for, as it may be told: not at any length, and without a token in a path."""
    return _TOKEN.sub(f"{PREFIX}...", subject)[:_LONGEST_SUBJECT]


def _flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """All routes, also those of routers that the app includes, which FastAPI keeps as one route each."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from _flat(included.routes)
