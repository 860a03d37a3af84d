//! One client connection, from accept to close: what its sockets, its filter and the policy share.

mod assembling;
mod closing;
mod ending;
mod leaving;
mod login;
mod traffic;
mod unreachable;

pub(crate) use closing::Question;
pub(crate) use leaving::{Begun, Obstacle};

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use abi::filter::{Filter, Waker};
use wire::error::Refusal;
use wire::login::{Login, Rules};
use wire::tracker::{Pinned, State, Tracker};

use crate::commands::Commands;
use crate::deadlines::Deadline;
use crate::link::Link;
use crate::login_elsewhere::LoginElsewhere;
use crate::node::{self, Counts, Here, Standing};
use crate::reachability::MonitoredEndpoint;
use crate::travel::Travel;
use crate::wakers;

/// The namespace of what access logs may show.
const METADATA: &str = "tidevoy";

/// How far a session has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No node has greeted yet; nothing was said to the client.
    Connecting,
    /// The greeting was passed on.
    Login,
    /// Logged in.
    Established,
    /// Nothing is expected any more.
    Over,
}

/// What becomes of bytes of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passing {
    On,
    /// They go on, and then the session ends.
    Last,
    /// They must not go on: in a change of user they ask for a password that would then be sent as clear text.
    AsksForClearText,
}

/// One session. All of it is on one worker, and hooks may run inside one another, so every part is a cell.
pub(crate) struct Session {
    id: u64,
    hash: u64,
    phase: Cell<Phase>,
    login: RefCell<Option<Box<Login>>>,
    tracker: RefCell<Option<Tracker>>,
    /// The node that it is on, or on its way to.
    node: RefCell<Option<Rc<Here>>>,
    /// The endpoint of that node. None: it has no IP address.
    endpoint: RefCell<Option<Arc<MonitoredEndpoint>>>,
    /// The keepalive time to restore, if the node's kernel was probed.
    keepalive_time_before: Cell<Option<Duration>>,
    /// Endpoints that were tried.
    tried: RefCell<Vec<String>>,
    /// How many of these were full.
    full_nodes: Cell<usize>,
    filter: OnceCell<Filter>,
    client: Rc<Link>,
    /// The client, and the address of ours that it connected to.
    addresses: Cell<Option<(SocketAddr, SocketAddr)>>,
    deadline: RefCell<Option<Deadline>>,
    idle_timeout: Cell<Duration>,
    /// When it was established.
    established_at: Cell<Option<Instant>>,
    /// It has moved while it was idle, since then: what its own node knows of its idle time is too little.
    idle_since: Cell<Option<Instant>>,
    commands: Commands,
    counted: Cell<Option<(Standing, Option<usize>)>>,
    /// The transaction that is open was begun within another, in a session that is to leave its node.
    has_endless_transactions: Cell<bool>,
    /// Whether the client's link has TLS.
    client_tls: Cell<bool>,
    exposed: Cell<bool>,
    client_spoke_last: Cell<bool>,
    /// When the node sent the last bytes of the login.
    node_spoke_at: Cell<Option<Instant>>,
    /// Bytes of the established session.
    from_client: Cell<u64>,
    to_client: Cell<u64>,
    /// What the client is told before its connection closes.
    last_words: RefCell<Vec<u8>>,
    /// A node that greeted with the error that it is full, and that packet: the client gets it if no other node is found.
    full_node: RefCell<Option<(Rc<Here>, Vec<u8>)>>,
    /// The error of a node that has greeted, and is full, until other nodes are asked.
    full_late: RefCell<Vec<u8>>,
    pub(crate) login_elsewhere: RefCell<Option<Rc<LoginElsewhere>>>,
    /// Whether other nodes may be asked then, which is done once.
    may_ask_elsewhere: Cell<bool>,
    /// The reason of a failed login, once it is known.
    failure: Cell<Option<usize>>,
    pub(crate) travel: Travel,
}

