"""What the doors know while the control plane runs: keys in force, sources, limits, figures."""

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

log = structlog.get_logger("tidevoy.doors")

_REQUEST_BURST_FACTOR = 5  # times the requests of a second that a caller may send together
_ANONYMOUS_REQUESTS_PER_SECOND = (
    20.0  # requests a second of an address for what is open to all, where others have to say who they are
)
_MAX_TRACKED_CALLERS = 4096  # whose requests are counted
_SOURCE_EVENTS_PER_SECOND, _SOURCE_EVENT_BURST = 1.0, 1.0  # refusals told of one source ...
_MAX_EVENTS_PER_SECOND = 5.0  # ... and of all


class AccessController:
    """Lets requests in or refuses them. All methods belong to the event loop of the engine."""

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
            "tidevoy_api_refused",
            "Requests and connections that the REST API's doors refused, by reason.",
            ["reason"],
            registry=engine.registry,
        )
        Gauge(
            "tidevoy_api_connections", "Open connections to the REST API.", registry=engine.registry
        ).set_function(lambda: self.sources.connections)
        Gauge(
            "tidevoy_api_sources_shut_out",
            "Addresses that the REST API takes no connections from at the moment.",
            registry=engine.registry,
        ).set_function(lambda: len(self.sources.banned_sources(self._clock())))

    @property
    def api(self) -> ApiSettings:
        """The settings in force."""
        return self._engine.settings.api

    @property
    def requires_auth(self) -> bool:
        """Whether callers have to say who they are."""
        return self.api.requires_auth

    @property
    def now(self) -> float:
        """The time of the doors' clock, in seconds."""
        return self._clock()

    def evaluate(self, request: AuthRequest) -> Caller | Denial:
        """Who calls, or why not; changes nothing. For the first look at a connection."""
        api = self.api
        if api is not self._api:  # it is replaced as a whole by a reload
            self._api, self._credentials = api, CredentialStore(api)
        return authorize(request, api, self._credentials)

    def authorize(self, request: AuthRequest) -> Caller | Denial:
        """Who calls, or why not; counts the request against what its caller may ask for, let in or not."""
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
            after = {"Retry-After": str(int(wait) + 1)}
            return Denial(
                ProblemKind.TOO_MANY_REQUESTS,
                "rate",
                detail,
                after,
                caller=caller,
                penalize_source=is_untrusted,
            )
        if self.requires_auth and not is_untrusted:
            self.sources.mark_trusted(source_key(request.client_ip), self.now)
        return verdict

    def record_denial(self, client_ip: str, reason: str, *, penalize_source: bool = True) -> None:
        """Something from that address was refused: it is counted, told, and may shut the address out."""
        source = source_key(client_ip)
        self._denials.labels(reason).inc()
        if not penalize_source or not self.requires_auth:
            return
        now = self.now
        if seconds := self.sources.record_denial(source, self.api.limits, now):
            self.on_ban()
            self._emit("audit.shut_out", source, f"nothing is taken from {source} for {seconds:g} s", reason)
        elif self._source_event_rates.take(source, _SOURCE_EVENTS_PER_SECOND, _SOURCE_EVENT_BURST, now):
            self._suppressed_events += 1
        else:
            self._emit("audit.unauthenticated", source, f"a caller from {source} was refused", reason)

    def is_trusted(self, client_ip: str) -> bool:
        """Whether a right token or certificate came from that address lately."""
        return self.sources.is_trusted(source_key(client_ip), self.now)

    def count_rejected_connection(self, reason: str) -> None:
        """A connection was closed before anything was read of it."""
        self._denials.labels(reason).inc()

    def _emit(self, kind: str, source: str, message: str, reason: str) -> None:
        if self._event_rate.take(_MAX_EVENTS_PER_SECOND, _MAX_EVENTS_PER_SECOND, self.now):
            self._suppressed_events += 1
            return
        more = (
            f"; {self._suppressed_events} more were refused since the last such message"
            if self._suppressed_events
            else ""
        )
        data = {"who": ANONYMOUS, "role": None, "from": source, "outcome": "refused", "reason": reason}
        self._engine.record_event(kind, source, f"{message} ({reason.replace('_', ' ')}){more}", data)
        self._suppressed_events = 0
