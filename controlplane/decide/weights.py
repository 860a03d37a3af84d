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

# A share may differ from a node's capacity share by this factor at most: facts may be late or wrong, and a
# node that gets nothing, or everything, could not show it.
_REACH = 4.0
# Weights move in steps of this ratio, so that noise in the counts does not push an update to every Envoy.
_STEP = 2 ** (1 / 4)
# EDS weights are integers; capacities from 1 still have room for all steps.
_SCALE = 16
# What a node that joins gets of its share at first.
_RAMP_START = 0.1
_RAMP_STEPS = 10


class Vessel(NamedTuple):
    """A node in service: capacity (any unit), live connections (None: not known), ramp from 0 to 1."""

    address: str
    capacity: int
    live: int | None
    ramp: float = 1.0


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

    `expected` is how many connections arrive until the next weights take effect; at least one a node is
    assumed. A favour in `previous` is kept while the new one differs by less than a step.
    """
    if not vessels:
        return {}
    capacity = sum(v.capacity for v in vessels)
    known = [v for v in vessels if v.live is not None]
    known_capacity = sum(v.capacity for v in known)
    # A node whose count is unknown is taken to be as full as the others, so that it gets its plain share.
    level = sum(v.live or 0 for v in known) / known_capacity if known else 0.0
    filled = [float(v.live) if v.live is not None else level * v.capacity for v in vessels]
    poured = max(expected, 0.1 * sum(filled), float(len(vessels)))
    surface = _surface([v.capacity for v in vessels], filled, poured)
    full = max(v.ramp for v in vessels)
    result = {}
    for vessel, held in zip(vessels, filled, strict=True):
        fair = poured * vessel.capacity / capacity
        share = (surface * vessel.capacity - held) / fair
        bounded = 1 / _REACH if share < 1 / _REACH else _REACH if share > _REACH else share
        factor = _stepped(bounded * vessel.ramp / full, previous.get(vessel.address))
        result[vessel.address] = round(vessel.capacity * _SCALE * factor) or 1
    return result


def _surface(capacities: Sequence[int], filled: Sequence[float], poured: float) -> float:
    """The level (connections per unit of capacity) that the water reaches: sum(max(0, L*c - f)) == poured."""
    order = sorted(range(len(filled)), key=lambda i: filled[i] / capacities[i])
    width = volume = 0.0
    for position, i in enumerate(order):
        width += capacities[i]
        volume += filled[i]
        level = (poured + volume) / width
        following = order[position + 1] if position + 1 < len(order) else None
        if following is None or level <= filled[following] / capacities[following]:
            return level
    raise AssertionError("the last vessel always ends the loop")


def _stepped(wanted: float, held: float | None) -> float:
    if held is not None and 1 / _STEP < wanted / held < _STEP:
        return held
    return float(_STEP ** round(math.log(wanted, _STEP)))
