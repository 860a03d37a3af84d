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
_MAX_SHARE_RATIO, _MIN_SHARE_RATIO = 4.0, 1 / 64
# However few connections are expected, weights are made for so many a node, and for more where the emptiest
# would get over `_MOST` times their part of all: else they would get nearly all when clients come at once, or
# when nobody corrects the weights any more.
_MIN_EXPECTED_PER_NODE = 0.7
# Weights move in steps of this ratio, so that noise in the counts does not push an update to every Envoy.
_WEIGHT_STEP_RATIO = 2 ** (1 / 4)
# EDS weights are integers; capacities from 1 still have room for all steps.
_WEIGHT_SCALE = 16
# What a node that joins gets of its share at first.
_RAMP_START_SHARE = 0.1
_RAMP_STEPS = 10


class WeightedNode(NamedTuple):
    """A node in service.

    `capacity` in any unit, connections that are `live` (None: not known), and by how much it counts for less
    than its capacity, above 0 and at most 1: what slow start and vital signs leave of it.
    """

    address: str
    capacity: int
    sessions: int | None
    capacity_factor: float = 1.0


def ramp(active_for: float, window: float) -> float:
    """How much of its share a node gets `active_for` seconds after it came into service, in coarse steps."""
    if window <= 0 or active_for >= window:
        return 1.0
    done = math.floor(max(active_for, 0.0) / window * _RAMP_STEPS) / _RAMP_STEPS
    return _RAMP_START_SHARE + (1 - _RAMP_START_SHARE) * done


def weight_ratio(weight: int, capacity: int) -> float:
    """By how much a weight favours a node over its capacity share: what `weights` takes as `previous`."""
    return weight / (capacity * _WEIGHT_SCALE)


def compute_weights(
    nodes: Sequence[WeightedNode], expected_connections: float, previous_ratios: Mapping[str, float]
) -> dict[str, int]:
    """EDS weight (>= 1) by address.

    `expected` is how many connections arrive until the next weights take effect. A favour in `previous` is
    kept while the new one differs by less than a step.
    """
    if not nodes:
        return {}
    capacities = [v.capacity * v.capacity_factor for v in nodes]
    total_capacity = sum(capacities)
    known = [width for v, width in zip(nodes, capacities, strict=True) if v.sessions is not None]
    # A node whose count is unknown is taken to be as full as the others, so that it gets its plain share.
    mean_load = sum(v.sessions or 0 for v in nodes) / sum(known) if known else 0.0
    current = [
        float(v.sessions) if v.sessions is not None else mean_load * w
        for v, w in zip(nodes, capacities, strict=True)
    ]
    incoming = max(expected_connections, _MIN_EXPECTED_PER_NODE * len(nodes))
    reached_level = water_level(capacities, current, incoming)
    lowest = min(held / width for held, width in zip(current, capacities, strict=True))
    if (reached_level - lowest) * total_capacity > _MAX_SHARE_RATIO * incoming:
        incoming = min_volume(capacities, current, _MAX_SHARE_RATIO)
        reached_level = water_level(capacities, current, incoming)
    max_factor = max(v.capacity_factor for v in nodes)
    result = {}
    for node, width, held in zip(nodes, capacities, current, strict=True):
        share = (reached_level * width - held) * total_capacity / (incoming * width)
        bounded = (
            _MIN_SHARE_RATIO
            if share < _MIN_SHARE_RATIO
            else _MAX_SHARE_RATIO
            if share > _MAX_SHARE_RATIO
            else share
        )
        factor = _round_to_step(
            bounded * node.capacity_factor / max_factor, previous_ratios.get(node.address)
        )
        result[node.address] = round(node.capacity * _WEIGHT_SCALE * factor) or 1
    return result


def water_level(capacities: Sequence[float], current: Sequence[float], incoming: float) -> float:
    """The level (connections per unit of width) that the water reaches: sum(max(0, L*w - f)) == poured."""
    levels = [f / w for f, w in zip(current, capacities, strict=True)]
    total_capacity, total_sessions = sum(capacities), sum(current) + incoming
    receiving: Sequence[int] = range(len(capacities))
    while True:
        level = total_sessions / total_capacity
        above_level = [i for i in receiving if levels[i] > level]
        if not above_level:
            return level
        # What stands above the level takes none of the water, which so reaches less high for the others.
        total_capacity -= sum(capacities[i] for i in above_level)
        total_sessions -= sum(current[i] for i in above_level)
        receiving = [i for i in receiving if levels[i] <= level]


def min_volume(capacities: Sequence[float], current: Sequence[float], max_ratio: float) -> float:
    """The least water of which, and of any more, no vessel takes over `most` times its part by width."""
    total_capacity = sum(capacities)
    nodes = sorted((f / w, w, f) for f, w in zip(current, capacities, strict=True))
    lowest = nodes[0][0]
    width = volume = incoming = 0.0
    for index, (_, node_capacity, node_sessions) in enumerate(nodes):
        width += node_capacity
        volume += node_sessions
        # Of so much the lowest takes `most` times its part, if just these vessels take any.
        slope = max_ratio / total_capacity - 1 / width
        if slope > 0:
            incoming = max(0.0, (volume / width - lowest) / slope)
            if (
                index + 1 == len(nodes)
                or lowest + max_ratio * incoming / total_capacity <= nodes[index + 1][0]
            ):
                break
    return incoming


def _round_to_step(wanted: float, previous: float | None) -> float:
    if previous is not None and 1 / _WEIGHT_STEP_RATIO < wanted / previous < _WEIGHT_STEP_RATIO:
        return previous
    return float(_WEIGHT_STEP_RATIO ** round(math.log(wanted, _WEIGHT_STEP_RATIO)))
