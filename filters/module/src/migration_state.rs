//! What a session needs for migrations: its identity, its sockets, and the state of its migration.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use migration::identity::Identity;
use migration::ping_reply::PingReply;
use migration::rate_limit::{ExportBackoff, MigrationBackoff};
use migration::state_snapshot::StateSnapshot;

use mysql_proto::change_user::{CHANGE_USER, MAX_CHANGE_USER_BYTES};
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::secret::SecretBytes;

use crate::commands::IdentityChange;
use crate::deadlines::Deadline;
use crate::migration_driver::{MigrationDriver, UpstreamSocket};
use crate::offload::OffloadedConn;
use crate::old_conn::OldConn;
use crate::session::CloseProbe;

const SET_OPTION: u8 = 0x1b;
/// Bytes of a change of user, and of what follows it, that are kept.
const MAX_CHANGE_BYTES: usize = 2 * MAX_CHANGE_USER_BYTES;
/// Failover attempts of a session whose node is gone.
const MAX_FAILOVER_ATTEMPTS: u8 = 3;
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
    /// None: the module cannot log in for it at another node.
    pub(crate) identity: RefCell<Option<Box<Identity>>>,
    pub(crate) client: OnceCell<Weak<dyn OffloadedConn>>,
    pub(crate) upstream: RefCell<Option<Weak<dyn UpstreamSocket>>>,
    pub(crate) driver: RefCell<Option<Rc<MigrationDriver>>>,
    pub(crate) backoff: RefCell<MigrationBackoff>,
    /// Its states were too large.
    pub(crate) export_backoff: Cell<ExportBackoff>,
    pub(crate) ping_reply: RefCell<PingReply>,
    request: Cell<MigrationRequest>,
    /// The rebalancing round that has selected it. Its node stays in service.
    rebalance_round: Cell<Option<u64>>,
    /// It waits until fewer sessions are held.
    is_in_hold_queue: Cell<bool>,
    /// Its states, as exported last. They are valid until its client sends something.
    snapshot: RefCell<Option<Box<(StateSnapshot, Deadline)>>>,
    /// The address of its node. Known since the first migration started.
    pub(crate) node_address: Cell<Option<SocketAddr>>,
    /// A probe of a node that has closed a connection of it.
    pub(crate) probe: RefCell<Option<Rc<CloseProbe>>>,
    /// The connection to the node that it has just left, until that is closed.
    pub(crate) old_conn: RefCell<Option<Rc<OldConn>>>,
    /// Failover attempts since its node is gone.
    failover_attempts: Cell<u8>,
    /// How often it has migrated.
    migrations: Cell<u32>,
    /// When it has migrated last, or an attempt has failed.
    last_disturbed_at: Cell<Option<Duration>>,
    /// The command that changes the identity, as far as it was sent.
    change_command: RefCell<SecretBytes>,
    /// The part of an identity command that was received. The command is forwarded when it is complete.
    pub(crate) partial_command: RefCell<SecretBytes>,
}

impl MigrationState {
    /// Bytes of the client, in which the tracker has found `change`. The command must stand alone. Otherwise the identity of
    /// the session is unknown from then on.
    pub(crate) fn on_client_bytes(&self, bytes: &[u8], change: IdentityChange) {
        if self.snapshot.borrow().is_some() {
            self.snapshot.replace(None);
            self.failover_attempts.set(0);
        }
        let mut backoff = self.export_backoff.get();
        backoff.on_statement();
        self.export_backoff.set(backoff);
        if change == IdentityChange::None && self.change_command.borrow().is_empty() {
            return;
        }
        self.change_command.borrow_mut().extend_from_slice(bytes);
        let begins_with = |command: u8| self.change_command.borrow().get(HEADER).is_none_or(|&first| first == command);
        if self.change_command.borrow().len() > MAX_CHANGE_BYTES
            || !(begins_with(CHANGE_USER) || begins_with(SET_OPTION))
        {
            self.change_command.borrow_mut().clear();
            self.identity.replace(None);
        }
    }

    /// Bytes of the node, in which the tracker has found `change`.
    pub(crate) fn on_node_bytes(&self, change: IdentityChange) {
        let packet = match change {
            IdentityChange::None | IdentityChange::Began => return,
            IdentityChange::Failed | IdentityChange::Done => self.change_command.take(),
        };
        let mut identity = self.identity.borrow_mut();
        let whole = Header::parse(&packet).is_some_and(|header| HEADER + header.length <= packet.len());
        let known = match (identity.as_mut(), packet.get(HEADER)) {
            (Some(_), _) if change == IdentityChange::Failed => true,
            (Some(identity), Some(&CHANGE_USER)) if whole => {
                let end = HEADER + Header::parse(&packet).map_or(0, |header| header.length);
                identity.apply_change_user(&packet[HEADER..end])
            }
            (Some(identity), Some(&SET_OPTION)) if whole => {
                identity.allow_multi_statements(packet.get(HEADER + 1) == Some(&0));
                true
            }
            _ => false,
        };
        if !known {
            *identity = None;
        }
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

    /// Sets the states, which are valid until its client sends something.
    pub(crate) fn set_snapshot(&self, snapshot: Option<(StateSnapshot, Deadline)>) {
        self.snapshot.replace(snapshot.map(Box::new));
    }

    /// Drops the states when their token has expired.
    pub(crate) fn drop_expired_snapshot(&self) {
        if self.snapshot.borrow().as_ref().is_some_and(|kept| kept.1.has_passed()) {
            self.snapshot.replace(None);
        }
    }

    /// Whether there are valid states.
    pub(crate) fn has_snapshot(&self, now: Duration) -> bool {
        self.snapshot.borrow().as_ref().is_some_and(|kept| now < kept.0.expires_at() && !kept.1.has_passed())
    }

    /// Takes the states for a failover. None: there are none, or too many attempts were made.
    pub(crate) fn take_snapshot(&self, now: Duration) -> Option<StateSnapshot> {
        let (snapshot, deadline) = *self.snapshot.take()?;
        self.failover_attempts.set(self.failover_attempts.get() + 1);
        (now < snapshot.expires_at() && !deadline.has_passed() && self.failover_attempts.get() <= MAX_FAILOVER_ATTEMPTS)
            .then_some(snapshot)
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

    pub(crate) fn upstream(&self) -> Option<Rc<dyn UpstreamSocket>> {
        self.upstream.borrow().as_ref().and_then(Weak::upgrade)
    }

    pub(crate) fn client(&self) -> Option<Rc<dyn OffloadedConn>> {
        self.client.get().and_then(Weak::upgrade)
    }
}
