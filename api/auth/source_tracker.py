"""Addresses that callers come from: how many connections each has, which are known, which are shut out.

Nothing here is about who somebody is: an address may have many callers, and a caller many addresses. It is
what can be judged before anything of a request has been read. All tables are bounded.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass

from api.auth.rate_limit import TokenBucket, TokenBuckets
from controlplane.config.api import ApiLimitSettings

_DENIAL_BURST_FACTOR = 15  # times the refusals of a second
_INITIAL_BAN_SECONDS, _MAX_BAN_SECONDS = 10.0, 60.0  # seconds
_BAN_MEMORY_SECONDS = 600.0  # seconds without a ban, after which the next one is a first one again
_TRUST_SECONDS = 3600.0  # seconds that an address is known after a right token came from it
_MAX_TRACKED_SOURCES = (
    4096  # addresses of which refusals are remembered, and of which it is known that they are good
)
MAX_BANS = 256  # addresses that are shut out at a time
_UNTRUSTED_CONNECTION_SHARE = 0.75  # of all connections; the others are kept for addresses that are known
_UNTRUSTED_CONNECTIONS_PER_SECOND = (
    100.0  # connections a second from addresses that are not known, all together; and at once
)


def source_key(ip: str) -> str:
    """What one caller cannot change at will: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ip
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return ip


@dataclass(frozen=True, slots=True)
class _Ban:
    until: float
    duration: float


class SourceTracker:
    """The addresses that connect, or tried to. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._connection_counts: Counter[str] = Counter()
        self._denial_rates = TokenBuckets(_MAX_TRACKED_SOURCES)
        self._trusted_until: OrderedDict[str, float] = OrderedDict()
        self._bans: OrderedDict[str, _Ban] = OrderedDict()
        self._untrusted_rate: TokenBucket | None = None

    @property
    def connections(self) -> int:
        """All that are open."""
        return self._connection_counts.total()

    def admit_connection(
        self, source: str, limits: ApiLimitSettings, now: float, *, requires_auth: bool
    ) -> str:
        """Why no connection from there is taken; empty: it is, and `left` has to be called at its end.

        `asks`: callers have to say who they are. Where they have not, nobody is a stranger.
        """
        if self.is_banned(source, now):
            return "banned"
        is_untrusted = requires_auth and not self.is_trusted(source, now)
        share = _UNTRUSTED_CONNECTION_SHARE if is_untrusted else 1.0
        if self.connections >= share * limits.connections:
            return "connections"
        if self._connection_counts[source] >= limits.connections_per_source:
            return "connections_of_source"
        if is_untrusted:
            if self._untrusted_rate is None:
                self._untrusted_rate = TokenBucket(_UNTRUSTED_CONNECTIONS_PER_SECOND, now)
            if self._untrusted_rate.take(
                _UNTRUSTED_CONNECTIONS_PER_SECOND, _UNTRUSTED_CONNECTIONS_PER_SECOND, now
            ):
                return "strangers"
        self._connection_counts[source] += 1
        return ""

    def release_connection(self, source: str) -> None:
        """A connection from there has ended."""
        self._connection_counts[source] -= 1
        if self._connection_counts[source] <= 0:
            del self._connection_counts[source]

    def is_trusted(self, source: str, now: float) -> bool:
        """Whether somebody there has lately shown that he is one of ours."""
        return self._trusted_until.get(source, now) > now

    def mark_trusted(self, source: str, now: float) -> None:
        """Somebody there has shown that he is one of ours."""
        self._trusted_until[source] = now + _TRUST_SECONDS
        self._trusted_until.move_to_end(source)
        if len(self._trusted_until) > _MAX_TRACKED_SOURCES:
            self._trusted_until.popitem(last=False)

    def record_denial(self, source: str, limits: ApiLimitSettings, now: float) -> float:
        """Something from there was refused. Seconds for which it is shut out from now on; 0: it is not."""
        rate = float(limits.refusals_per_second)
        if self.is_banned(source, now) or not self._denial_rates.take(
            source, rate, _DENIAL_BURST_FACTOR * rate, now
        ):
            return 0.0
        previous = self._bans.pop(source, None)
        is_repeated = previous is not None and now < previous.until + _BAN_MEMORY_SECONDS
        duration = (
            min(_MAX_BAN_SECONDS, 2 * previous.duration)
            if is_repeated and previous is not None
            else _INITIAL_BAN_SECONDS
        )
        self._bans[source] = _Ban(now + duration, duration)
        if len(self._bans) > MAX_BANS:
            self._bans.popitem(last=False)
        return duration

    def is_banned(self, source: str, now: float) -> bool:
        """Whether nothing is taken from there at the moment."""
        ban = self._bans.get(source)
        return ban is not None and now < ban.until

    def banned_sources(self, now: float) -> list[str]:
        """The addresses that are shut out."""
        return [source for source, ban in self._bans.items() if now < ban.until]

    def next_ban_end(self, now: float) -> float | None:
        """When the next ban ends; None: there is none."""
        return min((ban.until for ban in self._bans.values() if now < ban.until), default=None)
