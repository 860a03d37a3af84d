"""What the doors know while the control plane runs: keys in force, sources, limits, figures."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from prometheus_client import Counter, Gauge

from api.auth.caller import ANONYMOUS, Caller
from api.auth.credentials import KeyRing
from api.auth.policy import Asked, Refusal, decide
from api.auth.rate_limit import Bucket, Buckets
from api.auth.source_tracker import Sources, source_of
from api.problems import Kind
from controlplane.config.api import Api
from controlplane.engine.engine import Engine

log = structlog.get_logger("tidevoy.doors")

_AT_ONCE = 5  # times the requests of a second that a caller may send together
_ANONYMOUS = (
    20.0  # requests a second of an address for what is open to all, where others have to say who they are
)
_CALLERS = 4096  # whose requests are counted
_TOLD_PER_SECOND, _TOLD_AT_ONCE = 1.0, 1.0  # refusals told of one source ...
_TOLD_OF_ALL = 5.0  # ... and of all


class Doorkeeper:
    """Lets requests in or refuses them. All methods belong to the event loop of the engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self.sources = Sources()
        self.on_ban: Callable[[], None] = lambda: None
        self._api: Api | None = None
        self._keys = KeyRing(Api())
        self._callers = Buckets(_CALLERS)
        self._telling = Buckets(_CALLERS)
        self._telling_of_all = Bucket(_TOLD_OF_ALL, clock())
        self._untold = 0
        self._refused = Counter(
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
        ).set_function(lambda: len(self.sources.banned(self._clock())))

    @property
    def api(self) -> Api:
        """The settings in force."""
        return self._engine.settings.api

    @property
    def asks(self) -> bool:
        """Whether callers have to say who they are."""
        return self.api.asks

    @property
    def now(self) -> float:
        """The time of the doors' clock, in seconds."""
        return self._clock()

    def look(self, asked: Asked) -> Caller | Refusal:
        """Who calls, or why not; changes nothing. For the first look at a connection."""
        api = self.api
        if api is not self._api:  # it is replaced as a whole by a reload
            self._api, self._keys = api, KeyRing(api)
        return decide(asked, api, self._keys)

    def admit(self, asked: Asked) -> Caller | Refusal:
        """Who calls, or why not; counts the request against what its caller may ask for, let in or not."""
        verdict = self.look(asked)
        caller = verdict.caller if isinstance(verdict, Refusal) else verdict
        if caller is None:
            return verdict
        rate, key = float(self.api.limits.requests_per_second), (caller.name, "")
        is_stranger = self.asks and caller.name == ANONYMOUS
        if caller.name == ANONYMOUS:
            key = (ANONYMOUS, source_of(caller.origin))
        if is_stranger:
            rate = min(rate, _ANONYMOUS)
        if wait := self._callers.take(key, rate, _AT_ONCE * rate, self.now):
            detail = f"{caller.name} sends more than {rate:g} requests a second; send fewer (api.limits)"
            after = {"Retry-After": str(int(wait) + 1)}
            return Refusal(Kind.TOO_MANY_REQUESTS, "rate", detail, after, caller=caller, counts=is_stranger)
        if self.asks and not is_stranger:
            self.sources.welcome(source_of(asked.origin), self.now)
        return verdict

    def refused(self, origin: str, reason: str, *, counts: bool = True) -> None:
        """Something from that address was refused: it is counted, told, and may shut the address out."""
        source = source_of(origin)
        self._refused.labels(reason).inc()
        if not counts or not self.asks:
            return
        now = self.now
        if seconds := self.sources.refuse(source, self.api.limits, now):
            self.on_ban()
            self._tell("audit.shut_out", source, f"nothing is taken from {source} for {seconds:g} s", reason)
        elif self._telling.take(source, _TOLD_PER_SECOND, _TOLD_AT_ONCE, now):
            self._untold += 1
        else:
            self._tell("audit.unauthenticated", source, f"a caller from {source} was refused", reason)

    def knows(self, origin: str) -> bool:
        """Whether a right token or certificate came from that address lately."""
        return self.sources.is_known(source_of(origin), self.now)

    def turned_away(self, reason: str) -> None:
        """A connection was closed before anything was read of it."""
        self._refused.labels(reason).inc()

    def _tell(self, kind: str, source: str, message: str, reason: str) -> None:
        if self._telling_of_all.take(_TOLD_OF_ALL, _TOLD_OF_ALL, self.now):
            self._untold += 1
            return
        more = f"; {self._untold} more were refused since the last such message" if self._untold else ""
        data = {"who": ANONYMOUS, "role": None, "from": source, "outcome": "refused", "reason": reason}
        self._engine.note(kind, source, f"{message} ({reason.replace('_', ' ')}){more}", data)
        self._untold = 0
