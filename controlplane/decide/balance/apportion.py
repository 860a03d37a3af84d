"""A whole number shared out in whole numbers, by the largest remainders. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def apportion(total: int, holders: Mapping[str, int], rotation: int = 0) -> dict[str, int]:
    """`total` shared out in proportion to what each holder has, and never more than that.

    Each gets its quota rounded down, and those with the largest remainders one more, of equal ones the first
    by name first; with each `turn` another is the first. Who gets none is left out.
    """
    held_total = sum(holders.values())
    total = min(total, held_total)
    if total <= 0:
        return {}
    quotas = {name: divmod(total * has, held_total) for name, has in holders.items()}
    left = total - sum(quota for quota, _ in quotas.values())
    names = sorted(quotas)
    first = rotation % len(names)
    rotated = names[first:] + names[:first]
    rounded_up = set(sorted(rotated, key=lambda name: -quotas[name][1])[:left])
    shares = {name: quotas[name][0] + (name in rounded_up) for name in names}
    return {name: share for name, share in shares.items() if share}
