"""Checks of all nodes, side by side: when each is made, and what is known of each node from them.

Every check of every node is a task of its own, so that a node that answers late or never delays no other.
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
from controlplane.config.settings import Check, HealthChecks
from controlplane.model.health import Health, Outcome, Probe
from controlplane.observe.health.client_tls import ClientContext
from controlplane.observe.health.migration_prerequisites import hindrances
from controlplane.observe.health.probes import CannotProbe, Finding, GreetingProbe, StatusProbe

log = structlog.get_logger("tidevoy.health")

# Seconds between the first probes of nodes that come at once (a start with 5,000 nodes). Without it they
# would all be connecting in one turn of the loop, use two descriptors each, and time out while they queue.
_PACE = 0.0005

# Seconds until a configuration that could not be read is asked for again.
_CONFIG_AGAIN = 60.0

# How late the probe after a failed one may start, in intervals. Where `timeout` equals `interval`, a probe
# that times out ends just after the next one is due. Leaving that one out would nearly double the time in
# which a silent node is found.
_START_TOLERANCE = 0.25

_COMPLAINT_EVERY = 60.0
_STALLED = (
    "a check is not counted because this process stood still for longer than the check may take; "
    "give the control plane more CPU, or raise health.*.timeout"
)


@dataclass(frozen=True)
class Target:
    """What is probed for a node: `ip:port` of its SQL port and, unless it has none, of its status port."""

    address: str
    sql: str
    status: str | None
    status_host: str  # the name of the status port, for `Host` and its certificate


class Kind(Enum):
    """The two checks."""

    STATUS = "status"
    SQL = "sql"


class _Prober(Protocol):
    async def run(self, timeout: float) -> Finding: ...
    def close(self) -> None: ...


@dataclass
class _Watched:
    target: Target
    health: Health = field(default_factory=Health)
    config_due: float = -math.inf  # when its configuration is to be read; inf: it was, since it started
    tasks: dict[Kind, asyncio.Task[None]] = field(default_factory=dict)


class HealthChecker:
    """Probes nodes and publishes what is known of a node after each probe of it."""

    def __init__(
        self,
        settings: HealthChecks,
        publish: Callable[[str, Health], None],
        clock: Clock,
        *,
        proxy_protocol: bool = False,
    ) -> None:
        """`publish` takes the address of a node and all that is known of it. ConfigError: bad TLS files."""
        self._settings = settings
        self._publish = publish
        self._clock = clock
        self._proxy_protocol = proxy_protocol
        self._tls = (
            ClientContext(settings.status.client_tls, "health.status.client_tls")
            if settings.status.tls
            else None
        )
        self._watched: dict[str, _Watched] = {}
        self._group: asyncio.TaskGroup | None = None
        self._complained = -math.inf

    def watch(self, targets: Mapping[str, Target]) -> None:
        """The whole set of nodes, in place of the former one.

        New ones are probed at once, by both checks; one whose target changed (a new IP) starts afresh; checks
        of vanished ones stop, and nothing more is published of them.
        """
        for address in [a for a, watched in self._watched.items() if targets.get(a) != watched.target]:
            _stop(self._watched.pop(address).tasks.values())
        fresh = [target for address, target in targets.items() if address not in self._watched]
        for position, target in enumerate(fresh):
            watched = self._watched[target.address] = _Watched(target)
            self._start(watched, Kind, delay=position * _PACE)

    def configure(self, settings: HealthChecks, *, proxy_protocol: bool) -> None:
        """Apply new settings; TLS of the status port needs a restart. What is known of nodes is kept.

        A check that is switched off is forgotten, and with it what it told.
        """
        changed = [kind for kind in Kind if _check(settings, kind) != _check(self._settings, kind)]
        if proxy_protocol != self._proxy_protocol and Kind.SQL not in changed:
            changed.append(Kind.SQL)
        self._settings, self._proxy_protocol = settings, proxy_protocol
        for position, watched in enumerate(list(self._watched.values())):
            _stop(watched.tasks.pop(kind) for kind in changed if kind in watched.tasks)
            self._start(watched, changed, delay=position * _PACE)
            if Kind.STATUS in changed:
                watched.config_due = -math.inf  # what it lacks goes by the interval, or is forgotten
            for kind in changed:
                if not _check(settings, kind).enabled:
                    self._note(watched, _forgotten(watched.health, kind))

    async def run(self) -> None:
        """Probe until cancelled; then every connection is closed."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for position, watched in enumerate(self._watched.values()):
                    self._start(watched, Kind, delay=position * _PACE)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def _start(self, watched: _Watched, kinds: Iterable[Kind], *, delay: float) -> None:
        if self._group is None:
            return
        for kind in kinds:
            if _check(self._settings, kind).enabled and (kind is Kind.SQL or watched.target.status):
                watched.tasks[kind] = self._group.create_task(
                    self._repeat(watched, kind, delay), name=f"{kind.value} check of {watched.target.address}"
                )

    async def _repeat(self, watched: _Watched, kind: Kind, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        loop = asyncio.get_running_loop()
        check = _check(self._settings, kind)
        prober = self._prober(watched.target, kind)
        try:
            # The second probe comes early by a random part of the interval, which spreads the nodes over it.
            start = loop.time() - random.uniform(0, check.interval)
            while True:
                began, tolerance = loop.time(), 0.0
                try:
                    finding = await prober.run(check.timeout)
                except CannotProbe as error:
                    self._complain(str(error))
                else:
                    if finding.outcome is Outcome.FAIL and loop.time() - began > 2 * check.timeout:
                        self._complain(_STALLED)
                    else:
                        tolerance = _START_TOLERANCE if finding.outcome is Outcome.FAIL else 0.0
                        self._note(watched, recorded(watched.health, kind, finding, self._clock()))
                        if isinstance(prober, StatusProbe):
                            await self._look_at_config(watched, prober, finding, check)
                start = next_start(start, check.interval, loop.time(), tolerance)
                await asyncio.sleep(start - loop.time())
        finally:
            prober.close()

    async def _look_at_config(
        self, watched: _Watched, prober: StatusProbe, finding: Finding, check: Check
    ) -> None:
        """Once each time that it starts, which shows as a status that passes after one that did not.

        What was read last stands until the next one can be read.
        """
        if finding.outcome is not Outcome.PASS:
            watched.config_due = -math.inf
        elif self._clock() >= watched.config_due:
            config = await prober.config(check.timeout)
            found = None if config is None else hindrances(config, check.interval)
            watched.config_due = self._clock() + _CONFIG_AGAIN if found is None else math.inf
            if found is not None and found != watched.health.hindrances:
                self._note(watched, replace(watched.health, hindrances=found))

    def _prober(self, target: Target, kind: Kind) -> _Prober:
        if kind is Kind.STATUS and target.status is not None:
            return StatusProbe(target.status, target.status_host, self._tls)
        return GreetingProbe(target.sql, proxy_protocol=self._proxy_protocol)

    def _note(self, watched: _Watched, health: Health) -> None:
        watched.health = health
        self._publish(watched.target.address, health)

    def _complain(self, problem: str) -> None:
        """Say that this machine cannot probe, but not for each of thousands of nodes each second."""
        if self._clock() - self._complained >= _COMPLAINT_EVERY:
            self._complained = self._clock()
            log.error(problem)


def recorded(health: Health, kind: Kind, finding: Finding, at: float) -> Health:
    """What is known of a node after one more finding. The count of connections outlives failures."""
    before = health.status if kind is Kind.STATUS else health.sql
    same = before is not None and before.outcome is finding.outcome
    streak = before.streak + 1 if before is not None and same else 1
    probe = Probe(finding.outcome, finding.reason, streak, at)
    if kind is Kind.SQL:
        # The greeting tells the version too, which only counts where nothing better does.
        told = finding.version if health.status is None else ""
        return replace(health, sql=probe, version=told or health.version)
    if finding.connections is None:
        return replace(health, status=probe)
    return replace(
        health,
        status=probe,
        connections=finding.connections,
        connections_at=at,
        version=finding.version,
    )


def next_start(start: float, interval: float, now: float, tolerance: float = 0.0) -> float:
    """When the probe after the one of `start` is due: on the grid of the interval.

    Probes that were missed because this process stood still, or because a probe was slow, are left out. So a
    stall is not followed by a burst, and every node keeps its own place in the interval. A probe that is late
    by no more than `tolerance`, in intervals, is not left out: then the result is in the past, and means now.
    """
    missed = math.floor((now - start) / interval - tolerance) if now > start else 0
    return start + (max(missed, 0) + 1) * interval


def _forgotten(health: Health, kind: Kind) -> Health:
    if kind is Kind.SQL:
        return replace(health, sql=None)
    return replace(health, status=None, connections=None, connections_at=None, hindrances=())


def _check(settings: HealthChecks, kind: Kind) -> Check:
    return settings.status if kind is Kind.STATUS else settings.sql


def _stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
