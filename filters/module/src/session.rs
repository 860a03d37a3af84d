//! One client connection, from accept to close: what its sockets, its filter and the policy share.

mod close_probe;
mod ending;
mod identity_commands;
mod login;
mod migration;
mod token_plugin_scan;
mod traffic;
mod unreachable;

pub(crate) use self::migration::{MigrationBlocker, StartResult};
pub(crate) use close_probe::CloseProbe;
use token_plugin_scan::TokenPluginScan;

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use envoy_abi::filter::Filter;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{Login, Rules};
use mysql_proto::tracker::{PinReason, Tracker, TrackerState};

use crate::commands::Commands;
use crate::conn::Conn;
use crate::deadlines::Deadline;
use crate::login_failover::LoginFailover;
use crate::login_limits::LoginSlot;
use crate::migration_state::MigrationState;
use crate::node::{self, Counts, SessionState, WorkerNode};
use crate::reachability::MonitoredEndpoint;
use crate::worker::WorkerContext;

/// The namespace of what access logs may show.
const METADATA: &str = "tidevoy";

/// How far a session has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionPhase {
    /// No node has greeted yet; nothing was said to the client.
    Connecting,
    /// The greeting was passed on.
    Login,
    /// Logged in.
    Established,
    /// Nothing is expected any more.
    Ended,
}

/// What to do with bytes of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassDecision {
    Pass,
    /// Passes them on, and then ends the session.
    PassAndClose,
    /// Must not pass them on: in a change of user they request a password that must not or cannot be sent.
    Reject(ProxyError),
}

/// One session. All of it is on one worker, and hooks may run inside one another, so every part is a cell.
pub(crate) struct Session {
    pub(crate) worker: Rc<WorkerContext>,
    id: u64,
    hash: u64,
    phase: Cell<SessionPhase>,
    login: RefCell<Option<Box<Login>>>,
    tracker: RefCell<Option<Tracker>>,
    /// The node that it is on, or on its way to.
    node: RefCell<Option<Rc<WorkerNode>>>,
    /// The endpoint of that node. None: it has no IP address.
    endpoint: RefCell<Option<Arc<MonitoredEndpoint>>>,
    /// The keepalive time to restore, if the node's kernel was probed.
    keepalive_time_before: Cell<Option<Duration>>,
    /// Endpoints that were tried.
    tried_endpoints: RefCell<Vec<String>>,
    /// How many of these were full.
    full_nodes: Cell<usize>,
    filter: OnceCell<Filter>,
    client: Rc<Conn>,
    /// The client, and the address of ours that it connected to.
    addresses: Cell<Option<(SocketAddr, SocketAddr)>>,
    deadline: RefCell<Option<Deadline>>,
    idle_timeout: Cell<Duration>,
    /// When it was established.
    established_at: Cell<Option<Instant>>,
    /// Since when it is idle, if it has migrated meanwhile: its node knows only a part of that time.
    idle_since: Cell<Option<Instant>>,
    commands: Commands,
    counted_state: Cell<Option<(SessionState, Option<usize>)>>,
    token_plugin_scan: RefCell<TokenPluginScan>,
    /// The open transaction was begun within another one, in a session that is to migrate.
    has_endless_transactions: Cell<bool>,
    /// Whether the client's connection has TLS.
    client_has_tls: Cell<bool>,
    has_plain_node_side: Cell<bool>,
    has_client_sent_last: Cell<bool>,
    /// When the node sent the last bytes of the login.
    last_node_bytes_at: Cell<Option<Instant>>,
    /// Bytes of the established session.
    bytes_from_client: Cell<u64>,
    bytes_to_client: Cell<u64>,
    /// The error packet for the client, before its connection closes.
    final_error: RefCell<Vec<u8>>,
    /// A node that greeted with the error that it is full, and that packet: the client gets it if no other node is found.
    full_node_error: RefCell<Option<(Rc<WorkerNode>, Vec<u8>)>>,
    /// The error of a node that has greeted, and is full, until the login fails over.
    late_full_error: RefCell<Vec<u8>>,
    pub(crate) login_failover: RefCell<Option<Rc<LoginFailover>>>,
    /// Counts towards the limits of logins, until the login is over.
    login_slot: RefCell<Option<LoginSlot>>,
    /// Whether the login may fail over then, which is done once.
    may_fail_over: Cell<bool>,
    /// The reason of a failed login, once it is known.
    login_failure: Cell<Option<usize>>,
    pub(crate) migration: MigrationState,
}

