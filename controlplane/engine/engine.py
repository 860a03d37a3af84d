"""The control plane: creates observers, planner, xDS server and all other parts, and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from prometheus_client import CollectorRegistry

from controlplane.clock import Clock, monotonic_unix_clock
from controlplane.config.loader import apply_reload
from controlplane.config.settings import Settings, build_policy
from controlplane.decide.node_sources import forget_completed_removals
from controlplane.engine.capture_operations import CaptureOperations
from controlplane.engine.cluster_view import ClusterView
from controlplane.engine.node_operations import NodeOperations
from controlplane.engine.plan_saver import PlanSaver
from controlplane.engine.planner import Planner
from controlplane.engine.rule_operations import RuleOperations
from controlplane.engine.session_directory import SessionDirectory
from controlplane.engine.statement_view import StatementView
from controlplane.errors import ConfigError, StateUnavailable, VersionConflict
from controlplane.events.event_log import EventLog
from controlplane.events.event_messages import reload_message
from controlplane.grpc_auth import XdsPortService
from controlplane.intents.repository import IntentRepository
from controlplane.metrics import logs
from controlplane.metrics.certificates import CertificateMetrics
from controlplane.metrics.registry import Metrics
from controlplane.model.intents import Intents
from controlplane.model.views import ReloadResult
from controlplane.observe.fact_store import FactStore
from controlplane.observe.observers import Observers
from controlplane.replicas.membership import ReplicaView
from controlplane.replicas.replica_set import ReplicaSet
from controlplane.rollouts.service import RolloutService
from controlplane.sessions.command_queue import CommandQueue
from controlplane.sessions.command_service import CommandService
from controlplane.storage.file_store import FileStore
from controlplane.storage.restored_state import clamp_intent_times
from controlplane.storage.store import LoadedState, Store, Versioned
from controlplane.xds.server import XdsServer

log = structlog.get_logger("tidevoy.engine")


class Engine:
    """A control plane. Call every method from the event loop that runs `run`.

    `cluster` and `statements` read the current state, `operations`, `rules`, `captures` and `rollouts` change
    it, `sessions` asks the Envoys about their sessions, and `events` is the event log.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        load_settings: Callable[[], Settings] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._load_settings = load_settings
        self._clock = clock = clock or monotonic_unix_clock()
        self._started = asyncio.Event()
        self._reload_lock = asyncio.Lock()
        self._metrics = Metrics(lambda: self.cluster.metrics_snapshot())
        CertificateMetrics(lambda: self.settings, self.registry)
        self.events = EventLog(clock, self.registry)
        self._facts = FactStore(self.events, build_policy(settings), clock())
        command_queue = CommandQueue()
        self._replicas: ReplicaSet | None = None
        self._store: Store = FileStore(settings.state_dir)
        local_store = self._store
        if settings.replicas.enabled:
            self._replicas = ReplicaSet(
                settings, clock, self._facts, self.events, self.registry, command_queue
            )
            self._store, local_store = self._replicas.store, self._replicas.local_store
        self._intents = IntentRepository(self._store, self.events)
        self._observers = Observers(
            settings,
            clock,
            self._facts,
            self.events,
            self._replicas.peer_feed if self._replicas is not None else None,
        )
        services: list[XdsPortService] = [
            self._observers.load_reports,
            self._observers.module_metrics,
            self._observers.statement_reports,
            CommandService(
                command_queue,
                envoy_of=self._facts.envoy_of_process,
                resolve_kill=lambda id_: self.sessions.resolve_kill(id_),
            ),
        ]
        if self._replicas is not None:
            services += [self._replicas.peer_feed, self._replicas.commands]
        self._xds = XdsServer(settings, clock, self.events, self._facts, services)
        self._plan_saver = PlanSaver(
            local_store,
            lambda: self._planner.saved_plan,
            self._metrics.failed_plan_saves,
            before_save=self._forget_completed_removals,
        )
        self._planner = Planner(
            settings,
            clock,
            facts=self._facts,
            intents=self._intents,
            observers=self._observers,
            xds=self._xds,
            saver=self._plan_saver,
            events=self.events,
            metrics=self._metrics,
            replicas=self._replicas,
        )
        statements = self._observers.statements
        self.cluster = ClusterView(clock, self._facts, self._intents, self._planner, statements)
        self.statements = StatementView(statements, self.cluster, self._replicas)
        self.sessions = SessionDirectory(command_queue, self.cluster, self._replicas)
        self.operations = NodeOperations(clock, self._intents, self._planner, self.cluster)
        self.rules = RuleOperations(self._intents, self._planner, self.operations)
        self.captures = CaptureOperations(clock, self._planner, self.cluster, self.operations)
        self.rollouts = RolloutService(
            self._store,
            clock=clock,
            term=lambda: self.valid_term,
            cluster_state=self.cluster.state_for_rollouts,
            change_intents=self.operations.change_intents,
            settings=lambda: self.settings,
            emit=self.events.emit,
            registry=self.registry,
        )
        if self._replicas is not None:
            self._replicas.connect(
                self._intents,
                self._observers.module_metrics,
                self._observers.statements,
                self._xds,
                self._planner,
                current_plan=lambda: self._planner.saved_plan,
                on_shared_state_changed=self._apply_shared_state,
                write_failures=self._metrics.failed_plan_saves,
            )

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics that `GET /metrics` serves."""
        return self._metrics.registry

    @property
    def valid_term(self) -> int | None:
        """The term in which this control plane leads, while its lease is certainly valid; else None.

        The term is 0 without replication. The leader computes plans and runs rollouts.
        """
        return 0 if self._replicas is None else self._replicas.valid_term

    @property
    def xds_port(self) -> int:
        """The port that the xDS server is bound to; valid after the start."""
        return self._xds.port

    async def run(self) -> None:
        """Observe, decide and publish until cancelled. Raises TidevoyError if it cannot start."""
        async with self._store.lock(), AsyncExitStack() as stack:
            await self._restore_state()
            # At the end, the stack calls these functions in reverse order.
            stack.push_async_callback(self._plan_saver.save)
            stack.push_async_callback(self._xds.stop)
            if self._replicas is not None:
                stack.push_async_callback(self._replicas.resign)
            stack.callback(self.events.close)
            await self._xds.start()
            self.sessions.mark_open()
            self._planner.decide()
            self._started.set()
            async with asyncio.TaskGroup() as tasks:
                for part in (self._observers, self._planner, self._xds, self._plan_saver, self.rollouts):
                    tasks.create_task(part.run())
                tasks.create_task(self._wake_rollouts())
                if self._replicas is not None:
                    tasks.create_task(self._replicas.run())

    async def wait_started(self) -> None:
        """Return when the saved state is restored and the xDS port is open."""
        await self._started.wait()

    def readiness_problems(self) -> list[str]:
        """Return why this control plane is not ready, one sentence each; empty if it is ready."""
        if not self._started.is_set():
            return ["the control plane is starting"]
        return self.cluster.readiness_problems()

    def replicas(self) -> list[ReplicaView]:
        """Return all replicas of the control plane, sorted by name; empty if replication is off."""
        return self._replicas.views() if self._replicas is not None else []

    async def reload(self) -> ReloadResult:
        """Reload the configuration. If it raises ConfigError, the old configuration stays."""
        if self._load_settings is None:
            return ReloadResult()
        async with self._reload_lock:
            try:
                new_settings = await asyncio.to_thread(self._load_settings)
                await self.rules.check_settings_rules(new_settings.statements.rule_list)
            except ConfigError as error:
                self._metrics.reloads.labels("rejected").inc()
                message = f"the old configuration stays in force: {error}"
                self.events.emit("config.rejected", "config", message)
                raise
            self.settings, result = apply_reload(self.settings, new_settings)
            logs.set_level(self.settings.log.level)
            self._planner.configure(self.settings)
            self._observers.configure(self.settings)
            self._xds.configure(self.settings)
            self._planner.decide()
        self._metrics.reloads.labels("applied").inc()
        self.events.emit("config.reloaded", "config", reload_message(result))
        return result

    async def _restore_state(self) -> None:
        stored = await self._store.load()
        for load_error in stored.load_errors:
            self.events.emit("state.load_failed", str(self.settings.state_dir), load_error)
        self._intents.restore(self._with_clamped_times(stored.intents))
        self.rollouts.restore(stored.rollouts)
        if stored.plan is not None:
            self._planner.restore(stored.plan)

    def _apply_shared_state(self, stored: LoadedState) -> None:
        """Apply what any replica has written to the shared store."""
        if stored.intents.version > self._intents.version:
            self._intents.accept(self._with_clamped_times(stored.intents))
            self._planner.decide(at_once=True)
        self.rollouts.apply_stored(stored.rollouts)

    def _with_clamped_times(self, stored: Versioned[Intents]) -> Versioned[Intents]:
        return Versioned(clamp_intent_times(stored.value, self._clock()), stored.version)

    async def _forget_completed_removals(self) -> None:
        """Delete the intents about removed nodes that have left the plan. The next save retries a failure."""

        def without_completed(intents: Intents) -> Intents:
            if self.valid_term is None:
                return intents
            return forget_completed_removals(intents, self.cluster.plan, self.cluster.facts)

        try:
            await self.operations.change_intents(without_completed, by_operator=False)
        except (StateUnavailable, VersionConflict) as error:
            log.warning("could not record a completed removal", error=str(error))

    async def _wake_rollouts(self) -> None:
        while True:
            await self._planner.wait_updated()
            self.rollouts.wake()
