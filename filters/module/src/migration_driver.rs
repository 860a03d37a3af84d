//! Drives one migration: applies the effects of [`migration::state_machine`] to the module's sockets.
//!
//! The module opens the connection to the target. When the target has restored the session, this connection replaces
//! the old connection under Envoy's descriptor. Envoy does not notice this.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use migration::identity::Identity;
use migration::state_machine::{AbortReason, Effect, Migration};
use migration::state_snapshot::StateSnapshot;
use migration::state_summary::UnusableStates;
use migration::target_login::LoginFailure;
use migration::timeouts::{MigrationStep, MigrationTimeouts};
use mysql_proto::login::NodeTls;
use tls::{Stream, TlsError};

use crate::deadlines::{Deadline, DeadlineOwner};
use crate::hosts::TargetNode;
use crate::node::{BUCKETS, ConnectFailure, Counts, MIGRATION_RESULTS, WorkerNode};
use crate::offload::{self, AuxFd, OffloadedConn};
use crate::old_conn::{OldConn, QUIT};
use crate::panics::{CloseAfterPanic, PANIC_REASON};
use crate::session::Session;
use crate::states_memory::ExportGuard;
use crate::target_conn::{TargetFault, TargetLost};
use crate::watched_target_conn::WatchedTargetConn;
use crate::{clock, migration_scheduler, states_memory};

/// The socket of a session to its node.
pub(crate) trait UpstreamSocket: OffloadedConn {
    /// The PROXY header that is sent to a node before its greeting. Empty: none.
    fn proxy_header(&self) -> Vec<u8>;
    /// Whether a connection to another node needs TLS.
    fn target_tls(&self) -> NodeTls;
    /// Creates a TLS stream to a node of that name. None: TLS is not configured.
    fn create_tls(&self, name: &str) -> Option<Result<Stream, TlsError>>;
    /// Processes bytes of the login that the module itself has received from a node.
    fn receive_login(&self, bytes: &[u8]);
    /// Counts that a node could not be used at that endpoint, and ejects the node if necessary.
    fn report_connect_failure(&self, node: &WorkerNode, endpoint: &str, failure: ConnectFailure);
}

/// How a migration has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MigrationResult {
    Migrated,
    Aborted(AbortReason),
    /// The session has lost its old node, and no target has restored the session.
    Lost,
}

impl MigrationResult {
    /// The reason in [`MIGRATION_RESULTS`].
    fn metric_reason(self) -> &'static str {
        match self {
            Self::Migrated => "ok",
            Self::Lost => "lost",
            Self::Aborted(reason) => match reason {
                AbortReason::Unreachable(_) => REASON_UNREACHABLE,
                AbortReason::TimedOut(_) => "slow",
                AbortReason::TargetFailed(LoginFailure::Denied(_)) => "denied",
                AbortReason::TargetFailed(LoginFailure::RestoreRejected(_)) => "not_restored",
                AbortReason::TargetFailed(
                    LoginFailure::GreetedWithError(_)
                    | LoginFailure::MissingCapabilities
                    | LoginFailure::NoTls
                    | LoginFailure::ProtocolError,
                ) => "invalid",
                AbortReason::ExportRejected(_) => "refused",
                AbortReason::NoToken => "no_token",
                AbortReason::UnusableStates(UnusableStates::TooLarge) => "states_too_large",
                AbortReason::UnusableStates(UnusableStates::OverBudget) => "states_budget",
                AbortReason::UnusableStates(
                    UnusableStates::InvalidJson | UnusableStates::LossyText | UnusableStates::Unrestorable,
                ) => "states",
                AbortReason::Cancelled => "cancelled",
            },
        }
    }
}

/// There is no target.
pub(crate) const REASON_NO_NODE: &str = "no_node";
/// The target cannot be reached, or no connection can be made at all.
pub(crate) const REASON_UNREACHABLE: &str = "unreachable";

/// Counts a migration by its reason. A cancelled migration is not counted.
pub(crate) fn count_result(reason: &str, counts: &Counts) {
    if let Some(index) = MIGRATION_RESULTS.iter().position(|(_, name)| *name == reason) {
        counts.migrations[index].add(1);
    }
}

