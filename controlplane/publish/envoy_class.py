"""Envoys of one class get the same bytes: which MySQL filter they have is what tells classes apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Registered name of contrib's filter, as `Node.extensions` lists it on builds that have it.
CONTRIB_FILTER = "envoy.filters.network.mysql_proxy"


@dataclass(frozen=True, slots=True)
class EnvoyClass:
    """What an Envoy's resources depend on beside plan and settings."""

    filter: Literal["contrib", "none"]


CONTRIB = EnvoyClass("contrib")
PLAIN = EnvoyClass("none")
CLASSES = (CONTRIB, PLAIN)


def choose(wanted: Literal["auto", "contrib", "none"], contrib: bool) -> EnvoyClass:
    """The class of an Envoy, from the setting `xds.filter` and whether it has the filter built in."""
    if wanted == "contrib" or (wanted == "auto" and contrib):
        return CONTRIB
    return PLAIN


def fallback(refused: EnvoyClass) -> EnvoyClass | None:
    """The next simpler class for an Envoy that refused its first listener; None when there is none."""
    return PLAIN if refused == CONTRIB else None
