//! What the hooks of one worker share: its sessions, and the buffer that all its sockets read into.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::node::WorkerNode;
use crate::session::Session;

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 64 * 1024;

/// Workers that have had a session.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// How many workers this process has, as far as they have had a session; one at least.
pub(crate) fn worker_count() -> usize {
    WORKERS.load(Ordering::Relaxed).max(1)
}

#[derive(Default)]
struct WorkerSessions {
    by_connection: RefCell<HashMap<u64, Rc<Session>>>,
    by_hash: RefCell<HashMap<u64, Rc<Session>>>,
    /// The main thread never has, though it hears of nodes.
    has_had_session: Cell<bool>,
    /// For whom the policy chose a node; Envoy makes the socket to it before it does anything else.
    connecting: Cell<Option<(Rc<Session>, Rc<WorkerNode>)>>,
    buffer: Cell<Option<Box<[u8]>>>,
    scratch: Cell<Vec<u8>>,
}

thread_local! {
    static WORKER: WorkerSessions = WorkerSessions::default();
}

/// A session begins; it is found by its connection's id, and by the hash that the policy sees.
pub(crate) fn add(session: &Rc<Session>) {
    WORKER.with(|worker| {
        if !worker.has_had_session.replace(true) {
            WORKERS.fetch_add(1, Ordering::Relaxed);
        }
        worker.by_connection.borrow_mut().insert(session.id(), Rc::clone(session));
        worker.by_hash.borrow_mut().insert(session.hash(), Rc::clone(session));
    });
}

/// A session has ended.
pub(crate) fn remove(session: &Session) {
    // What is removed is dropped after the maps are free again.
    let _removed = WORKER.with(|worker| {
        (worker.by_connection.borrow_mut().remove(&session.id()), worker.by_hash.borrow_mut().remove(&session.hash()))
    });
}

pub(crate) fn session(connection: u64) -> Option<Rc<Session>> {
    WORKER.with(|worker| worker.by_connection.borrow().get(&connection).cloned())
}

pub(crate) fn session_by_hash(hash: u64) -> Option<Rc<Session>> {
    WORKER.with(|worker| worker.by_hash.borrow().get(&hash).cloned())
}

/// Runs `run` for each session. None may begin or end meanwhile.
pub(crate) fn for_each_session(run: impl Fn(&Rc<Session>)) {
    WORKER.with(|worker| worker.by_connection.borrow().values().for_each(run));
}

/// What `find` has of any session. None may begin or end meanwhile.
pub(crate) fn find_session<T>(find: impl Fn(&Rc<Session>) -> Option<T>) -> Option<T> {
    WORKER.with(|worker| worker.by_connection.borrow().values().find_map(find))
}

pub(crate) fn set_connecting(session: Rc<Session>, node: Rc<WorkerNode>) {
    WORKER.with(|worker| worker.connecting.set(Some((session, node))));
}

pub(crate) fn take_connecting() -> Option<(Rc<Session>, Rc<WorkerNode>)> {
    WORKER.with(|worker| worker.connecting.take())
}

/// Lends the worker's read buffer. A hook that runs inside another gets one of its own.
pub(crate) fn with_buffer<T>(run: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut buffer =
        WORKER.with(|worker| worker.buffer.take()).unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice());
    let result = run(&mut buffer);
    WORKER.with(|worker| worker.buffer.set(Some(buffer)));
    result
}

/// Lends an empty buffer that grows, for what was decrypted.
pub(crate) fn with_scratch<T>(run: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    let mut scratch = WORKER.with(|worker| worker.scratch.take());
    let result = run(&mut scratch);
    scratch.clear();
    WORKER.with(|worker| worker.scratch.set(scratch));
    result
}
