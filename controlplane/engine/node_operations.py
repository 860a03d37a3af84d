"""What operators ask for, and whether it can be: steps from one set of intents to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from controlplane.clock import Clock
from controlplane.decide import views
from controlplane.decide.node_sources import has_other_source
from controlplane.engine.planner import Planner
from controlplane.errors import EnvoyConnected, NeedsModule, NodeExists, UnknownEnvoy
from controlplane.intents import changes as intent_changes
from controlplane.intents.repository import IntentChange, IntentRepository
from controlplane.model.intents import Intents, OnDeadline
from controlplane.model.nodes import State
from controlplane.model.views import EnvoyView, NodeView
from controlplane.observe.fact_store import FactStore

_APPLY_TIMEOUT_SECONDS = 2.0  # seconds that are waited for what comes of what an operator asked for


class Views(Protocol):
    """Who shows nodes and Envoys as they are."""

    def node(self, address: str) -> NodeView:
        """UnknownNode."""

    def envoys(self) -> list[EnvoyView]:
        """All Envoys."""


class NodeOperations:
    """Each call returns when the intent is kept, and is in force here. StateUnavailable, Superseded."""

    def __init__(
        self, clock: Clock, intents: IntentRepository, planner: Planner, facts: FactStore, view_source: Views
    ) -> None:
        self._clock = clock
        self._intents = intents
        self._planner = planner
        self._facts = facts
        self._view_source = view_source

    async def add(
        self,
        address: str,
        *,
        status_address: str | None = None,
        weight: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> NodeView:
        """Add a node by hand, or take its removal back. NodeExists."""

        def added(intents: Intents) -> Intents:
            known = self._planner.plan.nodes.get(address)
            if known is not None and address not in intents.removed and known.state is not State.GONE:
                raise NodeExists(address, known.node.source.value)
            if has_other_source(address, self._facts.view()) and address in intents.removed:
                return intent_changes.restore(intents, address, weight=weight, labels=labels)
            return intent_changes.add(
                intents, address, status_address=status_address, weight=weight, labels=labels or {}
            )

        await self._apply(added)
        return self._view_source.node(address)

    async def remove(self, address: str, *, force: bool = False) -> NodeView:
        """Drain a node and then forget it; `force`: end its sessions at once. UnknownNode, NeedsModule."""
        if force:
            self._require_module("ending sessions", "remove the node without force: its sessions may move")

        def removed(intents: Intents) -> Intents:
            wanted = intent_changes.remove(intents, address, self._clock())
            return (
                intent_changes.drain(wanted, address, self._clock(), 0.0, OnDeadline.CLOSE)
                if force
                else wanted
            )

        return await self._apply_to_node(address, removed)

    async def drain(
        self, address: str, *, deadline_seconds: float = 600.0, on_deadline: OnDeadline = OnDeadline.KEEP
    ) -> NodeView:
        """Keep new sessions off a node, and let its own move. Idempotent. UnknownNode, NeedsModule."""
        if on_deadline is OnDeadline.CLOSE:
            self._require_module("ending sessions at the deadline", "drain with on_deadline: keep")
        return await self._apply_to_node(
            address,
            lambda now: intent_changes.drain(now, address, self._clock(), deadline_seconds, on_deadline),
        )

    async def undrain(self, address: str) -> NodeView:
        """Take a drain back. Idempotent. UnknownNode."""
        return await self._apply_to_node(address, lambda now: intent_changes.undrain(now, address))

    async def update(
        self, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
    ) -> NodeView:
        """Change a node's capacity or labels. UnknownNode."""
        return await self._apply_to_node(
            address, lambda now: intent_changes.update(now, address, weight=weight, labels=labels)
        )

    async def forget_envoy(self, envoy: str) -> None:
        """An Envoy has ended for good: nothing waits for what it may have. UnknownEnvoy, EnvoyConnected."""

        def ended(intents: Intents) -> Intents:
            status = next(
                (view.status for view in self._view_source.envoys() if view.status.id == envoy), None
            )
            seen = self._facts.view().envoys_last_seen.get(envoy)
            if status is not None and status.connected_since is not None:
                raise EnvoyConnected(envoy)
            if status is None and seen is None:
                raise UnknownEnvoy(envoy)
            ended_at = max(self._clock(), seen or 0.0, status.last_seen if status is not None else 0.0)
            return intent_changes.forget_envoy(intents, envoy, ended_at, self._planner.policy.envoy_retention)

        await self._apply(ended)

    def _require_module(self, operation: str, alternative: str) -> None:
        """NeedsModule when an Envoy that is connected serves, or is to serve, without the module."""
        if without := views.envoys_without_module([view.status for view in self._view_source.envoys()]):
            raise NeedsModule(operation, without, alternative)

    async def _apply_to_node(self, address: str, change: IntentChange) -> NodeView:
        """A step for a node that is there; the node after it, or before it when it is forgotten now."""
        before = self._view_source.node(address)

        def known(intents: Intents) -> Intents:
            self._view_source.node(address)  # it may have gone while others changed something
            return change(intents)

        await self._apply(known)
        return self._view_source.node(address) if address in self._planner.plan.nodes else before

    async def _apply(self, change: IntentChange) -> None:
        """Take a step; returns when the plan heeds it. StateUnavailable, Superseded: nothing has changed."""
        version = await self._intents.change(change)
        # Where another control plane decides, who asked is to see what came of it, if that is soon.
        with suppress(TimeoutError):
            async with asyncio.timeout(_APPLY_TIMEOUT_SECONDS):
                await self._planner.wait_applied(version)
