//! The module's state of one worker of Envoy.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::connection_limits;
use crate::deadlines::Deadlines;
use crate::envoy_drain::{self, WorkerDrain};
use crate::fleet_commands::{self, WorkerKills};
use crate::hosts::WorkerHosts;
use crate::migration_scheduler::{self, MigrationScheduler};
use crate::node::{WorkerNode, WorkerNodes};
use crate::offload::WorkerEvents;
use crate::port_probe::PortProbes;
use crate::reachability::{self, WorkerReachability};
use crate::session::Session;
use crate::slot::{Slot, Slots};
use crate::statements::StatementCollector;
use crate::states_memory::WorkerStates;
use crate::switches::{self, AppliedSwitches};
use crate::waiting_logins::{self, WaitingLogins};
use crate::wakers::WorkerWaker;

/// The size of the read buffer.
const BUFFER_BYTES: usize = 64 * 1024;

/// The number of workers that have had a session.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// The number of the next worker.
static NEXT_NUMBER: AtomicUsize = AtomicUsize::new(0);

/// The number of workers that have had a session, but at least 1.
pub(crate) fn worker_count() -> usize {
    WORKERS.load(Ordering::Relaxed).max(1)
}

/// The state of one worker. Envoy's main thread also has such a state, for its nodes and hosts, but never a session.
///
/// Envoy's hooks may run inside one another, so no cell may be borrowed while Envoy or a session is called.
pub(crate) struct WorkerContext {
    /// Distinguishes the worker from all others.
    pub(crate) number: usize,
    pub(crate) sessions: WorkerSessions,
    pub(crate) buffers: Buffers,
    pub(crate) nodes: Rc<WorkerNodes>,
    pub(crate) hosts: WorkerHosts,
    pub(crate) states: WorkerStates,
    pub(crate) waker: WorkerWaker,
    pub(crate) deadlines: Rc<Deadlines>,
    pub(crate) migrations: MigrationScheduler,
    pub(crate) reachability: WorkerReachability,
    pub(crate) events: Rc<WorkerEvents>,
    pub(crate) ports: Rc<PortProbes>,
    pub(crate) applied_switches: AppliedSwitches,
    /// See [`connection_limits::apply`].
    pub(crate) applied_limits: Cell<u64>,
    pub(crate) waiting_logins: WaitingLogins,
    pub(crate) drain: WorkerDrain,
    pub(crate) statements: StatementCollector,
    pub(crate) kills: WorkerKills,
}

thread_local! {
    static CONTEXT: Rc<WorkerContext> = WorkerContext::new();
}

impl WorkerContext {
    /// The context of the calling thread. Only for Envoy's hooks; all other code gets the context from its owner or
    /// caller.
    pub(crate) fn current() -> Rc<Self> {
        CONTEXT.with(Rc::clone)
    }

    fn new() -> Rc<Self> {
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let waker = WorkerWaker::new(number);
        let deadlines = Deadlines::new(waker.next_turn());
        let events = Rc::<WorkerEvents>::default();
        let nodes = WorkerNodes::new();
        Rc::new_cyclic(|worker| Self {
            number,
            sessions: WorkerSessions::default(),
            buffers: Buffers::default(),
            hosts: WorkerHosts::new(Rc::clone(&nodes)),
            nodes,
            states: WorkerStates::default(),
            migrations: MigrationScheduler::new(worker, &deadlines),
            reachability: WorkerReachability::default(),
            ports: PortProbes::new(Rc::clone(&events)),
            events,
            applied_switches: AppliedSwitches::default(),
            applied_limits: Cell::default(),
            waiting_logins: WaitingLogins::default(),
            drain: WorkerDrain::default(),
            statements: StatementCollector::default(),
            kills: WorkerKills::default(),
            waker,
            deadlines,
        })
    }

    /// Runs a turn: does what is due. Called when the worker is woken.
    pub(crate) fn on_wake(&self) {
        let turn = Turn::start();
        self.waker.on_woken();
        self.apply_published();
        waiting_logins::resume(self, &turn);
        switches::apply(self);
        connection_limits::apply(self);
        migration_scheduler::apply_node_changes(self);
        migration_scheduler::close_sessions(self, &turn);
        envoy_drain::end_sessions(self, &turn);
        fleet_commands::run(self);
        reachability::react(self, &turn);
        migration_scheduler::run_due(self);
        self.deadlines.run_due(&turn);
    }

    /// Applies what the control plane has published since the last call.
    pub(crate) fn apply_published(&self) {
        if self.hosts.apply_published() {
            migration_scheduler::on_nodes_changed(self);
        }
    }

