//! Nodes as the workers see them, and what is counted about each.
//!
//! Counting happens per command, so a counter belongs to one worker: it alone writes, without locked
//! instructions, and the reporter adds them up.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use session::choice::Version;
use session::quota::Allowance;

use crate::clock;
use crate::ejection::{EjectReason, Ejected, Ejection};

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
pub(crate) const PINNED: [&str; 5] = ["transaction", "cursor", "long_data", "opaque", "endless_transactions"];
pub(crate) const PINNED_BY_TRANSACTION: usize = 0;
/// Its client begins each transaction within the last one.
pub(crate) const PINNED_BY_ENDLESS_TRANSACTIONS: usize = 4;

/// How moves to another node end: result and reason.
pub(crate) const MOVES: [(&str, &str); 13] = [
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

/// Why a node could not be used for a new session. The first ones are explained at [`EjectReason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum ConnectFailure {
    Connect,
    Closed,
    Error,
    Invalid,
    Tls,
    /// It is full (error 1040).
    Full,
}

impl ConnectFailure {
    pub(crate) const NAMES: [&'static str; 6] = ["connect", "closed", "error", "invalid", "tls", "full"];

    /// The reason to eject the node for. None: the node works, and may take the next session.
    pub(crate) fn ejects(self) -> Option<EjectReason> {
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
pub(crate) const NODE_FULL: usize = DENIED + 2;
pub(crate) const LOGIN_FAILURES: usize = DENIED + 3;

/// The name of a reason for a failed login.
pub(crate) fn login_failure(reason: usize) -> &'static str {
    match reason {
        DENIED => "denied",
        CLIENT_GONE => "client_gone",
        NODE_FULL => "node_full",
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
    /// By how they ended; moves from here to elsewhere.
    pub(crate) moves: [Count; MOVES.len()],
    /// As `latency`, of those that ended elsewhere.
    pub(crate) move_latency: [Count; BUCKET_NAMES.len()],
    pub(crate) move_microseconds: Count,
}

/// A node, by the name that the control plane gives it; the empty name stands for none.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Sessions on it or on their way to it, of all workers.
    pub(crate) sessions: AtomicU64,
    counts: Mutex<Vec<Arc<Counts>>>,
    /// Sessions that are to leave it although it stays in service.
    allowance: Mutex<Allowance>,
    /// Those of other nodes that it is to get for that.
    wanted: Mutex<Allowance>,
    ejection: Ejection,
    /// `ip:port`, as published last. Empty: not published yet.
    endpoint: Mutex<String>,
}

impl Node {
    /// It is at that endpoint now, where an ejection from another one does not count. Each worker calls this when it learns
    /// of the endpoint, so the second call must change nothing.
    pub(crate) fn set_endpoint(&self, endpoint: &str) {
        let mut known = self.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != endpoint {
            endpoint.clone_into(&mut known);
            self.restore();
        }
    }

    /// It gets no new sessions for that time, or until it greets. [`crate::ejection::eject`] spares the last node of a group.
    pub(crate) fn eject(&self, reason: EjectReason, lasts: Duration) {
        self.ejection.begin(reason, lasts, clock::now());
    }

    /// It works.
    pub(crate) fn restore(&self) {
        self.ejection.end();
    }

    /// None: it is not ejected.
    pub(crate) fn ejected(&self) -> Option<Ejected> {
        self.ejection.details(clock::now())
    }

    /// When its ejection ends, in milliseconds of `clock`. None: it is not ejected. Cheap.
    pub(crate) fn ejected_until(&self) -> Option<u64> {
        self.ejection.until(clock::now())
    }

    /// Whether a session may use it, as [`Ejection::admits`] says.
    pub(crate) fn admits(&self) -> bool {
        self.ejection.admits(clock::now())
    }

    /// What all workers have counted.
    pub(crate) fn counts(&self) -> Vec<Arc<Counts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many sessions are to leave it although it stays in service.
    pub(crate) fn allowance(&self) -> MutexGuard<'_, Allowance> {
        self.allowance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many sessions that leave nodes which stay in service are for it.
    pub(crate) fn wanted(&self) -> MutexGuard<'_, Allowance> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session that a node is to get, kept for one that is on its way there. One that does not arrive gives it back.
#[derive(Debug)]
pub(crate) struct Place {
    node: Arc<Node>,
    /// None: it is used.
    round: Option<u64>,
}

impl Place {
    /// None: the node wants no more.
    pub(crate) fn at(node: &Arc<Node>) -> Option<Self> {
        let round = node.wanted().take()?;
        Some(Self { node: Arc::clone(node), round: Some(round) })
    }

    /// The session is there: it is used.
    pub(crate) fn reached(mut self) {
        self.round = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(round) = self.round {
            self.node.wanted().give_back(round);
        }
    }
}

/// For so long a node is believed that has announced its end: by then it is gone, or has been started again.
const STOPS: Duration = Duration::from_secs(60);

/// A node as one worker sees it, in one group of nodes. One that has changed its group stands in two: its sessions of the
/// old one are to leave it.
#[derive(Debug)]
pub(crate) struct Here {
    pub(crate) group: String,
    pub(crate) node: Arc<Node>,
    pub(crate) counts: Arc<Counts>,
    /// The control plane wants its sessions to go elsewhere.
    is_left: Cell<bool>,
    /// When it has announced its end itself.
    stops: Cell<Option<Duration>>,
    /// Whoever is still there has had their time.
    pub(crate) is_closed: Cell<bool>,
    /// Its release, as the control plane told last.
    pub(crate) version: Cell<Option<Version>>,
    /// It has more than its share, and this Envoy is asked to take some away.
    pub(crate) gives: Cell<bool>,
}

impl Here {
    /// Whether its sessions are to go elsewhere.
    pub(crate) fn is_to_be_left(&self) -> bool {
        self.is_left.get() || self.stops.get().is_some_and(|said| clock::now() < said + STOPS)
    }

    /// It has said whether it comes to its end. True: that is new.
    pub(crate) fn says_that_it_stops(&self, stops: bool) -> bool {
        let is_new = stops && !self.is_to_be_left();
        self.stops.set(stops.then(clock::now));
        is_new
    }

    /// What the control plane says of it now. One that comes into service again has been started again.
    pub(crate) fn set_left(&self, left: bool) {
        if self.is_left.replace(left) && !left {
            self.stops.set(None);
        }
    }
}

static NODES: LazyLock<Mutex<HashMap<String, Arc<Node>>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// By group and name.
    static HERE: RefCell<HashMap<String, HashMap<String, Rc<Here>>>> = RefCell::default();
}

/// All nodes that were ever seen.
pub(crate) fn all() -> Vec<Arc<Node>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
}

/// A node of a group on this worker.
pub(crate) fn here(group: &str, name: &str) -> Rc<Here> {
    HERE.with_borrow_mut(|here| {
        if let Some(found) = here.get(group).and_then(|nodes| nodes.get(name)) {
            return Rc::clone(found);
        }
        let node = Arc::clone(
            NODES
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(name.to_owned())
                .or_insert_with(|| Arc::new(Node { name: name.to_owned(), ..Node::default() })),
        );
        let counts = Arc::new(Counts::default());
        node.counts.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counts));
        let made = Rc::new(Here {
            group: group.to_owned(),
            node,
            counts,
            is_left: Cell::new(false),
            stops: Cell::new(None),
            is_closed: Cell::new(false),
            version: Cell::new(None),
            gives: Cell::new(false),
        });
        here.entry(group.to_owned()).or_default().insert(name.to_owned(), Rc::clone(&made));
        made
    })
}
