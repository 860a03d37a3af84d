//! The nodes, and the counters of each node.
//!
//! Each command changes counters, so changing them must be cheap. Each worker has its own counters, which only this
//! worker writes, without atomic read-modify-write instructions. The reporter adds the counters of all workers up.

mod registry;

pub(crate) use registry::{WorkerNodes, all_nodes, take_unused_nodes};

use std::cell::Cell;
use std::rc::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use migration::quota::QuotaRemaining;
use migration::target_choice::Release;
use mysql_proto::error::ProxyError;
use mysql_proto::login::TOO_MANY_CONNECTIONS;

use crate::clock;
use crate::ejection::{EjectReason, Ejection, EjectionDetails};

/// A counter that one worker writes and other threads read.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(by), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The state by which a session is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum SessionState {
    Login,
    Idle,
    Busy,
    Transaction,
    Opaque,
}

impl SessionState {
    pub(crate) const NAMES: [&'static str; 5] = ["login", "idle", "busy", "transaction", "opaque"];
}

/// Why sessions cannot migrate. The indexes of these reasons follow.
pub(crate) const PINNED: [&str; 5] = ["transaction", "cursor", "long_data", "opaque", "endless_transactions"];
pub(crate) const PINNED_BY_TRANSACTION: usize = 0;
pub(crate) const PINNED_BY_CURSOR: usize = 1;
pub(crate) const PINNED_BY_LONG_DATA: usize = 2;
pub(crate) const PINNED_AS_OPAQUE: usize = 3;
/// The client has sent BEGIN within an open transaction, which commits the open one. Such a session may never be
/// outside of a transaction.
pub(crate) const PINNED_BY_ENDLESS_TRANSACTIONS: usize = 4;

/// How migrations end: result and reason. See `MigrationResult::metric_reason`.
pub(crate) const MIGRATION_RESULTS: [(&str, &str); 13] = [
    ("moved", "ok"),
    ("stayed", "no_node"),
    ("stayed", "unreachable"),
    ("stayed", "slow"),
    ("stayed", "denied"),
    ("stayed", "not_restored"),
    ("stayed", "invalid"),
    ("stayed", "refused"),
    ("stayed", "no_token"),
    ("stayed", "states"),
    ("stayed", "states_too_large"),
    ("stayed", "states_budget"),
    ("lost", "lost"),
];

/// Why a node could not be used for a new session. [`EjectReason`] explains the failures that eject a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum ConnectFailure {
    Connect,
    Closed,
    Error,
    Invalid,
    Tls,
    /// The node is full (error 1040).
    Full,
}

impl ConnectFailure {
    pub(crate) const NAMES: [&'static str; 6] = ["connect", "closed", "error", "invalid", "tls", "full"];

    /// The reason to eject the node. None: the node works, and may accept the next session.
    pub(crate) fn eject_reason(self) -> Option<EjectReason> {
        match self {
            Self::Connect => Some(EjectReason::Connect),
            Self::Closed => Some(EjectReason::Closed),
            Self::Error => Some(EjectReason::Error),
            Self::Invalid => Some(EjectReason::Invalid),
            Self::Tls => Some(EjectReason::Tls),
            Self::Full => None,
        }
    }
}

/// The kinds of commands that are counted separately.
pub(crate) const KINDS: [&str; 8] = ["query", "prepare", "execute", "fetch", "ping", "change_user", "reset", "other"];

/// Upper bounds of the latency buckets in microseconds. The last bucket has no bound.
pub(crate) const BUCKETS: [u64; 13] =
    [500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000];

/// The labels of the latency buckets: their upper bounds in seconds.
pub(crate) const BUCKET_NAMES: [&str; 14] =
    ["0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "10", "+Inf"];

/// The classes of the errors that nodes answer with.
pub(crate) const ERRORS: [&str; 8] =
    ["access", "deadlock", "shutdown", "killed", "limit", "cluster", "syntax", "other"];

/// Why a login has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoginFailure {
    /// The module has refused the login.
    Error(ProxyError),
    /// The node has refused the login.
    Denied,
    /// The client has closed the connection.
    ClientGone,
    /// The node has too many connections.
    NodeFull,
}

impl LoginFailure {
    /// All failures, in the order of their indexes.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        ProxyError::ALL.into_iter().map(Self::Error).chain([Self::Denied, Self::ClientGone, Self::NodeFull])
    }

    /// The index in [`Counts::login_failures`].
    pub(crate) fn index(self) -> usize {
        match self {
            Self::Error(error) => error as usize,
            Self::Denied => ProxyError::ALL.len(),
            Self::ClientGone => ProxyError::ALL.len() + 1,
            Self::NodeFull => ProxyError::ALL.len() + 2,
        }
    }