pub(crate) struct MigrationDriver {
    session: Weak<Session>,
    upstream: Rc<dyn UpstreamSocket>,
    target_node: TargetNode,
    migration: RefCell<Migration>,
    target_conn: WatchedTargetConn,
    deadline: RefCell<Option<Deadline>>,
    started_at: Instant,
    is_finished: Cell<bool>,
    /// The session's node had failed before the migration started.
    is_failover: bool,
    /// The session's node has failed.
    is_old_node_gone: Cell<bool>,
    slots: Cell<MigrationSlots>,
    export_guard: Cell<Option<ExportGuard>>,
}

/// The slots that a migration occupies. Their numbers are limited for all migrations together.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MigrationSlots {
    /// A slot of the migrations that run at the same time.
    pub(crate) running: bool,
    /// A slot of the migrations that started while their session was busy, so that they may have to wait.
    pub(crate) waiting: bool,
    /// A slot of the migrations that hold their client.
    pub(crate) holding: bool,
}

impl MigrationDriver {
    /// Starts a migration. `snapshot`: the session's states, for a failover. None: a connection to the target cannot be
    /// made or watched.
    pub(crate) fn start(
        session: &Rc<Session>,
        upstream: Rc<dyn UpstreamSocket>,
        identity: Identity,
        target_node: TargetNode,
        snapshot: Option<StateSnapshot>,
    ) -> Option<Rc<Self>> {
        let (tls, limits, now) = (upstream.target_tls(), MigrationTimeouts::default(), clock::now());
        let is_failover = snapshot.is_some();
        let migration = match snapshot {
            None => Migration::start(identity, tls, limits, now),
            Some(snapshot) => Migration::start_failover(identity, tls, limits, snapshot, now),
        };
        let driver = Rc::new_cyclic(|driver| Self {
            session: Rc::downgrade(session),
            upstream,
            target_node,
            migration: RefCell::new(migration.with_memory_limits(states_memory::limits())),
            target_conn: WatchedTargetConn::default(),
            deadline: RefCell::new(Some(Deadline::new(&session.worker.deadlines, Duration::MAX, driver))),
            started_at: Instant::now(),
            is_finished: Cell::new(false),
            is_failover,
            is_old_node_gone: Cell::new(is_failover),
            slots: Cell::new(MigrationSlots { running: true, ..MigrationSlots::default() }),
            export_guard: Cell::new(None),
        });
        let aux_fd: Weak<dyn AuxFd> = Rc::downgrade(&(Rc::clone(&driver) as Rc<dyn AuxFd>));
        driver.target_conn.connect(&*driver.upstream, driver.target_node.address, aux_fd)?;
        driver.update_deadline();
        // A migrating session counts at its target. Otherwise all migrations that start together would choose the same
        // node.
        driver.target_node.node.shared.sessions.fetch_add(1, Ordering::Relaxed);
        Some(driver)
    }

    pub(crate) fn target_node(&self) -> &TargetNode {
        &self.target_node
    }

    /// Counts the result.
    pub(crate) fn count_result(&self, result: MigrationResult, counts: &Counts) {
        count_result(result.metric_reason(), counts);
        if result == MigrationResult::Migrated {
            let took = u64::try_from(self.started_at.elapsed().as_micros()).unwrap_or(u64::MAX);
            counts.migration_latency[BUCKETS.partition_point(|&end| end < took)].add(1);
            counts.migration_microseconds.add(took);
        }
    }

    /// Whether the client is held: its bytes must not be forwarded.
    pub(crate) fn is_client_held(&self) -> bool {
        self.migration.borrow().is_client_held()
    }

    /// The session's connection id at the target. None: the target has not greeted.
    pub(crate) fn target_connection_id(&self) -> Option<u32> {
        self.migration.borrow().target_connection_id()
    }

    /// The session's states that this migration has exported.
    pub(crate) fn take_snapshot(&self) -> Option<StateSnapshot> {
        self.migration.borrow_mut().take_snapshot()
    }

    /// How long the session's node allows the session to be idle. None: unknown.
    pub(crate) fn wait_timeout(&self) -> Option<Duration> {
        self.migration.borrow().wait_timeout()
    }

