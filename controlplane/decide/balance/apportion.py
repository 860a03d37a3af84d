"""Divide an integer in proportion to weights with the largest remainder method. No I/O."""

from __future__ import annotations

from collections.abc import Mapping


def apportion(total: int, holders: Mapping[str, int], rotation: int = 0) -> dict[str, int]:
    """Divide `total` in proportion to what each holder has, and never give a holder more than that.

    Each holder gets its quota rounded down; those with the largest remainders get one more. Ties are broken
    by name, starting from another name for each `rotation`. Holders that get nothing are left out.
    """
    held_total = sum(holders.values())
    total = min(total, held_total)
    if total <= 0:
        return {}
    quotas = {name: divmod(total * held, held_total) for name, held in holders.items()}
    leftover = total - sum(quota for quota, _ in quotas.values())
    names = sorted(quotas)
    first = rotation % len(names)
    rotated = names[first:] + names[:first]
    rounded_up = set(sorted(rotated, key=lambda name: -quotas[name][1])[:leftover])
    shares = {name: quotas[name][0] + (name in rounded_up) for name in names}
    return {name: share for name, share in shares.items() if share}