    /// Takes sessions from a queue until the turn is over, and calls `run` for each that still exists and `fits`. The
    /// next turn continues.
    pub(crate) fn run_queue(
        &self,
        queue: &SessionQueue,
        turn: &Turn,
        fits: impl Fn(&Session) -> bool,
        run: impl Fn(&Rc<Session>),
    ) {
        self.run_queue_while(queue, turn, || true, fits, run);
    }

    /// Like [`Self::run_queue`], but stops when `may_continue` is false.
    pub(crate) fn run_queue_while(
        &self,
        queue: &SessionQueue,
        turn: &Turn,
        may_continue: impl Fn() -> bool,
        fits: impl Fn(&Session) -> bool,
        run: impl Fn(&Rc<Session>),
    ) {
        let next = || may_continue().then(|| queue.borrow_mut().pop_front()).flatten();
        while let Some(session) = next() {
            if let Some(session) = session.upgrade().filter(|session| fits(session)) {
                session.guarded(|| run(&session));
            }
            if turn.is_over() {
                self.waker.continue_later();
                break;
            }
        }
    }
}

/// Sessions that wait for a step of work.
pub(crate) type SessionQueue = RefCell<VecDeque<Weak<Session>>>;

/// The time limit of a turn, after which the worker has to handle other events. Each kind of work does at least one
/// step in a turn, so that all of them advance.
pub(crate) struct Turn {
    end: Instant,
}

impl Turn {
    const MAX_DURATION: Duration = Duration::from_millis(1);

    pub(crate) fn start() -> Self {
        Self { end: Instant::now() + Self::MAX_DURATION }
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

/// The connections of Envoy to nodes, of all workers.
pub(crate) static NODE_CONNECTIONS: Slots = Slots::new();

/// A session for which the policy has just chosen a node.
pub(crate) struct Connecting {
    pub(crate) session: Rc<Session>,
    pub(crate) node: Rc<WorkerNode>,
    pub(crate) slot: Slot,
}

/// The sessions of a worker.
#[derive(Default)]
pub(crate) struct WorkerSessions {
    by_connection: RefCell<HashMap<u64, Rc<Session>>>,
    by_hash: RefCell<HashMap<u64, Rc<Session>>>,
    has_had_session: Cell<bool>,
    /// The choice that the policy has just made. Envoy creates the socket to the node before it does anything else.
    connecting: Cell<Option<Connecting>>,
}

impl WorkerSessions {
    /// Adds a session, which can be found by its connection's id and by the hash that the policy sees.
    pub(crate) fn add(&self, session: &Rc<Session>) {
        if !self.has_had_session.replace(true) {
            WORKERS.fetch_add(1, Ordering::Relaxed);
        }
        self.by_connection.borrow_mut().insert(session.id(), Rc::clone(session));
        self.by_hash.borrow_mut().insert(session.hash(), Rc::clone(session));
    }

    /// Removes a session that has ended.
    pub(crate) fn remove(&self, session: &Session) {
        // The removed references are dropped when the maps are no longer borrowed.
        let _removed =
            (self.by_connection.borrow_mut().remove(&session.id()), self.by_hash.borrow_mut().remove(&session.hash()));
    }

    pub(crate) fn get(&self, connection: u64) -> Option<Rc<Session>> {
        self.by_connection.borrow().get(&connection).cloned()
    }

    pub(crate) fn get_by_hash(&self, hash: u64) -> Option<Rc<Session>> {
        self.by_hash.borrow().get(&hash).cloned()
    }

    /// Calls `run` for each session. No session may begin or end during these calls.
    pub(crate) fn for_each(&self, run: impl FnMut(&Rc<Session>)) {
        self.by_connection.borrow().values().for_each(run);
    }

    pub(crate) fn set_connecting(&self, connecting: Connecting) {
        self.connecting.set(Some(connecting));
    }

    pub(crate) fn take_connecting(&self) -> Option<Connecting> {
        self.connecting.take()
    }
}

/// The buffers that all sockets of a worker read into.
#[derive(Default)]
pub(crate) struct Buffers {
    buffer: Cell<Option<Box<[u8]>>>,
    scratch: Cell<Vec<u8>>,
}

impl Buffers {
    /// Lends the read buffer. A hook that runs inside another hook gets another buffer.
    pub(crate) fn with_buffer<T>(&self, run: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut buffer = self.buffer.take().unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice());
        let result = run(&mut buffer);
        self.buffer.set(Some(buffer));
        result
    }

    /// Lends an empty buffer that can grow, for decrypted bytes.
    pub(crate) fn with_scratch<T>(&self, run: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut scratch = self.scratch.take();
        let result = run(&mut scratch);
        scratch.clear();
        self.scratch.set(scratch);
        result
    }
}
