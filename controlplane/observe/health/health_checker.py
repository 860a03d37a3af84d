"""Schedules the health checks of all nodes and maintains each node's health.

Every check of every node has its own task, so that a slow or silent node does not delay others.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import structlog

from controlplane import address as addresses
from controlplane.aio import KeyedTasks
from controlplane.clock import Clock
from controlplane.config.settings import CheckSettings, HealthCheckSettings
from controlplane.model.health import CheckResult, CheckStatus, Health
from controlplane.observe.health.client_tls import ReloadingClientContext
from controlplane.observe.health.migration_prerequisites import find_migration_blockers
from controlplane.observe.health.probes import (
    GreetingProbe,
    LocalResourceError,
    Probe,
    ProbeResult,
    StatusProbe,
)
from controlplane.observe.health.statement_probe import StatementProbe

log = structlog.get_logger("tidevoy.health")

# Delay between the first probes of nodes that are added together. Without it, thousands of probes would
# connect in one iteration of the event loop and time out.
_START_SPACING_SECONDS = 0.0005

_CONFIG_RETRY_SECONDS = 60.0  # retry interval if the configuration of a node could not be read

# A probe that becomes due while a failing probe still runs may start late by this fraction of the interval;
# otherwise it is skipped. If `timeout` equals `interval`, a silent node's probe times out just after the next
# probe is due. Skipping that next probe would delay the detection of the silent node.
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
    STATUS = "status"
    SQL = "sql"
    STATEMENT = "statement"


@dataclass
class _NodeChecks:
    target: CheckTarget
    health: Health = field(default_factory=Health)
    # When to read the node's configuration; inf: it has already been read since the node started.
    next_config_read_at: float = -math.inf


class HealthChecker:
    """Probes nodes and publishes the health of a node after each probe."""

    def __init__(
        self,
        settings: HealthCheckSettings,
        publish: Callable[[str, Health], None],
        clock: Clock,
        *,
        tls: ReloadingClientContext | None = None,
        proxy_protocol: bool = False,
    ) -> None:
        """`publish` gets a node's address and health. `tls` is for the status ports."""
        self._settings = settings
        self._publish = publish
        self._clock = clock
        self._proxy_protocol = proxy_protocol
        self._tls = tls
        self._nodes: dict[str, _NodeChecks] = {}
        self._checks = KeyedTasks[tuple[str, CheckKind]]("check of")
        self._last_logged_at = -math.inf

    def set_targets(self, targets: Mapping[str, CheckTarget]) -> None:
        """Replace the set of nodes.

        New nodes are probed at once. A node with a changed target (a new IP) counts as new. Nothing more is
        published about removed nodes.
        """
        for address in [a for a, node in self._nodes.items() if targets.get(a) != node.target]:
            del self._nodes[address]
            self._cancel_checks(address, CheckKind)
        new_nodes = {a: _NodeChecks(target) for a, target in targets.items() if a not in self._nodes}
        self._nodes |= new_nodes
        self._start_checks(new_nodes.values(), CheckKind)

    def configure(self, settings: HealthCheckSettings, *, proxy_protocol: bool) -> None:
        """Apply new settings. TLS settings of the status port need a restart.

        The results of checks stay, except for checks that are disabled now.
        """
        changed = [
            kind
            for kind in CheckKind
            if _check_settings(settings, kind) != _check_settings(self._settings, kind)
            or (kind is not CheckKind.STATUS and proxy_protocol != self._proxy_protocol)
        ]
        self._settings, self._proxy_protocol = settings, proxy_protocol
        nodes = list(self._nodes.values())
        for node in nodes:
            self._cancel_checks(node.target.address, changed)
            if CheckKind.STATUS in changed:
                node.next_config_read_at = -math.inf  # the migration blockers depend on the interval
        self._start_checks(nodes, changed)
        disabled = [kind for kind in changed if not _check_settings(settings, kind).enabled]
        for node, kind in itertools.product(nodes, disabled):
            self._set_health(node, _without_check(node.health, kind))

    async def run(self) -> None:
        """Probe until cancelled, then close all connections."""
        await self._checks.run(lambda: self._start_checks(self._nodes.values(), CheckKind))

    def _start_checks(self, nodes: Iterable[_NodeChecks], kinds: Iterable[CheckKind]) -> None:
        enabled = [kind for kind in kinds if _check_settings(self._settings, kind).enabled]
        for position, node in enumerate(nodes):
            for kind in enabled:
                if kind is not CheckKind.STATUS or node.target.status_endpoint:
                    delay = position * _START_SPACING_SECONDS
                    self._checks.start((node.target.address, kind), self._check_loop, node, kind, delay)

    def _cancel_checks(self, address: str, kinds: Iterable[CheckKind]) -> None:
        for kind in kinds:
            self._checks.cancel((address, kind))

    async def _check_loop(self, node: _NodeChecks, kind: CheckKind, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        check = _check_settings(self._settings, kind)
        probe = self._create_probe(node.target, kind)
        try:
            # The second probe comes early by a random time, which spreads the nodes over the interval.
            due_at = loop.time() - random.uniform(0, check.interval)
            while True:
                tolerance = 0.0
                try:
                    result = await probe.run(check.timeout)
                except LocalResourceError as error:
                    self._log_limited(str(error))
                else:
                    has_failed = result.status is CheckStatus.FAIL
                    if has_failed and loop.time() - probe.started_at > 2 * check.timeout:
                        self._log_limited(_STALLED_MESSAGE)
                    else:
                        tolerance = _START_TOLERANCE if has_failed else 0.0
                        self._set_health(node, health_after_probe(node.health, kind, result, self._clock()))
                        if isinstance(probe, StatusProbe):
                            await self._refresh_migration_blockers(node, probe, result, check)
                interval = max(check.interval, probe.min_interval)
                due_at = next_probe_at(due_at, interval, loop.time(), tolerance)
                await asyncio.sleep(due_at - loop.time())
        finally:
            probe.close()

    async def _refresh_migration_blockers(
        self, node: _NodeChecks, probe: StatusProbe, result: ProbeResult, check: CheckSettings
    ) -> None:
        """Read the node's configuration once after each start of the node.

        A node has started when a status check passes after a status check that did not pass.
        """
        if result.status is not CheckStatus.PASS:
            node.next_config_read_at = -math.inf
        elif self._clock() >= node.next_config_read_at:
            config = await probe.fetch_config(check.timeout)
            blockers = None if config is None else find_migration_blockers(config, check.interval)
            node.next_config_read_at = self._clock() + _CONFIG_RETRY_SECONDS if blockers is None else math.inf
            if blockers is not None and blockers != node.health.migration_blockers:
                self._set_health(node, replace(node.health, migration_blockers=blockers))

    def _create_probe(self, target: CheckTarget, kind: CheckKind) -> Probe:
        if kind is CheckKind.STATUS and target.status_endpoint is not None:
            return StatusProbe(target.status_endpoint, target.status_host, self._tls)
        if kind is CheckKind.STATEMENT:
            return StatementProbe(
                target.sql_endpoint,
                addresses.split(target.address)[0],
                self._settings.statement,
                proxy_protocol=self._proxy_protocol,
            )
        return GreetingProbe(target.sql_endpoint, proxy_protocol=self._proxy_protocol)

    def _set_health(self, node: _NodeChecks, health: Health) -> None:
        node.health = health
        self._publish(node.target.address, health)

    def _log_limited(self, problem: str) -> None:
        """Log a problem of this machine, at most once per `_LOG_INTERVAL_SECONDS`."""
        if self._clock() - self._last_logged_at >= _LOG_INTERVAL_SECONDS:
            self._last_logged_at = self._clock()
            log.error(problem)


def health_after_probe(health: Health, kind: CheckKind, result: ProbeResult, at: float) -> Health:
    """Return the health after one more probe.

    The connection count stays if the probe fails. A full node keeps its previous result: it may be full
    because it runs no statements, or although it runs them. When the SQL port fails, the result of the
    statement check is dropped: the node may have restarted before it passes again.
    """
    previous: CheckResult | None = getattr(health, kind.value)
    if result.status is CheckStatus.FULL and previous is not None:
        return health
    is_repeated = previous is not None and previous.status is result.status
    consecutive = previous.consecutive + 1 if previous is not None and is_repeated else 1
    check_result = CheckResult(result.status, result.reason, consecutive, at)
    if kind is CheckKind.STATEMENT:
        return replace(health, statement=check_result)
    if kind is CheckKind.SQL:
        # The version in the greeting is used only if there is no status check.
        greeted_version = result.version if health.status is None else ""
        statement = None if result.status is CheckStatus.FAIL else health.statement
        version = greeted_version or health.version
        return replace(health, sql=check_result, statement=statement, version=version)
    health = replace(health, status=check_result)
    if result.connections is None:
        return health
    return replace(health, connections=result.connections, connections_at=at, version=result.version)


def next_probe_at(due_at: float, interval: float, now: float, tolerance: float = 0.0) -> float:
    """Return when the next probe is due, a whole number of intervals after `due_at`.

    Probes that were missed because a probe was slow or this process stalled are skipped, so that no burst of
    probes follows. A probe that is late by at most `tolerance` (in intervals) is not skipped: the returned
    time is then in the past, and the probe starts at once.
    """
    missed = math.floor((now - due_at) / interval - tolerance) if now > due_at else 0
    return due_at + (max(missed, 0) + 1) * interval


def _without_check(health: Health, kind: CheckKind) -> Health:
    if kind is CheckKind.STATUS:
        return replace(health, status=None, connections=None, connections_at=None, migration_blockers=())
    return replace(health, sql=None) if kind is CheckKind.SQL else replace(health, statement=None)


def _check_settings(settings: HealthCheckSettings, kind: CheckKind) -> CheckSettings:
    check: CheckSettings = getattr(settings, kind.value)
    return check
