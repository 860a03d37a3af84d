"""Node operations of operators: validates each request and turns it into a change of the intents."""

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

_APPLY_TIMEOUT_SECONDS = 2.0  # how long a call waits for the leader to apply an intent


class Views(Protocol):
    """Current views of nodes and Envoys."""

    def node(self, address: str) -> NodeView:
        """Return one node. Raises UnknownNode."""

    def envoys(self) -> list[EnvoyView]:
        """Return all Envoys."""


class NodeOperations:
    """Each call returns once the intent is stored and applied here.

    Every call raises StateUnavailable or VersionConflict if the intent cannot be stored.
    """

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
        """Add a node, or cancel its removal. Raises NodeExists."""

        def added(intents: Intents) -> Intents:
            planned = self._planner.plan.nodes.get(address)
            if planned is not None and address not in intents.removed and planned.state is not State.GONE:
                raise NodeExists(address, planned.node.source.value)
            if has_other_source(address, self._facts.view()) and address in intents.removed:
                return intent_changes.restore(intents, address, weight=weight, labels=labels)
            return intent_changes.add(
                intents, address, status_address=status_address, weight=weight, labels=labels or {}
            )

        await self._apply(added)
        return self._view_source.node(address)

    async def remove(self, address: str, *, force: bool = False) -> NodeView:
        """Drain a node, then delete it; `force` ends its sessions at once.

        Raises UnknownNode or NeedsModule.
        """
        if force:
            self._require_module(
                "ending sessions", "remove the node without force, so that its sessions can migrate"
            )

        def removed(intents: Intents) -> Intents:
            intents = intent_changes.remove(intents, address, self._clock())
            if not force:
                return intents
            return intent_changes.drain(intents, address, self._clock(), 0.0, OnDeadline.CLOSE)

        return await self._apply_to_node(address, removed)

    async def drain(
        self, address: str, *, deadline_seconds: float = 600.0, on_deadline: OnDeadline = OnDeadline.KEEP
    ) -> NodeView:
        """Stop new sessions on a node and migrate its sessions. Idempotent.

        Raises UnknownNode or NeedsModule.
        """
        if on_deadline is OnDeadline.CLOSE:
            self._require_module("ending sessions at the deadline", "drain with on_deadline: keep")
        return await self._apply_to_node(
            address,
            lambda intents: intent_changes.drain(
                intents, address, self._clock(), deadline_seconds, on_deadline
            ),
        )

    async def undrain(self, address: str) -> NodeView:
        """Cancel a drain. Idempotent. Raises UnknownNode."""
        return await self._apply_to_node(address, lambda intents: intent_changes.undrain(intents, address))

    async def update(
        self, address: str, *, weight: int | None = None, labels: Mapping[str, str] | None = None
    ) -> NodeView:
        """Change a node's weight or labels. Raises UnknownNode."""
        return await self._apply_to_node(
            address, lambda intents: intent_changes.update(intents, address, weight=weight, labels=labels)
        )

    async def forget_envoy(self, envoy: str) -> None:
        """Forget an Envoy that has ended for good, so that drains no longer wait for its sessions.

        Raises UnknownEnvoy or EnvoyConnected.
        """

        def ended(intents: Intents) -> Intents:
            status = next(
                (view.status for view in self._view_source.envoys() if view.status.id == envoy), None
            )
            last_seen = self._facts.view().envoys_last_seen.get(envoy)
            if status is not None and status.connected_since is not None:
                raise EnvoyConnected(envoy)
            if status is None and last_seen is None:
                raise UnknownEnvoy(envoy)
            ended_at = max(self._clock(), last_seen or 0.0, status.last_seen if status is not None else 0.0)
            return intent_changes.forget_envoy(intents, envoy, ended_at, self._planner.policy.envoy_retention)

        await self._apply(ended)

    def _require_module(self, operation: str, alternative: str) -> None:
        """Raise NeedsModule if a connected Envoy runs, or would run, without the module."""
        if without := views.envoys_without_module([view.status for view in self._view_source.envoys()]):
            raise NeedsModule(operation, without, alternative)

    async def _apply_to_node(self, address: str, change: IntentChange) -> NodeView:
        """Apply a change to an existing node.

        Return the node after the change, or before it if the change deleted the node.
        """
        before = self._view_source.node(address)

        def checked(intents: Intents) -> Intents:
            self._view_source.node(address)  # a concurrent change may have deleted it
            return change(intents)

        await self._apply(checked)
        return self._view_source.node(address) if address in self._planner.plan.nodes else before

    async def _apply(self, change: IntentChange) -> None:
        """Store a change and wait until the plan applies it, or for the timeout.

        Raises StateUnavailable or VersionConflict; then nothing has changed.
        """
        version = await self._intents.change(change)
        # If another replica leads, wait for its plan, so that the caller sees the effect.
        with suppress(TimeoutError):
            async with asyncio.timeout(_APPLY_TIMEOUT_SECONDS):
                await self._planner.wait_applied(version)
