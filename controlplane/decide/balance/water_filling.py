"""Least connections over the whole fleet, as weights for Envoy's weighted pick. Pure.

Envoys share new connections out in proportion to the weights alone (they are told to leave their own counts
out of it). The weights therefore aim at the connections that are expected until the next weights arrive:
imagine them poured over the nodes like water, each node a vessel as wide as its capacity and already filled
with the connections that it has. What each vessel takes up of the water is its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A share may differ from a node's capacity share by these factors at most: facts may be late or wrong, and
# a node that gets nothing, or everything, could not show it. To get nothing for a while does less harm.
_MOST, _LEAST = 4.0, 1 / 64
# However few connections are expected, weights are made for so many a node, and for more where the emptiest
# would get over `_MOST` times their part of all: else they would get nearly all when clients come at once, or
# when nobody corrects the weights any more.
_AT_LEAST = 0.7
# Weights move in steps of this ratio, so that noise in the counts does not push an update to every Envoy.
_STEP = 2 ** (1 / 4)
# EDS weights are integers; capacities from 1 still have room for all steps.
_SCALE = 16
# What a node that joins gets of its share at first.
_RAMP_START = 0.1
_RAMP_STEPS = 10


class Vessel(NamedTuple):
    """A node in service.

    `capacity` in any unit, connections that are `live` (None: not known), and by how much it counts for less
    than its capacity, above 0 and at most 1: what slow start and vital signs leave of it.
    """

    address: str
    capacity: int
    live: int | None
    part: float = 1.0


def ramp(active_for: float, window: float) -> float:
    """How much of its share a node gets `active_for` seconds after it came into service, in coarse steps."""
    if window <= 0 or active_for >= window:
        return 1.0
    done = math.floor(max(active_for, 0.0) / window * _RAMP_STEPS) / _RAMP_STEPS
    return _RAMP_START + (1 - _RAMP_START) * done


def favour(weight: int, capacity: int) -> float:
    """By how much a weight favours a node over its capacity share: what `weights` takes as `previous`."""
    return weight / (capacity * _SCALE)


def weights(vessels: Sequence[Vessel], expected: float, previous: Mapping[str, float]) -> dict[str, int]:
    """EDS weight (>= 1) by address.

    `expected` is how many connections arrive until the next weights take effect. A favour in `previous` is
    kept while the new one differs by less than a step.
    """
    if not vessels:
        return {}
    widths = [v.capacity * v.part for v in vessels]
    every = sum(widths)
    known = [width for v, width in zip(vessels, widths, strict=True) if v.live is not None]
    # A node whose count is unknown is taken to be as full as the others, so that it gets its plain share.
    level = sum(v.live or 0 for v in vessels) / sum(known) if known else 0.0
    filled = [
        float(v.live) if v.live is not None else level * w for v, w in zip(vessels, widths, strict=True)
    ]
    poured = max(expected, _AT_LEAST * len(vessels))
    height = surface(widths, filled, poured)
    lowest = min(held / width for held, width in zip(filled, widths, strict=True))
    if (height - lowest) * every > _MOST * poured:
        poured = enough(widths, filled, _MOST)
        height = surface(widths, filled, poured)
    fullest = max(v.part for v in vessels)
    result = {}
    for vessel, width, held in zip(vessels, widths, filled, strict=True):
        share = (height * width - held) * every / (poured * width)
        bounded = _LEAST if share < _LEAST else _MOST if share > _MOST else share
        factor = _stepped(bounded * vessel.part / fullest, previous.get(vessel.address))
        result[vessel.address] = round(vessel.capacity * _SCALE * factor) or 1
    return result


def surface(widths: Sequence[float], filled: Sequence[float], poured: float) -> float:
    """The level (connections per unit of width) that the water reaches: sum(max(0, L*w - f)) == poured."""
    heights = [f / w for f, w in zip(filled, widths, strict=True)]
    width, volume = sum(widths), sum(filled) + poured
    wet: Sequence[int] = range(len(widths))
    while True:
        level = volume / width
        dry = [i for i in wet if heights[i] > level]
        if not dry:
            return level
        # What stands above the level takes none of the water, which so reaches less high for the others.
        width -= sum(widths[i] for i in dry)
        volume -= sum(filled[i] for i in dry)
        wet = [i for i in wet if heights[i] <= level]


def enough(widths: Sequence[float], filled: Sequence[float], most: float) -> float:
    """The least water of which, and of any more, no vessel takes over `most` times its part by width."""
    every = sum(widths)
    vessels = sorted((f / w, w, f) for f, w in zip(filled, widths, strict=True))
    lowest = vessels[0][0]
    width = volume = poured = 0.0
    for index, (_, wide, held) in enumerate(vessels):
        width += wide
        volume += held
        # Of so much the lowest takes `most` times its part, if just these vessels take any.
        slope = most / every - 1 / width
        if slope > 0:
            poured = max(0.0, (volume / width - lowest) / slope)
            if index + 1 == len(vessels) or lowest + most * poured / every <= vessels[index + 1][0]:
                break
    return poured


def _stepped(wanted: float, held: float | None) -> float:
    if held is not None and 1 / _STEP < wanted / held < _STEP:
        return held
    return float(_STEP ** round(math.log(wanted, _STEP)))