    /// The name in metrics and in the access log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error(error) => error.name(),
            Self::Denied => "denied",
            Self::ClientGone => "client_gone",
            Self::NodeFull => "node_full",
        }
    }

    /// The code of the error that the client gets. None: it gets that of the node, or has left.
    pub(crate) fn error_code(self) -> Option<u16> {
        match self {
            Self::Error(error) => Some(error.code_state_text().0),
            Self::NodeFull => Some(TOO_MANY_CONNECTIONS),
            Self::Denied | Self::ClientGone => None,
        }
    }
}

/// The counters of one worker for one node.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sessions: [Count; SessionState::NAMES.len()],
    pub(crate) pinned: [Count; PINNED.len()],
    pub(crate) logins: Count,
    pub(crate) login_failures: [Count; ProxyError::ALL.len() + 3],
    pub(crate) connect_failures: [Count; ConnectFailure::NAMES.len()],
    pub(crate) commands: [Count; KINDS.len()],
    /// Commands by latency bucket, not cumulative.
    pub(crate) latency: [Count; BUCKET_NAMES.len()],
    pub(crate) command_microseconds: Count,
    pub(crate) errors: [Count; ERRORS.len()],
    pub(crate) bytes_to_node: Count,
    pub(crate) bytes_to_client: Count,
    /// Results of migrations from this node.
    pub(crate) migrations: [Count; MIGRATION_RESULTS.len()],
    /// Like `latency`, for successful migrations.
    pub(crate) migration_latency: [Count; BUCKET_NAMES.len()],
    pub(crate) migration_microseconds: Count,
}

impl Counts {
    /// All counts, always in the same order.
    fn all(&self) -> impl Iterator<Item = &Count> {
        let single = [
            &self.logins,
            &self.command_microseconds,
            &self.bytes_to_node,
            &self.bytes_to_client,
            &self.migration_microseconds,
        ];
        let arrays: [&[Count]; 9] = [
            &self.sessions,
            &self.pinned,
            &self.login_failures,
            &self.connect_failures,
            &self.commands,
            &self.latency,
            &self.errors,
            &self.migrations,
            &self.migration_latency,
        ];
        single.into_iter().chain(arrays.into_iter().flatten())
    }

    fn sum(&self, other: &Self) -> Self {
        let sum = Self::default();
        for (sum, (count, other)) in sum.all().zip(self.all().zip(other.all())) {
            sum.add(count.get().wrapping_add(other.get()));
        }
        sum
    }
}

/// The counts of a node.
#[derive(Debug, Default)]
struct NodeCounts {
    /// The counters of the workers that use the node.
    current: Vec<Arc<Counts>>,
    /// The sum of the counters that workers no longer use. Replaced instead of changed, since another thread may be
    /// reading the sum.
    retired: Arc<Counts>,
}

/// A node, identified by the name that the control plane gives it. All workers share this state. The empty name stands
/// for sessions without a node.
#[derive(Debug, Default)]
pub(crate) struct SharedNode {
    pub(crate) name: String,
    /// The number of sessions, in all workers, that use the node, or are connecting or migrating to it.
    pub(crate) sessions: AtomicU64,
    counts: Mutex<NodeCounts>,
    /// How many sessions rebalancing is to migrate from the node.
    outgoing_quota: Mutex<QuotaRemaining>,
    /// How many sessions rebalancing is to migrate to the node.
    incoming_quota: Mutex<QuotaRemaining>,
    ejection: Ejection,
    /// `ip:port`, as last published. Empty: not published yet.
    endpoint: Mutex<String>,
}

impl SharedNode {
    /// Sets the node's endpoint. A new endpoint ends the node's ejection. Each worker calls this, so a second call with
    /// the same endpoint must change nothing.
    pub(crate) fn set_endpoint(&self, endpoint: &str) {
        let mut known = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != endpoint {
            endpoint.clone_into(&mut known);
            self.end_ejection();
        }
    }

    /// Ejects the node: it gets no new sessions for `duration`, or until it sends a greeting. Call this through
    /// [`crate::ejection::eject`], which never ejects the last usable node of a group.
    pub(crate) fn eject(&self, reason: EjectReason, duration: Duration) {
        self.ejection.begin(reason, duration, clock::now());
    }

    /// Called when the node works again, or has another endpoint.
    pub(crate) fn end_ejection(&self) {
        self.ejection.end();
    }

    /// None: the node is not ejected.
    pub(crate) fn ejection_details(&self) -> Option<EjectionDetails> {
        self.ejection.details(clock::now())
    }

    /// When the node's ejection ends, in milliseconds of `clock`. None: the node is not ejected. Called for each choice
    /// of a node, so it must be cheap.
    pub(crate) fn ejected_until(&self) -> Option<u64> {
        self.ejection.until(clock::now())
    }

