"""Schedules the health checks of all nodes and maintains each node's health.

Every check of every node is a task of its own, so that a slow or silent node does not delay others.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import structlog

from controlplane.clock import Clock
from controlplane.config.settings import CheckSettings, HealthCheckSettings
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.migration_prerequisites import find_migration_blockers
from controlplane.observe.health.probes import GreetingProbe, LocalResourceError, ProbeResult, StatusProbe

log = structlog.get_logger("tidevoy.health")

# Delay between the first probes of nodes that are added together (a start with 5,000 nodes). Without it, all
# would connect in one iteration of the event loop, use two descriptors each, and time out while they queue.
_START_SPACING_SECONDS = 0.0005

# Time until a node's configuration that could not be read is requested again.
_CONFIG_RETRY_SECONDS = 60.0

# How late the probe after a failed one may start, in intervals. If `timeout` equals `interval`, a probe that
# times out ends just after the next one is due. Skipping that one would nearly double the time until a silent
# node is detected.
_START_TOLERANCE = 0.25

_LOG_INTERVAL_SECONDS = 60.0
_STALLED_MESSAGE = (
    "a check result was discarded because this process stalled for longer than the check's timeout; "
    "give the control plane more CPU, or increase health.*.timeout"
)


@dataclass(frozen=True)
class CheckTarget:
    """The endpoints (`ip:port`) of a node to check: its SQL port and, if it has one, its status port."""

    address: str
    sql_endpoint: str
    status_endpoint: str | None
    status_host: str  # host of the status address, for the `Host` header and the certificate


class CheckKind(Enum):
    """The two kinds of checks."""

    STATUS = "status"
    SQL = "sql"


class _Prober(Protocol):
    async def run(self, timeout: float) -> ProbeResult: ...
    def close(self) -> None: ...


@dataclass
class _NodeChecks:
    target: CheckTarget
    health: Health = field(default_factory=Health)
    # Time of the next read of the node's configuration; inf: it has been read since the node started.
    next_config_read_at: float = -math.inf
    tasks: dict[CheckKind, asyncio.Task[None]] = field(default_factory=dict)


class HealthChecker:
    """Probes nodes and publishes a node's health after each probe."""

    def __init__(
        self,
        settings: HealthCheckSettings,
        publish: Callable[[str, Health], None],
        clock: Clock,
        *,
        proxy_protocol: bool = False,
    ) -> None:
        """`publish` gets a node's address and health. Raises ConfigError if TLS files are unusable."""
        self._settings = settings
        self._publish = publish
        self._clock = clock
        self._proxy_protocol = proxy_protocol
        self._tls = (
            ReloadingClientContext(settings.status.client_tls, "health.status.client_tls")
            if settings.status.tls
            else None
        )
        self._nodes: dict[str, _NodeChecks] = {}
        self._group: asyncio.TaskGroup | None = None
        self._last_logged_at = -math.inf

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes.

        Both checks probe new nodes at once. A node whose target changed (a new IP) counts as new. Checks of
        removed nodes stop, and nothing more is published about them.
        """
        for address in [a for a, node in self._nodes.items() if targets.get(a) != node.target]:
            _cancel_all(self._nodes.pop(address).tasks.values())
        new_targets = [target for address, target in targets.items() if address not in self._nodes]
        for position, target in enumerate(new_targets):
            node = self._nodes[target.address] = _NodeChecks(target)
            self._start_checks(node, CheckKind, delay=position * _START_SPACING_SECONDS)

    def configure(self, settings: HealthCheckSettings, *, proxy_protocol: bool) -> None:
        """Apply new settings, except for TLS of the status port, which needs a restart.

        The nodes keep their health, without the results of checks that are disabled now.
        """
        changed = [
            kind
            for kind in CheckKind
            if _check_settings(settings, kind) != _check_settings(self._settings, kind)
        ]
        if proxy_protocol != self._proxy_protocol and CheckKind.SQL not in changed:
            changed.append(CheckKind.SQL)
        self._settings, self._proxy_protocol = settings, proxy_protocol
        for position, node in enumerate(list(self._nodes.values())):
            _cancel_all(node.tasks.pop(kind) for kind in changed if kind in node.tasks)
            self._start_checks(node, changed, delay=position * _START_SPACING_SECONDS)
            if CheckKind.STATUS in changed:
                node.next_config_read_at = -math.inf  # the migration blockers depend on the interval
            for kind in changed:
                if not _check_settings(settings, kind).enabled:
                    self._set_health(node, _without_check(node.health, kind))

    async def run(self) -> None:
        """Probe until cancelled, then close all connections."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for position, node in enumerate(self._nodes.values()):
                    self._start_checks(node, CheckKind, delay=position * _START_SPACING_SECONDS)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def _start_checks(self, node: _NodeChecks, kinds: Iterable[CheckKind], *, delay: float) -> None:
        if self._group is None:
            return
        for kind in kinds:
            if _check_settings(self._settings, kind).enabled and (
                kind is CheckKind.SQL or node.target.status_endpoint
            ):
                node.tasks[kind] = self._group.create_task(
                    self._check_loop(node, kind, delay), name=f"{kind.value} check of {node.target.address}"
                )

    async def _check_loop(self, node: _NodeChecks, kind: CheckKind, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        check = _check_settings(self._settings, kind)
        prober = self._create_prober(node.target, kind)
        try:
            # The second probe is early by a random part of the interval, which spreads the nodes over it.
            due_at = loop.time() - random.uniform(0, check.interval)
            while True:
                probe_started_at, tolerance = loop.time(), 0.0
                try:
                    result = await prober.run(check.timeout)
                except LocalResourceError as error:
                    self._log_limited(str(error))
                else:
                    if (
                        result.status is CheckStatus.FAIL
                        and loop.time() - probe_started_at > 2 * check.timeout
                    ):
                        self._log_limited(_STALLED_MESSAGE)
                    else:
                        tolerance = _START_TOLERANCE if result.status is CheckStatus.FAIL else 0.0
                        self._set_health(node, with_result(node.health, kind, result, self._clock()))
                        if isinstance(prober, StatusProbe):
                            await self._refresh_migration_blockers(node, prober, result, check)
                due_at = next_probe_at(due_at, check.interval, loop.time(), tolerance)
                await asyncio.sleep(due_at - loop.time())
        finally:
            prober.close()

    async def _refresh_migration_blockers(
        self, node: _NodeChecks, prober: StatusProbe, result: ProbeResult, check: CheckSettings
    ) -> None:
        """Read the node's configuration once after each of its starts.

        A start shows as a passing status check after one that did not pass. The blockers stay until the next
        configuration has been read.
        """
        if result.status is not CheckStatus.PASS:
            node.next_config_read_at = -math.inf
        elif self._clock() >= node.next_config_read_at:
            config = await prober.fetch_config(check.timeout)
            blockers = None if config is None else find_migration_blockers(config, check.interval)
            node.next_config_read_at = self._clock() + _CONFIG_RETRY_SECONDS if blockers is None else math.inf
            if blockers is not None and blockers != node.health.migration_blockers:
                self._set_health(node, replace(node.health, migration_blockers=blockers))

    def _create_prober(self, target: CheckTarget, kind: CheckKind) -> _Prober:
        if kind is CheckKind.STATUS and target.status_endpoint is not None:
            return StatusProbe(target.status_endpoint, target.status_host, self._tls)
        return GreetingProbe(target.sql_endpoint, proxy_protocol=self._proxy_protocol)

    def _set_health(self, node: _NodeChecks, health: Health) -> None:
        node.health = health
        self._publish(node.target.address, health)

    def _log_limited(self, problem: str) -> None:
        """Log that this machine cannot probe, but not for each of thousands of nodes every second."""
        if self._clock() - self._last_logged_at >= _LOG_INTERVAL_SECONDS:
            self._last_logged_at = self._clock()
            log.error(problem)


def with_result(health: Health, kind: CheckKind, result: ProbeResult, at: float) -> Health:
    """Return the health after one more probe. The connection count stays when a probe fails."""
    previous = health.status if kind is CheckKind.STATUS else health.sql
    is_repeated = previous is not None and previous.status is result.status
    consecutive = previous.consecutive + 1 if previous is not None and is_repeated else 1
    check_result = CheckResult(result.status, result.reason, consecutive, at)
    if kind is CheckKind.SQL:
        # The greeting contains the version too, which is used only without a status check.
        greeted_version = result.version if health.status is None else ""
        return replace(health, sql=check_result, version=greeted_version or health.version)
    if result.connections is None:
        return replace(health, status=check_result)
    return replace(
        health,
        status=check_result,
        connections=result.connections,
        connections_at=at,
        version=result.version,
    )


def next_probe_at(due_at: float, interval: float, now: float, tolerance: float = 0.0) -> float:
    """Return when the probe after the one of `due_at` is due: a whole number of intervals later.

    Probes that were missed because this process stalled, or because a probe was slow, are skipped. So a stall
    is not followed by a burst, and every node keeps its offset within the interval. A probe that is late by
    at most `tolerance` (in intervals) is not skipped; the returned time is then in the past and means "now".
    """
    missed = math.floor((now - due_at) / interval - tolerance) if now > due_at else 0
    return due_at + (max(missed, 0) + 1) * interval


def _without_check(health: Health, kind: CheckKind) -> Health:
    if kind is CheckKind.SQL:
        return replace(health, sql=None)
    return replace(health, status=None, connections=None, connections_at=None, migration_blockers=())


def _check_settings(settings: HealthCheckSettings, kind: CheckKind) -> CheckSettings:
    return settings.status if kind is CheckKind.STATUS else settings.sql


def _cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
