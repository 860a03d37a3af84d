"""Access control of the REST API at run time: current credentials, client sources, rate limits, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from prometheus_client import Counter, Gauge

from api.auth.caller import ANONYMOUS, Caller
from api.auth.credentials import CredentialStore
from api.auth.policy import AuthRequest, Denial, authorize
from api.auth.rate_limit import TokenBucket, TokenBuckets
from api.auth.source_tracker import SourceTracker, source_key
from api.problems import ProblemKind
from controlplane.config.api import ApiSettings
from controlplane.engine.engine import Engine

log = structlog.get_logger("tidevoy.auth")

_REQUEST_BURST_FACTOR = 5  # burst size, as a multiple of the requests per second
# Limit per source address for public paths, where authentication is required for all others.
_ANONYMOUS_REQUESTS_PER_SECOND = 20.0
_MAX_TRACKED_CALLERS = 4096
_SOURCE_EVENTS_PER_SECOND, _SOURCE_EVENT_BURST = 1.0, 1.0  # denial events for one source ...
_MAX_EVENTS_PER_SECOND = 5.0  # ... and for all sources together


class AccessController:
    """Admit or deny requests. All methods must run in the event loop of the engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self.sources = SourceTracker()
        self.on_ban: Callable[[], None] = lambda: None
        self._api: ApiSettings | None = None
        self._credentials = CredentialStore(ApiSettings())
        self._request_rates = TokenBuckets(_MAX_TRACKED_CALLERS)
        self._source_event_rates = TokenBuckets(_MAX_TRACKED_CALLERS)
        self._event_rate = TokenBucket(_MAX_EVENTS_PER_SECOND, clock())
        self._suppressed_events = 0
        self._denials = Counter(
            "tidevoy_api_denied",
            "Requests and connections that the REST API denied, by reason.",
            ["reason"],
            registry=engine.registry,
        )
        Gauge(
            "tidevoy_api_connections", "Open connections to the REST API.", registry=engine.registry
        ).set_function(lambda: self.sources.connections)
        Gauge(
            "tidevoy_api_banned_sources",
            "Addresses that are banned from the REST API at the moment.",
            registry=engine.registry,
        ).set_function(lambda: len(self.sources.banned_sources(self._clock())))

    @property
    def api(self) -> ApiSettings:
        """The current settings of the REST API."""
        return self._engine.settings.api

    @property
    def requires_auth(self) -> bool:
        """Whether callers must authenticate."""
        return self.api.requires_auth

    @property
    def now(self) -> float:
        """The time of the monotonic clock, in seconds."""
        return self._clock()

    def evaluate(self, request: AuthRequest) -> Caller | Denial:
        """Return the caller or the denial without counting the request; for a connection's first head."""
        api = self.api
        if api is not self._api:  # a reload replaces the settings object
            self._api, self._credentials = api, CredentialStore(api)
        return authorize(request, api, self._credentials)

    def authorize(self, request: AuthRequest) -> Caller | Denial:
        """Return the caller or the denial, and count the request against the caller's rate limit."""
        verdict = self.evaluate(request)
        caller = verdict.caller if isinstance(verdict, Denial) else verdict
        if caller is None:
            return verdict
        rate, key = float(self.api.limits.requests_per_second), (caller.name, "")
        is_untrusted = self.requires_auth and caller.name == ANONYMOUS
        if caller.name == ANONYMOUS:
            key = (ANONYMOUS, source_key(caller.client_ip))
        if is_untrusted:
            rate = min(rate, _ANONYMOUS_REQUESTS_PER_SECOND)
        if wait := self._request_rates.take(key, rate, _REQUEST_BURST_FACTOR * rate, self.now):
            detail = f"{caller.name} sends more than {rate:g} requests a second; send fewer (api.limits)"
            headers = {"Retry-After": str(int(wait) + 1)}
            return Denial(
                ProblemKind.TOO_MANY_REQUESTS,
                "rate",
                detail,
                headers,
                caller=caller,
                penalize_source=is_untrusted,
            )
        if self.requires_auth and not is_untrusted:
            self.sources.mark_trusted(source_key(request.client_ip), self.now)
        return verdict

    def record_denial(self, client_ip: str, reason: str, *, penalize_source: bool = True) -> None:
        """Count a denied request or connection, emit an event, and ban a source that has too many denials."""
        source = source_key(client_ip)
        self._denials.labels(reason).inc()
        if not penalize_source or not self.requires_auth:
            return
        now = self.now
        if seconds := self.sources.record_denial(source, self.api.limits, now):
            self.on_ban()
            message = f"connections from {source} are rejected for {seconds:g} s"
            self._emit("audit.source_banned", source, message, reason)
        elif self._source_event_rates.take(source, _SOURCE_EVENTS_PER_SECOND, _SOURCE_EVENT_BURST, now):
            self._suppressed_events += 1
        else:
            self._emit("audit.unauthenticated", source, f"a request from {source} was denied", reason)

    def is_trusted(self, client_ip: str) -> bool:
        """Whether a valid token or certificate recently came from that address."""
        return self.sources.is_trusted(source_key(client_ip), self.now)

    def count_rejected_connection(self, reason: str) -> None:
        """Count a connection that was closed before any data was read."""
        self._denials.labels(reason).inc()

    def _emit(self, kind: str, source: str, message: str, reason: str) -> None:
        if self._event_rate.take(_MAX_EVENTS_PER_SECOND, _MAX_EVENTS_PER_SECOND, self.now):
            self._suppressed_events += 1
            return
        suppressed = (
            f"; {self._suppressed_events} more denials since the last such message"
            if self._suppressed_events
            else ""
        )
        data = {"who": ANONYMOUS, "role": None, "from": source, "outcome": "refused", "reason": reason}
        self._engine.record_event(kind, source, f"{message} ({reason.replace('_', ' ')}){suppressed}", data)
        self._suppressed_events = 0
