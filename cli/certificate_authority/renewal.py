"""Decide which certificates are renewed, and when a new CA is made and used. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import Enum

from cli.certificate_authority.directory import Leaf
from cli.errors import UsageError


class Rollover(Enum):
    """What to do about the CA."""

    NONE = "none"
    MAKE_NEW_CA = "make a new CA; the old one still issues the certificates"
    WAIT = "a new CA exists; wait until the operator has copied it to all machines"
    USE_NEW_CA = "issue all certificates by the new CA"


def next_rollover(
    ca_expires_at: datetime, now: datetime, within: timedelta, *, has_new_ca: bool, use_new_ca: bool
) -> Rollover:
    """Return the next step. Raises UsageError if the operator asks for a new CA that does not exist.

    If the old CA has expired, its certificates are already invalid, so there is nothing to wait for.
    """
    if ca_expires_at <= now:
        return Rollover.USE_NEW_CA
    if use_new_ca and not has_new_ca:
        raise UsageError(
            f"there is no new CA; `tidevoy certificates renew` makes one when the CA, which expires on"
            f" {ca_expires_at:%Y-%m-%d}, expires within --within"
        )
    if use_new_ca:
        return Rollover.USE_NEW_CA
    if has_new_ca:
        return Rollover.WAIT
    return Rollover.MAKE_NEW_CA if ca_expires_at <= now + within else Rollover.NONE


def due_leaves(
    leaves: Sequence[Leaf], now: datetime, within: timedelta, new_expiry: datetime, *, renew_all: bool
) -> list[Leaf]:
    """Return the certificates to renew, if a certificate that is issued now expires at `new_expiry`.

    A certificate that would not get a later expiry, because its CA expires too, is not due.
    """
    return [
        leaf
        for leaf in leaves
        if renew_all
        or leaf.is_mismatched
        or leaf.certificate.not_valid_after_utc < min(now + within, new_expiry)
    ]
