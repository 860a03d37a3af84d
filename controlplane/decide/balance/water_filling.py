"""Least connections over the whole fleet, as weights for Envoy's weighted pick. No I/O.

Envoys distribute new connections in proportion to the weights alone (their configuration ignores their own
connection counts). The weights therefore distribute the connections that are expected until the next
weights arrive, by water-filling: each node is a vessel as wide as its capacity and filled with its current
connections; the share of a node is the part of the incoming water that its vessel takes up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Limits of a node's share relative to its capacity share: facts may be late or wrong, and a node that gets
# no or all connections could not show it. Too few connections for a while do less harm than too many.
_MAX_SHARE_RATIO, _MIN_SHARE_RATIO = 4.0, 1 / 64
# Weights assume at least this many new connections per node, and more if the emptiest node would otherwise
# exceed `_MAX_SHARE_RATIO`: it would get nearly all connections in a burst or while weights are not updated.
_MIN_EXPECTED_PER_NODE = 0.7
# Weights change in steps of this ratio, so that noise in the counts does not push an update to every Envoy.
_WEIGHT_STEP_RATIO = 2 ** (1 / 4)
# EDS weights are integers; this scale leaves room for all steps from capacity 1 upwards.
_WEIGHT_SCALE = 16
# The part of its share that a node starts with in its slow start.
_RAMP_START_SHARE = 0.1
_RAMP_STEPS = 10


class WeightedNode(NamedTuple):
    """A node in service.

    `capacity` is in any unit, `sessions` is None if unknown, and `capacity_factor` (above 0, at most 1) is
    what slow start and resource factors leave of the capacity.
    """

    address: str
    capacity: int
    sessions: int | None
    capacity_factor: float = 1.0


def ramp(active_for: float, window: float) -> float:
    """Return the part of its share that a node gets `active_for` seconds after entering service, in steps."""
    if window <= 0 or active_for >= window:
        return 1.0
    progress = math.floor(max(active_for, 0.0) / window * _RAMP_STEPS) / _RAMP_STEPS
    return _RAMP_START_SHARE + (1 - _RAMP_START_SHARE) * progress


def weight_ratio(weight: int, capacity: int) -> float:
    """Return the ratio of a weight to the capacity share, as `compute_weights` takes in `previous_ratios`."""
    return weight / (capacity * _WEIGHT_SCALE)


def compute_weights(
    nodes: Sequence[WeightedNode], expected_connections: float, previous_ratios: Mapping[str, float]
) -> dict[str, int]:
    """Return the EDS weight (>= 1) by address.

    `expected_connections` is how many connections arrive until the next weights take effect. A ratio in
    `previous_ratios` is kept while the new one differs by less than a step.
    """
    if not nodes:
        return {}
    capacities = [node.capacity * node.capacity_factor for node in nodes]
    total_capacity = sum(capacities)
    counted = [c for node, c in zip(nodes, capacities, strict=True) if node.sessions is not None]
    # A node with an unknown count is assumed to be as full as the others, so that it gets its capacity share.
    mean_load = sum(node.sessions or 0 for node in nodes) / sum(counted) if counted else 0.0
    current = [
        float(node.sessions) if node.sessions is not None else mean_load * capacity
        for node, capacity in zip(nodes, capacities, strict=True)
    ]
    incoming = max(expected_connections, _MIN_EXPECTED_PER_NODE * len(nodes))
    reached_level = water_level(capacities, current, incoming)
    lowest = min(held / capacity for held, capacity in zip(current, capacities, strict=True))
    if (reached_level - lowest) * total_capacity > _MAX_SHARE_RATIO * incoming:
        incoming = min_volume(capacities, current, _MAX_SHARE_RATIO)
        reached_level = water_level(capacities, current, incoming)
    max_factor = max(node.capacity_factor for node in nodes)
    weights = {}
    for node, capacity, held in zip(nodes, capacities, current, strict=True):
        share = (reached_level * capacity - held) * total_capacity / (incoming * capacity)
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
        weights[node.address] = round(node.capacity * _WEIGHT_SCALE * factor) or 1
    return weights


def water_level(capacities: Sequence[float], current: Sequence[float], incoming: float) -> float:
    """Return the level L (connections per capacity) with sum(max(0, L * capacity - current)) == incoming."""
    levels = [held / capacity for held, capacity in zip(current, capacities, strict=True)]
    total_capacity, total_sessions = sum(capacities), sum(current) + incoming
    receiving: Sequence[int] = range(len(capacities))
    while True:
        level = total_sessions / total_capacity
        above_level = [i for i in receiving if levels[i] > level]
        if not above_level:
            return level
        # A node above the level takes no water; leaving it out lowers the level of the others.
        total_capacity -= sum(capacities[i] for i in above_level)
        total_sessions -= sum(current[i] for i in above_level)
        receiving = [i for i in receiving if levels[i] <= level]


def min_volume(capacities: Sequence[float], current: Sequence[float], max_ratio: float) -> float:
    """Return the volume from which on no node takes more than `max_ratio` times its capacity share."""
    total_capacity = sum(capacities)
    nodes = sorted(
        (held / capacity, capacity, held) for held, capacity in zip(current, capacities, strict=True)
    )
    lowest = nodes[0][0]
    filled_capacity = filled_sessions = incoming = 0.0
    for index, (_, node_capacity, node_sessions) in enumerate(nodes):
        filled_capacity += node_capacity
        filled_sessions += node_sessions
        # Of this volume the lowest node takes `max_ratio` times its share, if only the nodes so far take any.
        slope = max_ratio / total_capacity - 1 / filled_capacity
        if slope > 0:
            incoming = max(0.0, (filled_sessions / filled_capacity - lowest) / slope)
            if (
                index + 1 == len(nodes)
                or lowest + max_ratio * incoming / total_capacity <= nodes[index + 1][0]
            ):
                break
    return incoming


def _round_to_step(ratio: float, previous: float | None) -> float:
    if previous is not None and 1 / _WEIGHT_STEP_RATIO < ratio / previous < _WEIGHT_STEP_RATIO:
        return previous
    return float(_WEIGHT_STEP_RATIO ** round(math.log(ratio, _WEIGHT_STEP_RATIO)))
