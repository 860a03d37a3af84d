//! Whether a session is to migrate, when, and how far its migration is.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use migration::rate_limit::{ExportBackoff, MigrationBackoff};

use crate::migration_driver::MigrationDriver;
use crate::old_conn::OldConn;
use crate::session::CloseProbe;

/// After a migration, or a failed attempt, the time until the session may be selected for rebalancing again.
const REBALANCE_COOLDOWN: Duration = Duration::from_secs(60);

/// Whether a session is to leave its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum MigrationRequest {
    #[default]
    None,
    /// It is in the queue, or on its way.
    Requested,
    /// As soon as it is idle.
    WhenIdle,
}

#[derive(Default)]
pub(crate) struct MigrationState {
    pub(crate) driver: RefCell<Option<Rc<MigrationDriver>>>,
    pub(crate) backoff: RefCell<MigrationBackoff>,
    /// Its states were too large.
    pub(crate) export_backoff: Cell<ExportBackoff>,
    request: Cell<MigrationRequest>,
    /// The rebalancing round that has selected it. Its node stays in service.
    rebalance_round: Cell<Option<u64>>,
    /// It waits until fewer sessions are held.
    is_in_hold_queue: Cell<bool>,
    /// The address of its node. Known since the first migration started.
    pub(crate) node_address: Cell<Option<SocketAddr>>,
    /// A probe of a node that has closed a connection of it.
    pub(crate) probe: RefCell<Option<Rc<CloseProbe>>>,
    /// The connection to the node that it has just left, until that is closed.
    pub(crate) old_conn: RefCell<Option<Rc<OldConn>>>,
    /// How often it has migrated.
    migrations: Cell<u32>,
    /// When it has migrated last, or an attempt has failed.
    last_disturbed_at: Cell<Option<Duration>>,
}

impl MigrationState {
    /// The client has sent something, after which the states may be smaller.
    pub(crate) fn on_client_bytes(&self) {
        let mut backoff = self.export_backoff.get();
        backoff.on_statement();
        self.export_backoff.set(backoff);
    }

    /// Requests a migration. False: one was requested before.
    pub(crate) fn request_migration(&self) -> bool {
        let before = self.request.get();
        if before == MigrationRequest::None {
            self.request.set(MigrationRequest::Requested);
        }
        before == MigrationRequest::None
    }

    /// The rebalancing round that has selected it. None: it is not selected.
    pub(crate) fn rebalance_round(&self) -> Option<u64> {
        self.rebalance_round.get()
    }

    pub(crate) fn set_rebalance_round(&self, round: Option<u64>) {
        self.rebalance_round.set(round);
    }

    /// It waits until fewer sessions are held. False: it waits already.
    pub(crate) fn join_hold_queue(&self) -> bool {
        !self.is_in_hold_queue.replace(true)
    }

    pub(crate) fn leave_hold_queue(&self) {
        self.is_in_hold_queue.set(false);
    }

    /// It has migrated. Returns how often.
    pub(crate) fn record_migration(&self, now: Duration) -> u32 {
        self.start_cooldown(now);
        self.migrations.set(self.migrations.get().saturating_add(1));
        self.migrations.get()
    }

    pub(crate) fn has_migrated(&self) -> bool {
        self.migrations.get() > 0
    }

    /// It has migrated, or an attempt has failed.
    pub(crate) fn start_cooldown(&self, now: Duration) {
        self.last_disturbed_at.set(Some(now));
    }

    /// Whether that was a short time ago, so that rebalancing should not select it.
    pub(crate) fn is_in_cooldown(&self, now: Duration) -> bool {
        self.last_disturbed_at.get().is_some_and(|at| now < at + REBALANCE_COOLDOWN)
    }

    /// It does not need to migrate any more.
    pub(crate) fn clear_request(&self) {
        self.request.set(MigrationRequest::None);
        self.rebalance_round.set(None);
        self.backoff.replace(MigrationBackoff::default());
    }

    /// It migrates when it is idle.
    pub(crate) fn defer_until_idle(&self) {
        self.request.set(MigrationRequest::WhenIdle);
    }

    /// Whether it is to leave its node. Called after each event, so it must be cheap.
    pub(crate) fn is_migration_requested(&self) -> bool {
        self.request.get() != MigrationRequest::None
    }

    /// True: it has waited to be idle, and does not any more.
    pub(crate) fn take_deferred(&self) -> bool {
        let waited = self.request.get() == MigrationRequest::WhenIdle;
        if waited {
            self.request.set(MigrationRequest::Requested);
        }
        waited
    }

    pub(crate) fn driver(&self) -> Option<Rc<MigrationDriver>> {
        self.driver.borrow().clone()
    }

    /// Whether a node is being probed that has closed a connection of it.
    pub(crate) fn is_probing(&self) -> bool {
        self.probe.borrow().is_some()
    }

    /// Whether nothing of the client may be passed on.
    pub(crate) fn is_client_held(&self) -> bool {
        self.is_probing()
            || self.is_migration_requested() && self.driver().is_some_and(|driver| driver.is_client_held())
    }
}
