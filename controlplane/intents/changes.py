"""What operators ask for, as steps from one set of intents to the next; `storage` saves them.

Every step may be repeated: asking again for what is asked for already changes nothing. Whether a node is
there is for the caller to know; these steps know only what was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.nodes import EMPTY_MAP

V = TypeVar("V")


def add(
    intents: Intents,
    address: str,
    *,
    status_address: str | None = None,
    weight: int | None = None,
    labels: Mapping[str, str] = EMPTY_MAP,
) -> Intents:
    """A node by hand, as new: what was asked for an earlier node of that address is over."""
    node = AddedNode(address, status_address, weight, MappingProxyType(dict(labels)))
    cleared = forget(intents, address)
    return replace(cleared, added=_with_key(cleared.added, address, node))


def restore(
    intents: Intents,
    address: str,
    *,
    weight: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Intents:
    """A removal taken back, for a node that PD or the configuration names: they say when it is there."""
    cleared = replace(
        intents, removed=_without_key(intents.removed, address), drains=_without_key(intents.drains, address)
    )
    return update(cleared, address, weight=weight, labels=labels)


def remove(intents: Intents, address: str, at: float) -> Intents:
    """A node that is to be drained and then forgotten; asked again, the first time (`at`, seconds) counts."""
    if address in intents.removed:
        return intents
    return replace(intents, removed=_with_key(intents.removed, address, at))


def drain(
    intents: Intents,
    address: str,
    at: float,
    deadline_seconds: float,
    on_deadline: OnDeadline = OnDeadline.KEEP,
    owner: str = "",
) -> Intents:
    """A node that is to be empty. Asked again with another deadline, that deadline counts from then on.

    `by`: the rollout that asks. An operator who asks takes over a rollout's drain, never the other way round.
    """
    known, wanted = intents.drains.get(address), DrainIntent(at, deadline_seconds, on_deadline, owner)
    if known is not None and (owner or replace(wanted, since=known.since) == known):
        return intents
    return replace(intents, drains=_with_key(intents.drains, address, wanted))


def undrain(intents: Intents, address: str, *, owner: str = "") -> Intents:
    """A drain taken back, whoever asked for it; by a rollout (`by`), only its own."""
    known = intents.drains.get(address)
    if owner and (known is None or known.owner != owner):
        return intents
    return replace(intents, drains=_without_key(intents.drains, address))


def update(
    intents: Intents, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
) -> Intents:
    """Another capacity or other labels, whoever told of the node. None leaves as it is.

    Labels are laid over those of the node's source; they replace all that were laid over before.
    """
    if weight is not None:
        intents = replace(intents, weights=_with_key(intents.weights, address, weight))
    if labels is not None:
        intents = replace(intents, labels=_with_key(intents.labels, address, MappingProxyType(dict(labels))))
    return intents


def forget(intents: Intents, address: str, *, has_other_source: bool = False) -> Intents:
    """A removal that is finished: nothing more is asked for that address.

    While PD or the configuration names the node (`named_elsewhere`), its removal stays: it would be back.
    """
    return replace(
        intents,
        added=_without_key(intents.added, address),
        removed=intents.removed if has_other_source else _without_key(intents.removed, address),
        drains=_without_key(intents.drains, address),
        weights=_without_key(intents.weights, address),
        labels=_without_key(intents.labels, address),
    )


def forget_envoy(intents: Intents, envoy: str, at: float, retention: float) -> Intents:
    """An Envoy that has ended for good. Who ended over `memory` seconds before `at` is forgotten anyway."""
    retained = {each: since for each, since in intents.ended_envoys.items() if since >= at - retention}
    return replace(intents, ended_envoys=MappingProxyType({**retained, envoy: at}))


def _with_key(known: Mapping[str, V], address: str, value: V) -> Mapping[str, V]:
    return MappingProxyType({**known, address: value})


def _without_key(known: Mapping[str, V], address: str) -> Mapping[str, V]:
    if address not in known:
        return known
    return MappingProxyType({key: value for key, value in known.items() if key != address})