impl Session {
    /// A session of the client connection `id`, and of its worker from now on.
    pub(crate) fn new(id: u64, client: Rc<Conn>, rules: Rules) -> Rc<Self> {
        Rc::new(Self {
            worker: Rc::clone(&client.worker),
            id,
            client,
            hash: xxhash_rust::xxh64::xxh64(id.to_string().as_bytes(), 0),
            phase: Cell::new(SessionPhase::Connecting),
            login: RefCell::new(Some(Box::new(Login::new(rules)))),
            tracker: RefCell::default(),
            node: RefCell::default(),
            endpoint: RefCell::default(),
            keepalive_time_before: Cell::new(None),
            tried_endpoints: RefCell::default(),
            full_nodes: Cell::new(0),
            filter: OnceCell::new(),
            addresses: Cell::new(None),
            deadline: RefCell::default(),
            idle_timeout: Cell::new(Duration::ZERO),
            established_at: Cell::new(None),
            idle_since: Cell::new(None),
            commands: Commands::default(),
            counted_state: Cell::new(None),
            token_plugin_scan: RefCell::default(),
            has_endless_transactions: Cell::new(false),
            client_has_tls: Cell::new(false),
            has_plain_node_side: Cell::new(false),
            has_client_sent_last: Cell::new(false),
            last_node_bytes_at: Cell::new(None),
            bytes_from_client: Cell::new(0),
            bytes_to_client: Cell::new(0),
            final_error: RefCell::default(),
            full_node_error: RefCell::default(),
            late_full_error: RefCell::default(),
            login_failover: RefCell::default(),
            login_slot: RefCell::default(),
            may_fail_over: Cell::new(true),
            login_failure: Cell::new(None),
            migration: MigrationState::default(),
        })
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What the policy sees of its connection: Envoy's hash of the filter state that the filter sets.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn phase(&self) -> SessionPhase {
        self.phase.get()
    }

    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.addresses.get()
    }

    /// The filter exists: from now on the session can be closed, and has a deadline.
    pub(crate) fn attach_filter(self: &Rc<Self>, filter: Filter, login_timeout: Duration, idle_timeout: Duration) {
        self.addresses.set(filter.remote_address().zip(filter.local_address()));
        self.idle_timeout.set(idle_timeout);
        self.start_deadline(login_timeout);
        self.worker.waker.add(self.id, &filter);
        let _ = self.filter.set(filter);
    }

    /// Joins the client's connection with the connection to a node.
    pub(crate) fn pair_with(&self, node: &Rc<Conn>) {
        self.client.pair(node);
    }

    pub(crate) fn has_tried(&self, endpoint: &str) -> bool {
        self.tried_endpoints.borrow().iter().any(|tried| tried == endpoint)
    }

    /// Whether Envoy has given this session the connection that was made for it. Its pools are told not to mix them up.
    pub(crate) fn is_owner_of(&self, connection: Option<u64>) -> bool {
        connection.is_some() && self.filter.get().and_then(Filter::upstream_connection_id) == connection
    }

    /// The policy chose a node; a connection to it is being made.
    pub(crate) fn try_node(&self, address: &str, node: &Rc<WorkerNode>, endpoint: Option<&Arc<MonitoredEndpoint>>) {
        self.tried_endpoints.borrow_mut().push(address.to_owned());
        self.set_login_node(node, endpoint);
    }

    /// The login continues at a node, perhaps one that was tried before.
    pub(crate) fn set_login_node(&self, node: &Rc<WorkerNode>, endpoint: Option<&Arc<MonitoredEndpoint>>) {
        self.release_node();
        self.endpoint.replace(endpoint.cloned());
        node.shared.sessions.fetch_add(1, Ordering::Relaxed);
        self.node.replace(Some(Rc::clone(node)));
        self.set_counted_state(Some((SessionState::Login, None)));
    }

    /// The node could not be used; Envoy may ask the policy for another.
    pub(crate) fn on_node_failed(&self) {
        if self.phase.get() == SessionPhase::Connecting {
            self.release_node();
        }
    }

    /// The node has greeted with this error: it is full. Another one may not be.
    pub(crate) fn on_node_full(&self, node: &Rc<WorkerNode>, packet: &[u8]) {
        if self.phase.get() == SessionPhase::Connecting {
            self.full_nodes.set(self.full_nodes.get() + 1);
            self.full_node_error.replace(Some((Rc::clone(node), packet.to_vec())));
        }
    }

    /// How many nodes it has tried that failed. Full ones do not count.
    pub(crate) fn failed_node_count(&self) -> usize {
        self.tried_endpoints.borrow().len().saturating_sub(self.full_nodes.get())
    }

    /// The endpoint that was tried last, until the login is over.
    pub(crate) fn last_tried_endpoint(&self) -> String {
        self.tried_endpoints.borrow().last().cloned().unwrap_or_default()
    }

    /// The node that it is on, or on its way to.
    pub(crate) fn node(&self) -> Option<Rc<WorkerNode>> {
        self.node.borrow().clone()
    }

    fn release_node(&self) {
        self.set_counted_state(None);
        if let Some(left) = self.node.take() {
            left.shared.sessions.fetch_sub(1, Ordering::Relaxed);
            self.endpoint.replace(None);
        }
    }

    /// The counters of its node, or those without a node.
    fn with_counts<T>(&self, run: impl FnOnce(&Counts) -> T) -> T {
        match &*self.node.borrow() {
            Some(node) => run(&node.counts),
            None => run(self.worker.nodes.no_node()),
        }
    }

    fn set_counted_state(&self, now: Option<(SessionState, Option<usize>)>) {
        let before = self.counted_state.replace(now);
        if before == now {
            return;
        }
        self.with_counts(|counts| {
            if let Some((state, pinned)) = before {
                counts.sessions[state as usize].subtract(1);
                if let Some(reason) = pinned {
                    counts.pinned[reason].subtract(1);
                }
            }
            if let Some((state, pinned)) = now {
                counts.sessions[state as usize].add(1);
                if let Some(reason) = pinned {
                    counts.pinned[reason].add(1);
                }
            }
        });
    }
}

fn session_state(tracker: &Tracker) -> (SessionState, Option<usize>) {
    let state = match tracker.state() {
        TrackerState::Idle => SessionState::Idle,
        TrackerState::Busy => SessionState::Busy,
        TrackerState::InTransaction => SessionState::Transaction,
        TrackerState::Opaque => SessionState::Opaque,
    };
    let pinned = tracker.pin_reason().map(|reason| match reason {
        PinReason::Transaction => 0,
        PinReason::Cursor => 1,
        PinReason::LongData => 2,
        PinReason::Opaque => 3,
    });
    (state, pinned)
}

fn proxy_error_index(why: ProxyError) -> usize {
    ProxyError::ALL.iter().position(|one| *one == why).unwrap_or(node::DENIED)
}