    /// Whether the calling session may use the node: see [`Ejection::try_admit`].
    pub(crate) fn try_admit(&self) -> bool {
        self.ejection.try_admit(clock::now())
    }

    /// The counters of all workers, and the sum of those no longer used.
    pub(crate) fn counts(&self) -> Vec<Arc<Counts>> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.current.iter().chain([&counts.retired]).cloned().collect()
    }

    /// Adds the counters of another worker.
    fn add_counts(&self) -> Arc<Counts> {
        let new = Arc::<Counts>::default();
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).current.push(Arc::clone(&new));
        new
    }

    /// Removes the counters of a worker that no longer uses the node. Their values stay in the sum.
    fn retire_counts(&self, old: &Arc<Counts>) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.current.retain(|current| !Arc::ptr_eq(current, old));
        counts.retired = Arc::new(counts.retired.sum(old));
    }

    /// How many sessions rebalancing is to migrate from the node.
    pub(crate) fn outgoing_quota(&self) -> MutexGuard<'_, QuotaRemaining> {
        self.outgoing_quota.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many sessions rebalancing is to migrate to the node.
    pub(crate) fn incoming_quota(&self) -> MutexGuard<'_, QuotaRemaining> {
        self.incoming_quota.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a node's incoming quota that is reserved for one migration. A drop without [`Self::consume`] releases this
/// part.
#[derive(Debug)]
pub(crate) struct QuotaReservation {
    node: Arc<SharedNode>,
    /// None: the reservation was consumed.
    round: Option<u64>,
}

impl QuotaReservation {
    /// None: the quota is used up.
    pub(crate) fn reserve(node: &Arc<SharedNode>) -> Option<Self> {
        let round = node.incoming_quota().reserve()?;
        Some(Self { node: Arc::clone(node), round: Some(round) })
    }

    /// Uses the reservation for a session that has migrated.
    pub(crate) fn consume(mut self) {
        self.round = None;
    }
}

impl Drop for QuotaReservation {
    fn drop(&mut self) {
        if let Some(round) = self.round {
            self.node.incoming_quota().release(round);
        }
    }
}

/// How long a node counts as draining after it has announced its shutdown. By then it has stopped or was restarted.
const ANNOUNCEMENT_LIFETIME: Duration = Duration::from_secs(60);

/// The state of a node in one worker and one group of nodes. A node that has changed its group has a state in each of
/// the two groups: its sessions of the old group are to migrate.
#[derive(Debug)]
pub(crate) struct WorkerNode {
    nodes: Weak<WorkerNodes>,
    pub(crate) group: String,
    pub(crate) shared: Arc<SharedNode>,
    pub(crate) counts: Arc<Counts>,
    /// The control plane drains the node.
    is_marked_draining: Cell<bool>,
    /// When the node itself has announced its shutdown.
    shutdown_announced_at: Cell<Option<Duration>>,
    /// The node's remaining sessions must be closed.
    pub(crate) must_close_sessions: Cell<bool>,
    /// The node's release, as last published by the control plane.
    pub(crate) version: Cell<Option<Release>>,
    /// The node has more sessions than its share, and this Envoy has to migrate some of them.
    pub(crate) has_surplus: Cell<bool>,
}

impl WorkerNode {
    /// Whether the node's sessions are to migrate.
    pub(crate) fn is_draining(&self) -> bool {
        self.is_marked_draining.get()
            || self.shutdown_announced_at.get().is_some_and(|at| clock::now() < at + ANNOUNCEMENT_LIFETIME)
    }

    /// Records whether the node announces its shutdown. True: the node begins to drain.
    pub(crate) fn record_shutdown_announcement(&self, is_shutting_down: bool) -> bool {
        let is_new = is_shutting_down && !self.is_draining();
        self.shutdown_announced_at.set(is_shutting_down.then(clock::now));
        is_new
    }

    /// Sets whether the control plane drains the node. A node that returns to service was restarted, so this clears the
    /// announcement of its shutdown.
    pub(crate) fn set_draining(&self, is_draining_now: bool) {
        if self.is_marked_draining.replace(is_draining_now) && !is_draining_now {
            self.shutdown_announced_at.set(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_login_failure_has_its_own_counter_and_name() {
        let failures: Vec<_> = LoginFailure::all().collect();
        assert!(failures.iter().enumerate().all(|(index, failure)| failure.index() == index));
        assert_eq!(failures.len(), Counts::default().login_failures.len());
        let names: std::collections::HashSet<_> = failures.iter().map(|failure| failure.name()).collect();
        assert_eq!(names.len(), failures.len());
    }
}