impl Session {
    /// A session of the client connection `id`, and of its worker from now on.
    pub(crate) fn begin(id: u64, client: Rc<Link>, rules: Rules) -> Rc<Self> {
        Rc::new(Self {
            id,
            client,
            hash: xxhash_rust::xxh64::xxh64(id.to_string().as_bytes(), 0),
            phase: Cell::new(Phase::Connecting),
            login: RefCell::new(Some(Box::new(Login::new(rules)))),
            tracker: RefCell::default(),
            node: RefCell::default(),
            endpoint: RefCell::default(),
            keepalive_time_before: Cell::new(None),
            tried: RefCell::default(),
            full_nodes: Cell::new(0),
            filter: OnceCell::new(),
            addresses: Cell::new(None),
            deadline: RefCell::default(),
            idle_timeout: Cell::new(Duration::ZERO),
            established_at: Cell::new(None),
            idle_since: Cell::new(None),
            commands: Commands::default(),
            counted: Cell::new(None),
            has_endless_transactions: Cell::new(false),
            client_tls: Cell::new(false),
            exposed: Cell::new(false),
            client_spoke_last: Cell::new(false),
            node_spoke_at: Cell::new(None),
            from_client: Cell::new(0),
            to_client: Cell::new(0),
            last_words: RefCell::default(),
            full_node: RefCell::default(),
            full_late: RefCell::default(),
            login_elsewhere: RefCell::default(),
            may_ask_elsewhere: Cell::new(true),
            failure: Cell::new(None),
            travel: Travel::default(),
        })
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What the policy sees of its connection: Envoy's hash of the filter state that the filter sets.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.get()
    }

    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.addresses.get()
    }

    /// The filter is there; from here on the session can be closed, and is watched.
    pub(crate) fn begun(&self, filter: Filter, login_timeout: Duration, idle_timeout: Duration) {
        self.addresses.set(filter.remote_address().zip(filter.local_address()));
        self.idle_timeout.set(idle_timeout);
        if let Some(waker) = filter.waker() {
            self.deadline.replace(Some(Deadline::new(waker, login_timeout)));
        }
        let _ = self.filter.set(filter);
        wakers::begun(self);
    }

    /// What wakes it from other threads.
    pub(crate) fn waker(&self) -> Option<Waker> {
        self.filter.get().and_then(Filter::waker)
    }

    /// The same, while it is established.
    pub(crate) fn living_waker(&self) -> Option<Waker> {
        self.waker().filter(|_| self.phase.get() == Phase::Established)
    }

    /// The connection to a node that the client's is to be joined with.
    pub(crate) fn join(&self, node: &Rc<Link>) {
        self.client.pair(node);
    }

    pub(crate) fn has_tried(&self, endpoint: &str) -> bool {
        self.tried.borrow().iter().any(|tried| tried == endpoint)
    }

    /// Whether Envoy has given this session the connection that was made for it. Its pools are told not to mix them up.
    pub(crate) fn owns(&self, connection: Option<u64>) -> bool {
        connection.is_some() && self.filter.get().and_then(Filter::upstream_connection_id) == connection
    }

    /// The policy chose a node; a connection to it is being made.
    pub(crate) fn try_node(&self, address: &str, node: &Rc<Here>, endpoint: Option<&Arc<MonitoredEndpoint>>) {
        self.tried.borrow_mut().push(address.to_owned());
        self.leave_node();
        self.endpoint.replace(endpoint.cloned());
        node.node.sessions.fetch_add(1, Ordering::Relaxed);
        self.node.replace(Some(Rc::clone(node)));
        self.count(Some((Standing::Login, None)));
    }

    /// The node could not be used; Envoy may ask the policy for another.
    pub(crate) fn node_failed(&self) {
        if self.phase.get() == Phase::Connecting {
            self.leave_node();
        }
    }

    /// The node has greeted with this error: it is full. Another one may not be.
    pub(crate) fn node_is_full(&self, node: &Rc<Here>, packet: &[u8]) {
        if self.phase.get() == Phase::Connecting {
            self.full_nodes.set(self.full_nodes.get() + 1);
            self.full_node.replace(Some((Rc::clone(node), packet.to_vec())));
        }
    }

    /// How many nodes it has tried that failed. Full ones do not count.
    pub(crate) fn failed_nodes(&self) -> usize {
        self.tried.borrow().len().saturating_sub(self.full_nodes.get())
    }

    /// The endpoint that was tried last, until the login is over.
    pub(crate) fn endpoint(&self) -> String {
        self.tried.borrow().last().cloned().unwrap_or_default()
    }

    /// The node that it is on, or on its way to.
    pub(crate) fn node(&self) -> Option<Rc<Here>> {
        self.node.borrow().clone()
    }

    fn leave_node(&self) {
        self.count(None);
        if let Some(left) = self.node.take() {
            left.node.sessions.fetch_sub(1, Ordering::Relaxed);
            self.endpoint.replace(None);
        }
    }

    /// What is counted about its node, or about none.
    fn counts<T>(&self, run: impl FnOnce(&Counts) -> T) -> T {
        match &*self.node.borrow() {
            Some(here) => run(&here.counts),
            None => run(&node::here("", "").counts),
        }
    }

    fn count(&self, now: Option<(Standing, Option<usize>)>) {
        let before = self.counted.replace(now);
        if before == now {
            return;
        }
        self.counts(|counts| {
            if let Some((standing, pinned)) = before {
                counts.sessions[standing as usize].subtract(1);
                if let Some(reason) = pinned {
                    counts.pinned[reason].subtract(1);
                }
            }
            if let Some((standing, pinned)) = now {
                counts.sessions[standing as usize].add(1);
                if let Some(reason) = pinned {
                    counts.pinned[reason].add(1);
                }
            }
        });
    }
}

fn standing(tracker: &Tracker) -> (Standing, Option<usize>) {
    let standing = match tracker.state() {
        State::Idle => Standing::Idle,
        State::Busy => Standing::Busy,
        State::InTransaction => Standing::Transaction,
        State::Opaque => Standing::Opaque,
    };
    let pinned = tracker.pinned().map(|reason| match reason {
        Pinned::Transaction => 0,
        Pinned::Cursor => 1,
        Pinned::LongData => 2,
        Pinned::Opaque => 3,
    });
    (standing, pinned)
}

fn refusal(why: Refusal) -> usize {
    Refusal::ALL.iter().position(|one| *one == why).unwrap_or(node::DENIED)
}
