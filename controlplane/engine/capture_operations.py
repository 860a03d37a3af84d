"""Starts and stops captures of the traffic of clients, and stores them with the intents."""

from __future__ import annotations

import time
from collections.abc import Sequence

from controlplane.clock import Clock
from controlplane.decide import views
from controlplane.engine.cluster_view import ClusterView
from controlplane.engine.node_operations import NodeOperations
from controlplane.engine.planner import Planner
from controlplane.errors import CapturesOff, ModuleRequired, UnknownEnvoy, UnknownGroup
from controlplane.intents import changes as intent_changes
from controlplane.model.capture import Capture
from controlplane.model.intents import Intents


class CaptureOperations:
    """Each operation returns when the change is published, or after 2 s.

    Each raises StateUnavailable or VersionConflict if the change cannot be stored.
    """

    def __init__(
        self, clock: Clock, planner: Planner, cluster: ClusterView, operations: NodeOperations
    ) -> None:
        self._clock = clock
        self._planner = planner
        self._cluster = cluster
        self._operations = operations

    async def start(
        self,
        name: str | None = None,
        *,
        duration: float,
        envoys: Sequence[str] = (),
        users: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> None:
        """Start a capture. Without a name, it is named after the time. Empty sequences mean all.

        Raises CapturesOff, CaptureRunning, UnknownEnvoy, UnknownGroup or ModuleRequired.
        """
        if self._planner.policy.capture_directory is None:
            raise CapturesOff
        self._check_envoys(envoys)
        known_groups = {group.name for group in self._planner.policy.groups}
        for group in groups:
            if group not in known_groups:
                raise UnknownGroup(group)

        def add_capture(intents: Intents) -> Intents:
            now = self._clock()
            capture = Capture(
                name or time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)),
                now,
                round(now + duration, 3),
                envoys=tuple(dict.fromkeys(envoys)),
                users=tuple(dict.fromkeys(users)),
                groups=tuple(dict.fromkeys(groups)),
            )
            return intent_changes.start_capture(intents, capture)

        await self._operations.apply(add_capture)

    async def stop(self) -> None:
        """Stop the running capture, if there is one."""
        await self._operations.apply(lambda intents: intent_changes.stop_capture(intents, self._clock()))

    def _check_envoys(self, envoys: Sequence[str]) -> None:
        statuses = {view.status.id: view.status for view in self._cluster.envoys(traffic=False)}
        for envoy in envoys:
            if envoy not in statuses:
                raise UnknownEnvoy(envoy)
        if without := views.envoys_without_module([statuses[envoy] for envoy in envoys]):
            raise ModuleRequired("a capture", without, "name other Envoys")
