"""Pure functions that apply an operator's request to the intents; `IntentRepository` saves the result.

A repeated request changes nothing, except the time in `forget_envoy`. The caller checks that the node
exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from controlplane.errors import CaptureRunning, VersionConflict
from controlplane.model.capture import Capture
from controlplane.model.intents import AddedNode, DrainIntent, Intents, OnDeadline
from controlplane.model.module_switches import NO_OVERRIDES
from controlplane.model.nodes import EMPTY_MAP
from controlplane.model.rules import StatementRule

V = TypeVar("V")


def add(
    intents: Intents,
    address: str,
    *,
    status_address: str | None = None,
    weight: int | None = None,
    labels: Mapping[str, str] = EMPTY_MAP,
) -> Intents:
    """Add a node. Earlier requests for its address are dropped."""
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
    """Revoke the removal and the drain of a node that PD or the configuration defines."""
    cleared = replace(
        intents, removed=_without_key(intents.removed, address), drains=_without_key(intents.drains, address)
    )
    return update(cleared, address, weight=weight, labels=labels)


def remove(intents: Intents, address: str, at: float) -> Intents:
    """Request that a node is drained and then deleted. A repeated request keeps the time of the first."""
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
    """Drain a node. A repeated request with another deadline restarts the deadline at `at`.

    `owner` is the id of the rollout that requests the drain; it is empty for an operator. An operator takes
    over the drain of a rollout, but a rollout never takes over an existing drain.
    """
    existing, requested = intents.drains.get(address), DrainIntent(at, deadline_seconds, on_deadline, owner)
    if existing is not None and (owner or replace(requested, since=existing.since) == existing):
        return intents
    return replace(intents, drains=_with_key(intents.drains, address, requested))


def undrain(intents: Intents, address: str, *, owner: str = "") -> Intents:
    """Revoke the drain of a node. With `owner` (a rollout id), revoke it only if that rollout owns it."""
    existing = intents.drains.get(address)
    if owner and (existing is None or existing.owner != owner):
        return intents
    return replace(intents, drains=_without_key(intents.drains, address))


def update(
    intents: Intents, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
) -> Intents:
    """Set the weight or the labels of a node from any source. None leaves the value unchanged.

    The labels override those of the node's source, and replace all earlier overrides.
    """
    if weight is not None:
        intents = replace(intents, weights=_with_key(intents.weights, address, weight))
    if labels is not None:
        intents = replace(intents, labels=_with_key(intents.labels, address, MappingProxyType(dict(labels))))
    return intents


def forget(intents: Intents, address: str, *, has_other_source: bool = False) -> Intents:
    """Drop all requests for an address.

    If PD or the configuration defines the node (`has_other_source`), its removal stays: otherwise the node
    would come back.
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
    """Record that an Envoy ended at time `at`. Drop records from over `retention` seconds before."""
    retained = {id_: ended for id_, ended in intents.ended_envoys.items() if ended >= at - retention}
    return replace(
        intents,
        ended_envoys=MappingProxyType({**retained, envoy: at}),
        switch_overrides=_without_key(intents.switch_overrides, envoy),
    )


def override_switches(intents: Intents, envoy: str, overrides: Mapping[str, bool | None]) -> Intents:
    """Set switches of the module for one Envoy. None: the settings apply; absent switches stay unchanged."""
    changed = replace(intents.switch_overrides.get(envoy, NO_OVERRIDES), **overrides)
    return replace(
        intents,
        switch_overrides=_without_key(intents.switch_overrides, envoy)
        if changed == NO_OVERRIDES
        else _with_key(intents.switch_overrides, envoy, changed),
    )


def set_rules(
    intents: Intents, rules: tuple[StatementRule, ...], *, known: tuple[StatementRule, ...]
) -> Intents:
    """Replace the rules for statements. `known` are those from which the caller derived the new ones.

    Raises VersionConflict if the rules are others meanwhile.
    """
    if intents.rules != known:
        raise VersionConflict("the list of rules")
    return replace(intents, rules=rules)


def start_capture(intents: Intents, capture: Capture) -> Intents:
    """Start a capture, at a time in `started_at`. Raises CaptureRunning."""
    last = intents.capture
    if last is not None and last.is_running(capture.started_at):
        raise CaptureRunning(last.name)
    if last is not None and last.until_ms == capture.until_ms:
        capture = replace(capture, until=round(capture.until + 0.001, 3))
    return replace(intents, capture=capture)


def stop_capture(intents: Intents, at: float) -> Intents:
    """Stop the running capture. An ended capture stays as it is."""
    if intents.capture is None or not intents.capture.is_running(at):
        return intents
    return replace(intents, capture=replace(intents.capture, stopped_at=at))


def _with_key(mapping: Mapping[str, V], key: str, value: V) -> Mapping[str, V]:
    return MappingProxyType({**mapping, key: value})


def _without_key(mapping: Mapping[str, V], key: str) -> Mapping[str, V]:
    if key not in mapping:
        return mapping
    return MappingProxyType({other: value for other, value in mapping.items() if other != key})
