"""What operators ask for, as steps from one set of intents to the next; `storage` saves them.

Every step may be repeated: asking again for what is asked for already changes nothing. Whether a node is
there is for the caller to know; these steps know only what was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from controlplane.model.intents import AddedNode, Drain, Intents, OnDeadline
from controlplane.model.nodes import NOTHING

V = TypeVar("V")


def add(
    intents: Intents,
    address: str,
    *,
    status_address: str | None = None,
    weight: int | None = None,
    labels: Mapping[str, str] = NOTHING,
) -> Intents:
    """A node by hand, as new: what was asked for an earlier node of that address is over."""
    node = AddedNode(address, status_address, weight, MappingProxyType(dict(labels)))
    clean = forget(intents, address)
    return replace(clean, added=_with(clean.added, address, node))


def readmit(
    intents: Intents,
    address: str,
    *,
    weight: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Intents:
    """A removal taken back, for a node that PD or the configuration names: they say when it is there."""
    clean = replace(
        intents, removed=_without(intents.removed, address), drains=_without(intents.drains, address)
    )
    return amend(clean, address, weight=weight, labels=labels)


def remove(intents: Intents, address: str, at: float) -> Intents:
    """A node that is to be drained and then forgotten; asked again, the first time (`at`, seconds) counts."""
    if address in intents.removed:
        return intents
    return replace(intents, removed=_with(intents.removed, address, at))


def drain(
    intents: Intents,
    address: str,
    at: float,
    deadline_seconds: float,
    on_deadline: OnDeadline = OnDeadline.KEEP,
    by: str = "",
) -> Intents:
    """A node that is to be empty. Asked again with another deadline, that deadline counts from then on.

    `by`: the rollout that asks. An operator who asks takes over a rollout's drain, never the other way round.
    """
    known, wanted = intents.drains.get(address), Drain(at, deadline_seconds, on_deadline, by)
    if known is not None and (by or replace(wanted, since=known.since) == known):
        return intents
    return replace(intents, drains=_with(intents.drains, address, wanted))


def undrain(intents: Intents, address: str, *, by: str = "") -> Intents:
    """A drain taken back, whoever asked for it; by a rollout (`by`), only its own."""
    known = intents.drains.get(address)
    if by and (known is None or known.by != by):
        return intents
    return replace(intents, drains=_without(intents.drains, address))


def amend(
    intents: Intents, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
) -> Intents:
    """Another capacity or other labels, whoever told of the node. None leaves as it is.

    Labels are laid over those of the node's source; they replace all that were laid over before.
    """
    if weight is not None:
        intents = replace(intents, weights=_with(intents.weights, address, weight))
    if labels is not None:
        intents = replace(intents, labels=_with(intents.labels, address, MappingProxyType(dict(labels))))
    return intents


def forget(intents: Intents, address: str, *, named_elsewhere: bool = False) -> Intents:
    """A removal that is finished: nothing more is asked for that address.

    While PD or the configuration names the node (`named_elsewhere`), its removal stays: it would be back.
    """
    return replace(
        intents,
        added=_without(intents.added, address),
        removed=intents.removed if named_elsewhere else _without(intents.removed, address),
        drains=_without(intents.drains, address),
        weights=_without(intents.weights, address),
        labels=_without(intents.labels, address),
    )


def end(intents: Intents, envoy: str, at: float, memory: float) -> Intents:
    """An Envoy that has ended for good. Who ended over `memory` seconds before `at` is forgotten anyway."""
    kept = {each: since for each, since in intents.ended.items() if since >= at - memory}
    return replace(intents, ended=MappingProxyType({**kept, envoy: at}))


def _with(known: Mapping[str, V], address: str, value: V) -> Mapping[str, V]:
    return MappingProxyType({**known, address: value})


def _without(known: Mapping[str, V], address: str) -> Mapping[str, V]:
    if address not in known:
        return known
    return MappingProxyType({key: value for key, value in known.items() if key != address})
