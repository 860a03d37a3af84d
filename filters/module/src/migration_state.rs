//! Whether and when a session is to migrate, and the progress of its migration.

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
    /// The session is in the queue of the scheduler, or its migration runs.
    Requested,
    /// The session migrates when it is idle.
    WhenIdle,
}

#[derive(Default)]
pub(crate) struct MigrationState {
    pub(crate) driver: RefCell<Option<Rc<MigrationDriver>>>,
    pub(crate) backoff: RefCell<MigrationBackoff>,
    /// Delays the next export after the session's states were too large.
    pub(crate) export_backoff: Cell<ExportBackoff>,
    request: Cell<MigrationRequest>,
    /// The rebalancing round that has selected the session. The node stays in service.
    rebalance_round: Cell<Option<u64>>,
    /// The session waits until fewer clients are held.
    is_in_hold_queue: Cell<bool>,
    /// The address of the session's node. None: no migration has started yet.
    pub(crate) node_address: Cell<Option<SocketAddr>>,
    /// The probe of a node that has closed a connection of the session.
    pub(crate) probe: RefCell<Option<Rc<CloseProbe>>>,
    /// The connection to the node that the session has just left, until the node closes this connection.
    pub(crate) old_conn: RefCell<Option<Rc<OldConn>>>,
    /// How often the session has migrated.
    migrations: Cell<u32>,
    /// When the session last migrated, or a migration failed because of the session.
    cooldown_started_at: Cell<Option<Duration>>,
}

impl MigrationState {
    /// The client has sent something that may make the states smaller.
    pub(crate) fn on_client_bytes(&self) {
        let mut backoff = self.export_backoff.get();
        backoff.on_statement();
        self.export_backoff.set(backoff);
    }

    /// Requests a migration. False: a migration was already requested.
    pub(crate) fn request_migration(&self) -> bool {
        let before = self.request.get();
        if before == MigrationRequest::None {
            self.request.set(MigrationRequest::Requested);
        }
        before == MigrationRequest::None
    }

    /// The rebalancing round that has selected the session. None: no round has.
    pub(crate) fn rebalance_round(&self) -> Option<u64> {
        self.rebalance_round.get()
    }

    pub(crate) fn set_rebalance_round(&self, round: Option<u64>) {
        self.rebalance_round.set(round);
    }

    /// The session waits until fewer clients are held. False: it already waits.
    pub(crate) fn join_hold_queue(&self) -> bool {
        !self.is_in_hold_queue.replace(true)
    }

    pub(crate) fn leave_hold_queue(&self) {
        self.is_in_hold_queue.set(false);
    }

    /// The session has migrated. Returns how often it has done so.
    pub(crate) fn record_migration(&self, now: Duration) -> u32 {
        self.start_cooldown(now);
        self.migrations.set(self.migrations.get().saturating_add(1));
        self.migrations.get()
    }

    /// How often the session has migrated.
    pub(crate) fn migrations(&self) -> u32 {
        self.migrations.get()
    }

    pub(crate) fn has_migrated(&self) -> bool {
        self.migrations.get() > 0
    }

    /// Starts the time during which rebalancing does not select the session again.
    pub(crate) fn start_cooldown(&self, now: Duration) {
        self.cooldown_started_at.set(Some(now));
    }

    /// Whether rebalancing must not select the session yet.
    pub(crate) fn is_in_cooldown(&self, now: Duration) -> bool {
        self.cooldown_started_at.get().is_some_and(|at| now < at + REBALANCE_COOLDOWN)
    }

    /// The session no longer needs to migrate.
    pub(crate) fn clear_request(&self) {
        self.request.set(MigrationRequest::None);
        self.rebalance_round.set(None);
        self.backoff.replace(MigrationBackoff::default());
    }

    /// Defers the migration until the session is idle.
    pub(crate) fn defer_until_idle(&self) {
        self.request.set(MigrationRequest::WhenIdle);
    }

    /// Whether the session is to leave its node. Called after each event, so it must be cheap.
    pub(crate) fn is_migration_requested(&self) -> bool {
        self.request.get() != MigrationRequest::None
    }

    /// Ends the wait until the session is idle. False: it did not wait.
    pub(crate) fn take_deferred(&self) -> bool {
        let was_deferred = self.request.get() == MigrationRequest::WhenIdle;
        if was_deferred {
            self.request.set(MigrationRequest::Requested);
        }
        was_deferred
    }

    pub(crate) fn driver(&self) -> Option<Rc<MigrationDriver>> {
        self.driver.borrow().clone()
    }

    /// Whether a node that has closed a connection of the session is being probed.
    pub(crate) fn is_probing(&self) -> bool {
        self.probe.borrow().is_some()
    }

    /// Whether the client is held: its bytes must not be forwarded.
    pub(crate) fn is_client_held(&self) -> bool {
        self.is_probing()
            || self.is_migration_requested() && self.driver().is_some_and(|driver| driver.is_client_held())
    }
}