    /// Whether the session no longer needs its old node.
    pub(crate) fn is_without_old_node(&self) -> bool {
        self.migration.borrow().is_without_old_node()
    }

    /// Whether the old node owes a response.
    pub(crate) fn awaits_old_node(&self) -> bool {
        self.migration.borrow().awaits_old_node()
    }

    /// Whether the session's node had failed before the migration started. Such a migration must not be cancelled.
    pub(crate) fn is_failover(&self) -> bool {
        self.is_failover
    }

    /// Whether the target is draining, too.
    pub(crate) fn is_target_draining(&self) -> bool {
        self.target_node.node.is_draining()
    }

    /// Whether the target is ready, and the migration only waits until the session is idle.
    pub(crate) fn is_waiting_for_idle(&self) -> bool {
        self.migration.borrow().step() == MigrationStep::WaitingForIdle && !self.is_client_held()
    }

    /// Starts the export. The session must be idle, without bytes in transit.
    pub(crate) fn start_export(&self, identity: Identity) {
        self.slots.set(MigrationSlots { holding: true, ..self.slots.get() });
        self.export_guard.set(Some(self.upstream.conn().worker.states.begin_export()));
        self.advance(|migration, now| migration.start_export(identity, now));
    }

    /// The session was busy when the migration started.
    pub(crate) fn set_waiting(&self) {
        self.slots.set(MigrationSlots { waiting: true, ..self.slots.get() });
    }

    /// Takes the slots. The caller must release them.
    pub(crate) fn take_slots(&self) -> MigrationSlots {
        self.slots.take()
    }

    /// The old node has sent bytes while the client is held.
    pub(crate) fn on_old_node_bytes(&self, bytes: &[u8]) {
        self.advance(|migration, now| migration.on_old_node_bytes(bytes, now));
    }

    /// The old node has closed the connection, and is being probed.
    pub(crate) fn on_old_conn_closed(&self) {
        self.migration.borrow_mut().on_old_conn_closed();
    }

    /// The old node has failed.
    pub(crate) fn on_old_node_lost(&self) {
        self.is_old_node_gone.set(true);
        self.advance(|migration, _| migration.on_old_node_lost());
    }

    /// The target has failed or has closed the connection.
    pub(crate) fn on_target_lost(&self) {
        self.advance(Migration::on_target_lost);
    }

    /// All bytes of the old node have been read. Switches if the switch has waited for this.
    pub(crate) fn retry_switch(&self) {
        self.advance(|migration, _| migration.retry_switch());
    }

    /// The session no longer needs to migrate.
    pub(crate) fn cancel(&self) {
        self.advance(|migration, now| migration.cancel(now));
    }

    /// The session has ended: closes the connection to the target.
    pub(crate) fn abandon(&self) {
        self.release_target();
        self.export_guard.set(None);
        self.deadline.replace(None);
        self.target_conn.close();
    }

    fn advance(&self, step: impl FnOnce(&mut Migration, Duration) -> Vec<Effect>) {
        if self.is_finished.get() {
            return;
        }
        let mut effects = VecDeque::from(step(&mut self.migration.borrow_mut(), clock::now()));
        while let Some(effect) = effects.pop_front() {
            let migration = || self.migration.borrow_mut();
            match self.apply(effect) {
                Ok(()) => {}
                Err(TargetFault::Lost) => effects.extend(migration().on_target_lost(clock::now())),
                Err(TargetFault::Invalid) => effects.extend(migration().on_target_invalid(clock::now())),
            }
        }
        self.target_conn.rearm();
        self.update_deadline();
    }

    fn apply(&self, effect: Effect) -> Result<(), TargetFault> {
        match effect {
            Effect::SendToTarget(bytes) => self.target_conn.with(|target| target.send(&bytes))?,
            Effect::RestoreStates(statement) => self.target_conn.with(|target| target.send_states(statement))?,
            Effect::StartTargetTls(request) => {
                self.target_conn.start_tls(&*self.upstream, &self.target_node.node.shared.name, &request)?;
            }
            Effect::TargetReady => {
                self.upstream.conn().worker.ports.record_greeting(|| Some(self.target_node.address));
                if let Some(session) = self.session.upgrade() {
                    session.on_quiescent();
                }
            }
            Effect::HoldClient(bytes) | Effect::SendToOldNode(bytes) => {
                // If the connection is broken, an event reports it.
                let _ = self.upstream.conn().write_or_queue(&bytes);
            }
            Effect::ReleaseSlots => migration_scheduler::release_slots(&self.upstream.conn().worker, self),
            Effect::Switch => self.switch()?,
            Effect::Abort(reason) => self.finish(MigrationResult::Aborted(reason)),
            Effect::Lost => self.finish(MigrationResult::Lost),
        }
        Ok(())
    }

