//! Nodes as the workers see them, and what is counted about each.
//!
//! Counting happens per command, so a counter belongs to one worker: it alone writes, without locked
//! instructions, and the reporter adds them up.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// A number that one worker writes and others read.
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

/// Where a session stands, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Standing {
    Login,
    Idle,
    Busy,
    Transaction,
    Opaque,
}

impl Standing {
    pub(crate) const NAMES: [&'static str; 5] = ["login", "idle", "busy", "transaction", "opaque"];
}

/// Why a session could not move.
pub(crate) const PINNED: [&str; 4] = ["transaction", "cursor", "long_data", "opaque"];

/// Why a node could not be used for a new session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum ConnectFailure {
    /// No TCP connection.
    Connect,
    /// It closed before its greeting was whole, or had none in time.
    Closed,
    /// It greeted with an error.
    Error,
    /// It greeted with something else.
    Invalid,
    /// TLS failed.
    Tls,
}

impl ConnectFailure {
    pub(crate) const NAMES: [&'static str; 5] = ["connect", "closed", "error", "invalid", "tls"];
}

/// Kinds of commands that are told apart.
pub(crate) const KINDS: [&str; 8] = ["query", "prepare", "execute", "fetch", "ping", "change_user", "reset", "other"];

/// Upper ends of the latency buckets in microseconds; the last one has none.
pub(crate) const BUCKETS: [u64; 13] =
    [500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000];

/// The same in seconds, as labels.
pub(crate) const BUCKET_NAMES: [&str; 14] =
    ["0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "10", "+Inf"];

/// Classes of errors that servers answer with.
pub(crate) const ERRORS: [&str; 8] =
    ["access", "deadlock", "shutdown", "killed", "limit", "cluster", "syntax", "other"];

/// Reasons of failed logins beyond the proxy's own refusals.
pub(crate) const DENIED: usize = wire::error::Refusal::ALL.len();
pub(crate) const CLIENT_GONE: usize = DENIED + 1;
pub(crate) const LOGIN_FAILURES: usize = DENIED + 2;

/// The name of a reason for a failed login.
pub(crate) fn login_failure(reason: usize) -> &'static str {
    match reason {
        DENIED => "denied",
        CLIENT_GONE => "client_gone",
        refusal => wire::error::Refusal::ALL[refusal].name(),
    }
}

/// What one worker counts about one node.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sessions: [Count; Standing::NAMES.len()],
    pub(crate) pinned: [Count; PINNED.len()],
    pub(crate) logins: Count,
    pub(crate) login_failures: [Count; LOGIN_FAILURES],
    pub(crate) connect_failures: [Count; ConnectFailure::NAMES.len()],
    pub(crate) commands: [Count; KINDS.len()],
    /// Not cumulative: commands by the bucket that they fell into.
    pub(crate) latency: [Count; BUCKET_NAMES.len()],
    pub(crate) microseconds: Count,
    pub(crate) errors: [Count; ERRORS.len()],
    pub(crate) to_node: Count,
    pub(crate) to_client: Count,
}

/// A node, by the name that the control plane gives it; the empty name stands for none.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Sessions on it or on their way to it, of all workers.
    pub(crate) sessions: AtomicU64,
    counts: Mutex<Vec<Arc<Counts>>>,
}

impl Node {
    /// What all workers have counted.
    pub(crate) fn counts(&self) -> Vec<Arc<Counts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A node as one worker sees it.
#[derive(Debug)]
pub(crate) struct Here {
    pub(crate) node: Arc<Node>,
    pub(crate) counts: Arc<Counts>,
}

static NODES: LazyLock<Mutex<HashMap<String, Arc<Node>>>> = LazyLock::new(Mutex::default);

thread_local! {
    static HERE: RefCell<HashMap<String, Rc<Here>>> = RefCell::default();
}

/// All nodes that were ever seen.
pub(crate) fn all() -> Vec<Arc<Node>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
}

/// A node on this worker.
pub(crate) fn here(name: &str) -> Rc<Here> {
    HERE.with_borrow_mut(|here| {
        if let Some(found) = here.get(name) {
            return Rc::clone(found);
        }
        let node =
            Arc::clone(NODES.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_insert_with(
                || Arc::new(Node { name: name.to_owned(), sessions: AtomicU64::new(0), counts: Mutex::default() }),
            ));
        let counts = Arc::new(Counts::default());
        node.counts.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counts));
        let made = Rc::new(Here { node, counts });
        here.insert(name.to_owned(), Rc::clone(&made));
        made
    })
}
