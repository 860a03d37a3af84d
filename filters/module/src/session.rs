//! One client connection, from accept to close: what its sockets, its filter and the policy share.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use abi::filter::Filter;
use wire::capability::Capabilities;
use wire::error::Refusal;
use wire::login::{Login, PasswordKey, Progress, Rules};
use wire::tracker::{Pinned, State, Tracker};

use crate::commands::{Commands, Watcher};
use crate::deadlines::Deadline;
use crate::link::Link;
use crate::node::{self, Counts, Here, Standing};

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

/// Time that a client has to read what the node said before it closed.
const UNREAD: Duration = Duration::from_secs(60);

/// One session. All of it is on one worker, and hooks may run inside one another, so every part is a cell.
pub(crate) struct Session {
    id: u64,
    hash: u64,
    phase: Cell<Phase>,
    login: RefCell<Option<Box<Login>>>,
    tracker: RefCell<Option<Tracker>>,
    /// The node that it is on, or on its way to.
    node: RefCell<Option<Rc<Here>>>,
    /// Endpoints that were tried.
    tried: RefCell<Vec<String>>,
    filter: OnceCell<Filter>,
    client: Rc<Link>,
    /// The client, and the address of ours that it connected to.
    addresses: Cell<Option<(SocketAddr, SocketAddr)>>,
    deadline: RefCell<Option<Deadline>>,
    idle_timeout: Cell<Duration>,
    commands: Commands,
    counted: Cell<Option<(Standing, Option<usize>)>>,
    /// Whether the client's link has TLS.
    client_tls: Cell<bool>,
    exposed: Cell<bool>,
    client_spoke_last: Cell<bool>,
    /// What the client is told before its connection closes.
    last_words: RefCell<Vec<u8>>,
    /// The reason of a failed login, once it is known.
    failure: Cell<Option<usize>>,
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
            tried: RefCell::default(),
            filter: OnceCell::new(),
            addresses: Cell::new(None),
            deadline: RefCell::default(),
            idle_timeout: Cell::new(Duration::ZERO),
            commands: Commands::default(),
            counted: Cell::new(None),
            client_tls: Cell::new(false),
            exposed: Cell::new(false),
            client_spoke_last: Cell::new(false),
            last_words: RefCell::default(),
            failure: Cell::new(None),
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
            self.deadline.replace(Some(Deadline::new(self.id, waker, login_timeout)));
        }
        let _ = self.filter.set(filter);
    }

    // --- the node ---

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
    pub(crate) fn try_node(&self, endpoint: &str, node: &Rc<Here>) {
        self.tried.borrow_mut().push(endpoint.to_owned());
        self.leave_node();
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

    fn leave_node(&self) {
        self.count(None);
        if let Some(left) = self.node.take() {
            left.node.sessions.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What is counted about its node, or about none.
    fn counts<T>(&self, run: impl FnOnce(&Counts) -> T) -> T {
        match &*self.node.borrow() {
            Some(here) => run(&here.counts),
            None => run(&node::here("").counts),
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

    // --- login ---

    pub(crate) fn client_has_tls(&self) -> bool {
        self.client_tls.get()
    }

    /// The node has greeted: what it said goes to the client.
    pub(crate) fn greeted(&self) {
        self.phase.set(Phase::Login);
        self.tried.replace(Vec::new());
    }

    /// Runs a step of the login; None when it is over.
    pub(crate) fn login<T>(&self, step: impl FnOnce(&mut Login) -> T) -> Option<T> {
        self.login.borrow_mut().as_mut().map(|login| step(login))
    }

    /// Bytes of the client go through the login.
    pub(crate) fn login_from_client(
        &self,
        bytes: &[u8],
        key: &dyn PasswordKey,
        out: &mut wire::login::Output,
    ) -> (usize, Progress) {
        let (taken, progress) =
            self.login(|login| login.client(bytes, key, out)).unwrap_or((bytes.len(), Progress::More));
        self.progressed(progress);
        (taken, progress)
    }

    /// Bytes of the node go through the login.
    pub(crate) fn login_from_node(&self, bytes: &[u8], out: &mut wire::login::Output) -> (usize, Progress) {
        let (taken, progress) = self.login(|login| login.node(bytes, out)).unwrap_or((bytes.len(), Progress::More));
        self.progressed(progress);
        (taken, progress)
    }

    fn progressed(&self, progress: Progress) {
        match progress {
            Progress::More => {}
            Progress::StartClientTls => self.client_tls.set(true),
            Progress::Established(capabilities) => self.established(capabilities),
            Progress::Denied(_) => self.failed(node::DENIED),
            Progress::Refused(why) => self.failed(refusal(why)),
        }
    }

    fn established(&self, capabilities: Capabilities) {
        self.phase.set(Phase::Established);
        self.login.replace(None);
        let mut tracker = Tracker::new(capabilities);
        if capabilities.0 & (Capabilities::COMPRESS.0 | Capabilities::ZSTD_COMPRESSION.0) != 0 {
            tracker.give_up();
        }
        self.tracker.replace(Some(tracker));
        self.counts(|counts| counts.logins.add(1));
        if self.idle_timeout.get().is_zero() {
            self.deadline.replace(None);
        }
        self.is_active();
        self.recount();
    }

    fn failed(&self, reason: usize) {
        if self.failure.replace(Some(reason)).is_none() {
            self.counts(|counts| counts.login_failures[reason].add(1));
        }
        self.phase.set(Phase::Over);
    }

    /// The client will send no more. True: it has not finished its login, so all is over.
    pub(crate) fn client_finished(&self) -> bool {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Login) {
            self.failed(node::CLIENT_GONE);
        }
        self.phase.get() == Phase::Over
    }

    // --- the end ---

    /// Nothing more is expected of the client, which gets so much time to read what it was told, and to close.
    pub(crate) fn close_after(&self, time: Duration) {
        if let Some(deadline) = &*self.deadline.borrow() {
            deadline.set(time);
        }
    }

    /// The node has closed. What it said last is on its way to the client, who has some time to read it.
    pub(crate) fn node_closed(&self) {
        if self.phase.get() != Phase::Established {
            return;
        }
        self.phase.set(Phase::Over);
        self.leave_node();
        self.deadline.replace(None); // before there is another: they go by the session's number
        if let Some(waker) = self.filter.get().and_then(Filter::waker) {
            self.deadline.replace(Some(Deadline::new(self.id, waker, UNREAD)));
        }
    }

    /// The client reads on what a node said that has closed.
    pub(crate) fn client_takes(&self) {
        if self.phase.get() == Phase::Over && self.failure.get().is_none() {
            self.close_after(UNREAD);
        }
    }

    /// The error packet that tells the client of a refusal which the proxy decides on, and which ends the login.
    pub(crate) fn refuse(&self, why: Refusal) -> Vec<u8> {
        let packet = self.login(|login| login.refusal(why)).unwrap_or_default();
        self.failed(refusal(why));
        packet
    }

    /// Ends the session from outside its sockets.
    pub(crate) fn close(&self, why: Refusal) {
        let words = self.refuse(why);
        self.last_words.replace(words);
        self.cut(why.name());
    }

    /// What the client has to be told before its socket closes; once.
    pub(crate) fn take_last_words(&self) -> Vec<u8> {
        match self.phase.get() {
            Phase::Connecting => self.refuse(Refusal::NoNode),
            Phase::Login => self.refuse(Refusal::NodeGone),
            Phase::Established | Phase::Over => self.last_words.take(),
        }
    }

    /// A deadline may have passed.
    pub(crate) fn woken(&self) {
        if !self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            return;
        }
        match self.phase.get() {
            // It was not the client that took so long.
            Phase::Connecting => self.close(Refusal::NoNode),
            Phase::Login => self.close(Refusal::LoginTooSlow),
            Phase::Established => self.look_at_idleness(),
            // It was refused, by the node or here, or the node is gone, and the client has not closed.
            Phase::Over => self.cut("client_stayed"),
        }
    }

    fn cut(&self, why: &str) {
        if let Some(filter) = self.filter.get() {
            filter.close(why);
        }
    }

    fn look_at_idleness(&self) {
        let busy = self.tracker.borrow().as_ref().is_some_and(|tracker| match tracker.state() {
            State::Busy => true,
            State::Opaque => self.client_spoke_last.get(),
            State::Idle | State::InTransaction => false,
        });
        if busy {
            self.is_active();
        } else {
            self.cut("idle_timeout");
        }
    }

    /// The time until it counts as idle begins anew.
    fn is_active(&self) {
        let idle_timeout = self.idle_timeout.get();
        if !idle_timeout.is_zero()
            && let Some(deadline) = &*self.deadline.borrow()
        {
            deadline.set(idle_timeout);
        }
    }

    /// The client's connection has ended, and with it the session; to hear so again changes nothing.
    pub(crate) fn ended(&self, by_client: bool) {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Login) {
            self.failed(if by_client { node::CLIENT_GONE } else { refusal(Refusal::NodeGone) });
        }
        self.phase.set(Phase::Over);
        self.deadline.replace(None);
        self.leave_node();
    }

    // --- established ---

    /// The client's link has TLS and the node's has none, and passwords must not go from the one to the other.
    pub(crate) fn set_exposed(&self) {
        self.exposed.set(true);
    }

    /// Bytes of the client go by. False: they must not go on, and the session must end.
    pub(crate) fn client_sent(&self, bytes: &[u8]) -> bool {
        self.client_spoke_last.set(true);
        self.counts(|counts| counts.to_node.add(bytes.len() as u64));
        self.track(|tracker, watcher| tracker.client(bytes, watcher));
        self.is_active();
        !self.is_out_of_sight()
    }

    /// Bytes of the node go by.
    pub(crate) fn node_sent(&self, bytes: &[u8]) -> Passing {
        self.client_spoke_last.set(false);
        self.counts(|counts| counts.to_client.add(bytes.len() as u64));
        self.track(|tracker, watcher| tracker.node(bytes, watcher));
        self.is_active();
        if self.commands.take_clear_text() && self.exposed.get() {
            // A change of user is a login, too.
            self.counts(|counts| counts.login_failures[refusal(Refusal::ClearTextPassword)].add(1));
            Passing::AsksForClearText
        } else if self.is_out_of_sight() {
            Passing::Last
        } else {
            Passing::On
        }
    }

    /// Whether the node speaks next: it has all of a command, and owes the response.
    pub(crate) fn awaits_node(&self) -> bool {
        self.tracker.borrow().as_ref().is_some_and(Tracker::awaits_node)
    }

    /// Whether the client speaks next: it has all of the responses.
    pub(crate) fn awaits_client(&self) -> bool {
        matches!(self.counted.get(), Some((Standing::Idle | Standing::Transaction, _)))
    }

    /// Whether a change of user might expose a password unseen.
    fn is_out_of_sight(&self) -> bool {
        let lost = self.exposed.get() && self.counted.get().is_some_and(|(standing, _)| standing == Standing::Opaque);
        if lost {
            abi::log!(Warn, "a session is ended: it cannot be followed any more, so it might expose a password");
        }
        lost
    }

    fn track(&self, run: impl FnOnce(&mut Tracker, &mut Watcher<'_>)) {
        let mut tracker = self.tracker.borrow_mut();
        let Some(tracker) = tracker.as_mut() else {
            return;
        };
        let here = self.node.borrow();
        let Some(here) = &*here else { return };
        run(tracker, &mut self.commands.counted_in(&here.counts));
        let now = Some(standing(tracker));
        if now != self.counted.get() {
            self.count(now);
        }
    }

    fn recount(&self) {
        let now = self.tracker.borrow().as_ref().map(standing);
        self.count(now);
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
