"""How bad one node's vital signs are: levels from 0 (normal) to 2, with hysteresis. Pure.

The levels are TiProxy's (its `factor_health.go` and `factor_memory.go`). What it does with them is not ours:
see `resource_factors`. A sign that is not known, or not any more, has no level at all.
"""

from __future__ import annotations

import math
from dataclasses import replace

from controlplane.model.node_metrics import Reading, Vitals

# Seconds for which a reading counts.
CPU_LASTS = 120.0
OTHERS_LAST = 60.0

_PD_ABNORMAL = 0.5
_TIKV_ABNORMAL = 0.3
_NORMAL = 0.1  # of both: at most so many of the requests fail

_HIGH, _HIGH_BACK = 0.75, 0.70  # of the memory that it may use: level 2, and until when
_RAISED, _RAISED_BACK = 0.60, 0.55  # level 1
_FULL = 0.90  # here it may be killed
_HASTE, _HASTE_BACK = 45.0, 60.0  # seconds to that: level 2, and until when
_SOON, _SOON_BACK = 180.0, 240.0  # level 1
_TYPICAL = 0.6  # growth counts for less where less than this is used, and for more where more is
_CALM_GROWTH = (_FULL - _RAISED_BACK) / _SOON_BACK * _TYPICAL / _RAISED_BACK


def fresh(reading: Reading | None, now: float, lasts: float) -> float | None:
    """What a reading says, while it counts."""
    return reading.value if reading is not None and now - reading.at <= lasts else None


def is_calm(vitals: Vitals, now: float) -> bool:
    """Whether both levels are surely 0, whatever they were: what nearly all nodes are, told cheaply."""
    pd, tikv, memory = vitals.pd_failures, vitals.tikv_failures, vitals.memory
    if pd is None or tikv is None or memory is None:
        return False
    oldest = now - OTHERS_LAST
    return (
        pd.value <= _NORMAL
        and pd.at >= oldest
        and tikv.value <= _NORMAL
        and tikv.at >= oldest
        and memory.value <= _RAISED_BACK
        and memory.at >= oldest
        and vitals.memory_growth <= _CALM_GROWTH
    )


def health(vitals: Vitals, was: int, now: float) -> int | None:
    """0 or 2, by how many requests to PD and to TiKV fail. The worse of the two counts.

    Between the two bounds it stays as it was.
    """
    pd = fresh(vitals.pd_failures, now, OTHERS_LAST)
    tikv = fresh(vitals.tikv_failures, now, OTHERS_LAST)
    if pd is None and tikv is None:
        return None
    pd, tikv = pd or 0.0, tikv or 0.0
    if pd >= _PD_ABNORMAL or tikv >= _TIKV_ABNORMAL:
        return 2
    return 0 if pd <= _NORMAL and tikv <= _NORMAL else was


def memory(vitals: Vitals, was: int, now: float) -> int | None:
    """0, 1 or 2, by the memory in use and by how soon there will be none left."""
    used = fresh(vitals.memory, now, OTHERS_LAST)
    if used is None:
        return None
    left = seconds_left(used, vitals.memory_growth)
    if used > _HIGH or left < _HASTE:
        return 2
    if was >= 2 and (used > _HIGH_BACK or left < _HASTE_BACK):
        return 2
    if used > _RAISED or left < _SOON:
        return 1
    return 1 if was >= 1 and (used > _RAISED_BACK or left < _SOON_BACK) else 0


def current(vitals: Vitals, now: float) -> Vitals | None:
    """What is still known of a node; None: nothing is."""

    def still(reading: Reading | None, lasts: float) -> Reading | None:
        return reading if fresh(reading, now, lasts) is not None else None

    cpu, memory = still(vitals.cpu, CPU_LASTS), still(vitals.memory, OTHERS_LAST)
    pd, tikv = still(vitals.pd_failures, OTHERS_LAST), still(vitals.tikv_failures, OTHERS_LAST)
    if cpu is memory is pd is tikv is None:
        return None
    return replace(vitals, cpu=cpu, memory=memory, pd_failures=pd, tikv_failures=tikv)


def cpu(vitals: Vitals, now: float) -> float | None:
    """CPU used, as a part of what the node may use."""
    return fresh(vitals.cpu, now, CPU_LASTS)


def seconds_left(used: float, growth: float) -> float:
    """Until the node may be killed for its memory, at the pace at which it takes more."""
    if growth <= 0 or used <= 0:
        return math.inf
    return max(_FULL - used, 0.0) / growth * _TYPICAL / used


def is_urgent(vitals: Vitals, now: float) -> bool:
    """Whether the node may soon be killed for its memory."""
    used = fresh(vitals.memory, now, OTHERS_LAST)
    return used is not None and seconds_left(used, vitals.memory_growth) < _HASTE


def failing(vitals: Vitals, now: float) -> str:
    """What a level of health is given for, in words."""
    return " and ".join(_failures(vitals, now, above=_NORMAL))


def failures(vitals: Vitals, now: float) -> str:
    """What is known of a node's health, in words; empty when nothing is."""
    return " and ".join(_failures(vitals, now, above=-1.0))


def _failures(vitals: Vitals, now: float, *, above: float) -> list[str]:
    return [
        f"{100 * value:.0f} failures for each 100 requests to {name}"
        for name, reading in (("PD", vitals.pd_failures), ("TiKV", vitals.tikv_failures))
        if (value := fresh(reading, now, OTHERS_LAST)) is not None and value > above
    ]


def filling(vitals: Vitals, now: float) -> str:
    """What a level of memory is given for, in words."""
    used = fresh(vitals.memory, now, OTHERS_LAST)
    if used is None:
        return ""
    left = seconds_left(used, vitals.memory_growth)
    soon = f", and none is left in {left:.0f} s at this pace" if left < _SOON_BACK else ""
    return f"{used:.0%} of its memory is in use{soon}"