    fn switch(&self) -> Result<(), TargetFault> {
        let conn = self.upstream.conn();
        if !self.target_conn.with(|target| Ok::<_, TargetLost>(target.has_sent_all()))? {
            return Err(TargetFault::Invalid); // the target has confirmed states that it cannot have received
        }
        if !self.is_old_node_gone.get() && conn.has_unread() {
            // The end of the connection after KILL may be unread. It is read first, and then `retry_switch` is called.
            offload::rearm(conn);
            return Ok(());
        }
        let (target, key) = self.target_conn.take().ok_or(TargetLost)?;
        let is_offloaded = offload::try_offload(Rc::clone(&self.upstream) as Rc<dyn OffloadedConn>);
        let old = conn.duplicate().filter(|_| !self.is_old_node_gone.get());
        let (connection, tls) = target.into_parts();
        self.migration.borrow_mut().on_switched();
        if is_offloaded && offload::swap(conn, key, connection) {
            let old_tls = conn.replace_connection(tls);
            if let (Some(old), Some(session)) = (old, self.session.upgrade()) {
                OldConn::start(&session, old, old_tls);
            }
            self.finish(MigrationResult::Migrated);
        } else {
            conn.write_final(QUIT);
            conn.worker.events.remove_key(key);
            self.finish(MigrationResult::Lost);
        }
        Ok(())
    }

    fn finish(&self, result: MigrationResult) {
        if result == MigrationResult::Migrated
            && let Some(reservation) = self.target_node.reservation.take()
        {
            reservation.consume();
        }
        self.abandon();
        if let Some(session) = self.session.upgrade() {
            migration_scheduler::on_migration_finished(&session, self, result);
        }
    }

    /// Stops counting the migration as a session of the target, and releases the reserved quota.
    fn release_target(&self) {
        if !self.is_finished.replace(true) {
            self.target_node.node.shared.sessions.fetch_sub(1, Ordering::Relaxed);
            drop(self.target_node.reservation.take());
        }
    }

    fn update_deadline(&self) {
        if let Some(deadline) = &*self.deadline.borrow() {
            let at = self.migration.borrow().deadline();
            deadline.set(at.map_or(Duration::MAX, |at| at.saturating_sub(clock::now())));
        }
    }
}

impl CloseAfterPanic for MigrationDriver {
    fn close_after_panic(&self) {
        if let Some(session) = self.session.upgrade() {
            session.close_now(PANIC_REASON);
        }
    }
}

impl DeadlineOwner for MigrationDriver {
    /// The present step of the migration takes too long.
    fn on_deadline(self: Rc<Self>) {
        self.advance(Migration::on_deadline);
    }
}

impl AuxFd for MigrationDriver {
    fn on_event(self: Rc<Self>) {
        let secured = self.upstream.conn().worker.buffers.with_scratch(|plain| {
            let secured = self.target_conn.with(|target| target.receive(plain));
            if !plain.is_empty() {
                self.advance(|migration, now| migration.on_target_bytes(plain, now));
            }
            secured
        });
        match secured {
            Ok(false) => self.target_conn.rearm(),
            Ok(true) => self.advance(Migration::on_target_tls_established),
            Err(TargetLost) => self.on_target_closed(),
        }
    }
}

impl MigrationDriver {
    /// The target has closed the connection. After the login this may be the effect of a KILL.
    fn on_target_closed(&self) {
        let session =
            self.session.upgrade().filter(|_| self.migration.borrow().is_logged_in() && !self.is_finished.get());
        self.target_conn.close();
        match session {
            Some(session) => session.on_target_closed(),
            None => self.on_target_lost(),
        }
    }
}
