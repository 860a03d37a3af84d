"""Access control of the REST API at run time: current credentials, rate limit, and counts of denials."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge

from api.auth.caller import ANONYMOUS, Caller
from api.auth.credentials import CredentialStore
from api.auth.policy import AuthRequest, Denial, authorize
from api.auth.rate_limit import TokenBuckets
from api.problems import ProblemKind
from controlplane.config.api import ApiSettings
from controlplane.engine.engine import Engine

_BURST_SECONDS = 5  # a network may send the requests of this many seconds at once
_MAX_TRACKED_NETWORKS = 4096
_EVENT_INTERVAL_SECONDS = 1.0  # minimum time between two events about unauthenticated requests


class AccessController:
    """Admit or deny requests. All methods must run in the event loop of the engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._engine = engine
        self._clock = clock
        self._api: ApiSettings | None = None
        self._credentials = CredentialStore(ApiSettings())
        self._unauthenticated_rates = TokenBuckets(_MAX_TRACKED_NETWORKS, clock)
        self._last_event_at = -math.inf
        self._suppressed_events = 0
        self._denials = Counter(
            "tidevoy_api_denied",
            "Requests that the REST API denied, by reason.",
            ["reason"],
            registry=engine.registry,
        )
        self.connections = Gauge(
            "tidevoy_api_connections", "Open connections to the REST API.", registry=engine.registry
        )

    @property
    def api(self) -> ApiSettings:
        """The current settings of the REST API."""
        return self._engine.settings.api

    @property
    def requires_auth(self) -> bool:
        """Whether callers must authenticate."""
        return self.api.requires_auth

    def authorize(self, request: AuthRequest) -> Caller | Denial:
        """Return the caller or the denial, without counting the request."""
        api = self.api
        if api is not self._api:  # a reload replaces the settings object
            self._api, self._credentials = api, CredentialStore(api)
        return authorize(request, api, self._credentials)

    def admit(self, request: AuthRequest) -> Caller | Denial:
        """Return the caller or the denial, and limit the rate of unauthenticated requests per network.

        Requests with valid credentials are never limited: callers behind one NAT must not lock each other
        out, and a token has too many bits to be guessed at any rate.
        """
        verdict = self.authorize(request)
        caller = verdict.caller if isinstance(verdict, Denial) else verdict
        if not self.requires_auth or (caller is not None and caller.name != ANONYMOUS):
            return verdict
        network, rate = client_network(request.client_ip), self.api.limits.unauthenticated_requests_per_second
        wait = self._unauthenticated_rates.take(network, rate, _BURST_SECONDS * rate)
        if not wait:
            return verdict
        detail = f"{network} sends more than {rate} requests a second without a valid token; send fewer"
        headers = {"Retry-After": str(math.ceil(wait))}
        return Denial(ProblemKind.TOO_MANY_REQUESTS, "rate", detail, headers)

    def record_denial(self, client_ip: str, denial: Denial) -> None:
        """Count a denied request, and report it in an event if it lacks valid credentials."""
        self._denials.labels(denial.reason).inc()
        if denial.kind is not ProblemKind.UNAUTHENTICATED:
            return
        now = self._clock()
        if now < self._last_event_at + _EVENT_INTERVAL_SECONDS:
            self._suppressed_events += 1
            return
        network, reason = client_network(client_ip), denial.reason
        message = f"a request from {network} was denied ({reason.replace('_', ' ')})"
        if self._suppressed_events:
            message += f"; {self._suppressed_events} more denials since the last such message"
        caller = {"principal": ANONYMOUS, "role": None, "client_address": network}
        data = {**caller, "outcome": "refused", "reason": reason}
        self._engine.events.emit("audit.unauthenticated", network, message, data)
        self._last_event_at, self._suppressed_events = now, 0


def client_network(ip: str) -> str:
    """Return the part of an address that a client cannot choose: IPv4 address or IPv6 /64 network."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return "unknown address"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
