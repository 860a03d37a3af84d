"""Track the source addresses of connections: open connections, trusted sources, and banned sources.

An address does not identify a caller: one address may have many callers, and one caller many addresses. It
is what can be checked before any data of a request is read. All tables are bounded.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass

from api.auth.rate_limit import TokenBucket, TokenBuckets
from controlplane.config.api import ApiLimitSettings

_DENIAL_BURST_FACTOR = 15  # denials before a ban, as a multiple of the allowed denials per second
_INITIAL_BAN_SECONDS, _MAX_BAN_SECONDS = 10.0, 60.0
_BAN_MEMORY_SECONDS = 600.0  # after this time without a ban, the next ban has the initial duration again
_TRUST_SECONDS = 3600.0  # a source stays trusted for this long after a valid token or certificate
_MAX_TRACKED_SOURCES = 4096  # in the table of denials and in the table of trusted sources
MAX_BANS = 256  # sources that are banned at the same time
_UNTRUSTED_CONNECTION_SHARE = 0.75  # of all connections; the rest is reserved for trusted sources
_UNTRUSTED_CONNECTIONS_PER_SECOND = 100.0  # from all untrusted sources together; also the burst size


def source_key(ip: str) -> str:
    """Return the part of an address that a caller cannot freely choose: IPv4 address, or the /64 of IPv6."""
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
    """The sources of connections. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._connection_counts: Counter[str] = Counter()
        self._denial_rates = TokenBuckets(_MAX_TRACKED_SOURCES)
        self._trusted_until: OrderedDict[str, float] = OrderedDict()
        self._bans: OrderedDict[str, _Ban] = OrderedDict()
        self._untrusted_rate: TokenBucket | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._connection_counts.total()

    def admit_connection(
        self, source: str, limits: ApiLimitSettings, now: float, *, requires_auth: bool
    ) -> str:
        """Count a new connection, or return the reason to reject it.

        An empty reason admits the connection; call `release_connection` when it ends. Without
        `requires_auth`, all sources are trusted.
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
        """Remove a closed connection from the count of its source."""
        self._connection_counts[source] -= 1
        if self._connection_counts[source] <= 0:
            del self._connection_counts[source]

    def is_trusted(self, source: str, now: float) -> bool:
        """Whether valid credentials recently came from the source."""
        return self._trusted_until.get(source, now) > now

    def mark_trusted(self, source: str, now: float) -> None:
        """Record that valid credentials came from the source."""
        self._trusted_until[source] = now + _TRUST_SECONDS
        self._trusted_until.move_to_end(source)
        if len(self._trusted_until) > _MAX_TRACKED_SOURCES:
            self._trusted_until.popitem(last=False)

    def record_denial(self, source: str, limits: ApiLimitSettings, now: float) -> float:
        """Count a denial, and return the duration in seconds of the ban that it causes; 0: no new ban."""
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
        """Whether the source is banned at the moment."""
        ban = self._bans.get(source)
        return ban is not None and now < ban.until

    def banned_sources(self, now: float) -> list[str]:
        """Return the sources that are banned at the moment."""
        return [source for source, ban in self._bans.items() if now < ban.until]

    def next_ban_end(self, now: float) -> float | None:
        """Return the time when the next ban ends; None: no source is banned."""
        return min((ban.until for ban in self._bans.values() if now < ban.until), default=None)
