"""Validates the requests of operators about nodes and Envoys and turns them into changes of the intents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from controlplane.aio import run_to_completion
from controlplane.clock import Clock
from controlplane.decide import views
from controlplane.decide.node_sources import has_other_source
from controlplane.engine.cluster_view import ClusterView
from controlplane.engine.planner import Planner
from controlplane.errors import EnvoyConnected, ModuleRequired, NodeExists, UnknownEnvoy
from controlplane.intents import changes as intent_changes
from controlplane.intents.repository import IntentChange, IntentRepository
from controlplane.model.intents import Intents, OnDeadline
from controlplane.model.nodes import State
from controlplane.model.views import EnvoyView, NodeView

_APPLY_TIMEOUT_SECONDS = 2.0  # how long a call waits for the leader to apply an intent


class NodeOperations:
    """Each operation stores an intent and returns when the intent is applied, or after 2 s.

    Each operation raises StateUnavailable or VersionConflict if the intent cannot be stored.
    """

    def __init__(
        self, clock: Clock, intents: IntentRepository, planner: Planner, cluster: ClusterView
    ) -> None:
        self._clock = clock
        self._intents = intents
        self._planner = planner
        self._cluster = cluster

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
            planned = self._cluster.plan.nodes.get(address)
            if planned is not None and address not in intents.removed and planned.state is not State.GONE:
                raise NodeExists(address, planned.node.source.value)
            if has_other_source(address, self._cluster.facts) and address in intents.removed:
                return intent_changes.restore(intents, address, weight=weight, labels=labels)
            return intent_changes.add(
                intents, address, status_address=status_address, weight=weight, labels=labels or {}
            )

        await self.apply(added)
        return self._cluster.node(address)

    async def remove(self, address: str, *, force: bool = False) -> NodeView:
        """Drain a node, then delete it; `force` ends its sessions at once.

        Raises UnknownNode or ModuleRequired.
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

        Raises UnknownNode or ModuleRequired.
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
        """Forget an Envoy that will not come back, so that drains no longer wait for its sessions.

        Raises UnknownEnvoy or EnvoyConnected.
        """

        def ended(intents: Intents) -> Intents:
            status = next((view.status for view in self._cluster.envoys() if view.status.id == envoy), None)
            last_seen = self._cluster.facts.envoys_last_seen.get(envoy)
            if status is not None and status.connected_since is not None:
                raise EnvoyConnected(envoy)
            if status is None and last_seen is None:
                raise UnknownEnvoy(envoy)
            ended_at = max(self._clock(), last_seen or 0.0, status.last_seen if status is not None else 0.0)
            return intent_changes.forget_envoy(intents, envoy, ended_at, self._planner.policy.envoy_retention)

        await self.apply(ended)

    async def set_envoy_switches(self, envoy: str, switches: Mapping[str, bool | None]) -> EnvoyView:
        """Switch parts of an Envoy's module (`ModuleSwitches`) on or off; None: the settings apply.

        Parts that are not in `switches` stay unchanged. Raises UnknownEnvoy.
        """

        def overridden(intents: Intents) -> Intents:
            self._cluster.envoy(envoy)
            return intent_changes.override_switches(intents, envoy, switches)

        await self.apply(overridden)
        return self._cluster.envoy(envoy)

    def _require_module(self, operation: str, alternative: str) -> None:
        """Raise ModuleRequired if a connected Envoy runs, or is about to run, without the module."""
        if without := views.envoys_without_module([view.status for view in self._cluster.envoys()]):
            raise ModuleRequired(operation, without, alternative)

    async def _apply_to_node(self, address: str, change: IntentChange) -> NodeView:
        """Apply a change to an existing node.

        Return the node after the change, or before it if the change deleted the node.
        """
        before = self._cluster.node(address)

        def checked(intents: Intents) -> Intents:
            self._cluster.node(address)  # raises if a concurrent change has deleted the node
            return change(intents)

        await self.apply(checked)
        return self._cluster.node(address) if address in self._cluster.plan.nodes else before

    async def apply(self, change: IntentChange) -> None:
        """Store a change, and wait until the plan applies it or the timeout passes.

        Raises StateUnavailable or VersionConflict.
        """
        version = await self.change_intents(change)
        # If another replica is the leader, the plan with this change arrives later.
        with suppress(TimeoutError):
            async with asyncio.timeout(_APPLY_TIMEOUT_SECONDS):
                await self._planner.wait_applied(version)

    async def change_intents(self, change: IntentChange, *, by_operator: bool = True) -> int:
        """Store a change and compute the next plan at once; return the version of the intents.

        Raises the errors of `IntentRepository.change`. A cancellation takes effect only at the end.
        """
        return await run_to_completion(self._change_intents(change, by_operator))

    async def _change_intents(self, change: IntentChange, by_operator: bool) -> int:
        before = self._intents.version
        try:
            return await self._intents.change(change, by_operator=by_operator)
        finally:
            # Also after an error, since the failed attempt may have read newer intents of other replicas.
            if self._intents.version != before:
                self._planner.decide(at_once=True)
