"""Compute the weights with which all Envoys together balance by least connections. No I/O.

Envoys distribute new connections in proportion to the weights alone, and ignore their own connection counts.
The weights distribute the connections that are expected until the next weights arrive. The nodes' shares
come from water-filling: a node is like a vessel as wide as its capacity, its connections are the water in it,
and its share is the part of the expected water that flows into it if all vessels are connected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Limits of a node's share relative to its part of the total capacity, because facts may be late or wrong. Too
# few connections for a while do less harm than too many, so the lower limit is wider.
_MAX_SHARE_RATIO, _MIN_SHARE_RATIO = 4.0, 1 / 64
# Weights assume at least this many new connections per node, because otherwise the emptiest node would get
# nearly all connections of a burst. They assume more if this node would still exceed `_MAX_SHARE_RATIO`.
_MIN_EXPECTED_PER_NODE = 0.7
# Weights change in steps of this ratio, so that small changes of counts cause no update of every Envoy.
_WEIGHT_STEP_RATIO = 2 ** (1 / 4)
# A ratio stays if the new one differs by less than this many steps. It is slightly below 1, so that
# floating-point errors cannot keep a ratio that is a whole step off.
_STEPS_KEPT = 0.999
# EDS weights are integers. This scale leaves room for steps even at capacity 1.
_WEIGHT_SCALE = 16
# A node in slow start begins with this part of its share.
_RAMP_START_SHARE = 0.1
_RAMP_STEPS = 10


class WeightedNode(NamedTuple):
    """A node in service.

    `capacity` is the configured weight, and `sessions` is None if unknown. `capacity_factor` is the part of
    the capacity that remains after slow start and resource factors: above 0, at most 1.
    """

    address: str
    capacity: int
    sessions: int | None
    capacity_factor: float = 1.0


def ramp(active_for: float, window: float) -> float:
    """Return the part of its share that a node gets `active_for` seconds after it became active."""
    if window <= 0 or active_for >= window:
        return 1.0
    progress = math.floor(max(active_for, 0.0) / window * _RAMP_STEPS) / _RAMP_STEPS
    return _RAMP_START_SHARE + (1 - _RAMP_START_SHARE) * progress


def weight_ratio(weight: int, capacity: int) -> float:
    """Return the value for `previous_ratios` of `compute_weights` from a node's weight and capacity."""
    return weight / (capacity * _WEIGHT_SCALE)


def compute_weights(
    nodes: Sequence[WeightedNode], expected_connections: float, previous_ratios: Mapping[str, float]
) -> dict[str, int]:
    """Return the EDS weight (>= 1) by address.

    `expected_connections` arrive until the next weights take effect. A node keeps its ratio in
    `previous_ratios` if the new ratio differs by less than a step.
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
        incoming = min_incoming_connections(capacities, current, _MAX_SHARE_RATIO)
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
    """Return L, in connections per capacity, such that sum(max(0, L * capacity - current)) == incoming."""
    levels = [held / capacity for held, capacity in zip(current, capacities, strict=True)]
    total_capacity, total_sessions = sum(capacities), sum(current) + incoming
    receiving: Sequence[int] = range(len(capacities))
    while True:
        level = total_sessions / total_capacity
        above_level = [i for i in receiving if levels[i] > level]
        if not above_level:
            return level
        # A node above the level gets no connections. Without it, the level of the others is lower.
        total_capacity -= sum(capacities[i] for i in above_level)
        total_sessions -= sum(current[i] for i in above_level)
        receiving = [i for i in receiving if levels[i] <= level]


def min_incoming_connections(
    capacities: Sequence[float], current: Sequence[float], max_ratio: float
) -> float:
    """Return the least `incoming` with which no node gets over `max_ratio` times its part of the capacity."""
    total_capacity = sum(capacities)
    nodes = sorted(
        (held / capacity, capacity, held) for held, capacity in zip(current, capacities, strict=True)
    )
    lowest = nodes[0][0]
    filled_capacity = filled_sessions = incoming = 0.0
    for index, (_, node_capacity, node_sessions) in enumerate(nodes):
        filled_capacity += node_capacity
        filled_sessions += node_sessions
        # The `incoming` that gives the emptiest node its maximum, provided that no later node gets any.
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
    step = math.log(ratio, _WEIGHT_STEP_RATIO)
    if previous is not None:
        # Weights are integers, so `previous` may be slightly off its step.
        previous_step = round(math.log(previous, _WEIGHT_STEP_RATIO))
        if abs(step - previous_step) < _STEPS_KEPT:
            return float(_WEIGHT_STEP_RATIO**previous_step)
    return float(_WEIGHT_STEP_RATIO ** round(step))
