"""Addresses that callers come from: how many connections each has, which are known, which are shut out.

Nothing here is about who somebody is: an address may have many callers, and a caller many addresses. It is
what can be judged before anything of a request has been read. All tables are bounded.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass

from api.auth.rate_limit import Bucket, Buckets
from controlplane.config.api import Limits

_REFUSALS_AT_ONCE = 15  # times the refusals of a second
_FIRST_BAN, _LONGEST_BAN = 10.0, 60.0  # seconds
_FORGIVEN_AFTER = 600.0  # seconds without a ban, after which the next one is a first one again
_KNOWN_FOR = 3600.0  # seconds that an address is known after a right token came from it
_MOST = 4096  # addresses of which refusals are remembered, and of which it is known that they are good
MOST_BANS = 256  # addresses that are shut out at a time
_FOR_STRANGERS = 0.75  # of all connections; the others are kept for addresses that are known
_STRANGERS = 100.0  # connections a second from addresses that are not known, all together; and at once


def source_of(ip: str) -> str:
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
    lasts: float


class Sources:
    """The addresses that connect, or tried to. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._refusals = Buckets(_MOST)
        self._known: OrderedDict[str, float] = OrderedDict()
        self._bans: OrderedDict[str, _Ban] = OrderedDict()
        self._strangers: Bucket | None = None

    @property
    def connections(self) -> int:
        """All that are open."""
        return self._open.total()

    def admits(self, source: str, limits: Limits, now: float, *, asks: bool) -> str:
        """Why no connection from there is taken; empty: it is, and `left` has to be called at its end.

        `asks`: callers have to say who they are. Where they have not, nobody is a stranger.
        """
        if self.is_banned(source, now):
            return "banned"
        is_stranger = asks and not self.is_known(source, now)
        room = _FOR_STRANGERS if is_stranger else 1.0
        if self.connections >= room * limits.connections:
            return "connections"
        if self._open[source] >= limits.connections_per_source:
            return "connections_of_source"
        if is_stranger:
            if self._strangers is None:
                self._strangers = Bucket(_STRANGERS, now)
            if self._strangers.take(_STRANGERS, _STRANGERS, now):
                return "strangers"
        self._open[source] += 1
        return ""

    def left(self, source: str) -> None:
        """A connection from there has ended."""
        self._open[source] -= 1
        if self._open[source] <= 0:
            del self._open[source]

    def is_known(self, source: str, now: float) -> bool:
        """Whether somebody there has lately shown that he is one of ours."""
        return self._known.get(source, now) > now

    def welcome(self, source: str, now: float) -> None:
        """Somebody there has shown that he is one of ours."""
        self._known[source] = now + _KNOWN_FOR
        self._known.move_to_end(source)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def refuse(self, source: str, limits: Limits, now: float) -> float:
        """Something from there was refused. Seconds for which it is shut out from now on; 0: it is not."""
        rate = float(limits.refusals_per_second)
        if self.is_banned(source, now) or not self._refusals.take(
            source, rate, _REFUSALS_AT_ONCE * rate, now
        ):
            return 0.0
        before = self._bans.pop(source, None)
        again = before is not None and now < before.until + _FORGIVEN_AFTER
        lasts = min(_LONGEST_BAN, 2 * before.lasts) if again and before is not None else _FIRST_BAN
        self._bans[source] = _Ban(now + lasts, lasts)
        if len(self._bans) > MOST_BANS:
            self._bans.popitem(last=False)
        return lasts

    def is_banned(self, source: str, now: float) -> bool:
        """Whether nothing is taken from there at the moment."""
        ban = self._bans.get(source)
        return ban is not None and now < ban.until

    def banned(self, now: float) -> list[str]:
        """The addresses that are shut out."""
        return [source for source, ban in self._bans.items() if now < ban.until]

    def next_end(self, now: float) -> float | None:
        """When the next ban ends; None: there is none."""
        return min((ban.until for ban in self._bans.values() if now < ban.until), default=None)
