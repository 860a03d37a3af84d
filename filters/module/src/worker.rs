//! What the hooks of one worker share: its sessions, and the buffer that all its sockets read into.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use abi::filter::Waker;

use crate::node::Here;
use crate::session::Session;

/// Bytes that are read at once.
const BUFFER: usize = 64 * 1024;

/// Workers that have had a session.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// How many workers this process has, as far as they have had a session; one at least.
pub(crate) fn count() -> usize {
    WORKERS.load(Ordering::Relaxed).max(1)
}

/// By which each worker that has a session is woken, by the number of the worker. It goes before its session does, so that
/// no waker of a session is used that has ended.
static WAKERS: LazyLock<Mutex<HashMap<usize, Waker>>> = LazyLock::new(Mutex::default);

fn wakers() -> MutexGuard<'static, HashMap<usize, Waker>> {
    // Nothing panics while it is held; were it so, the map would still be whole.
    WAKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all workers: each has [`abi::filter::NetworkFilter::woken`] called for one of its sessions, soon.
pub(crate) fn wake_all() {
    wakers().values().for_each(Waker::wake);
}

#[derive(Default)]
struct Worker {
    by_connection: RefCell<HashMap<u64, Rc<Session>>>,
    by_hash: RefCell<HashMap<u64, Rc<Session>>>,
    /// None: it has had no session yet. The main thread never has, though it hears of nodes.
    number: Cell<Option<usize>>,
    /// The session by which it is woken.
    woken_by: Cell<Option<u64>>,
    /// For whom the policy chose a node; Envoy makes the socket to it before it does anything else.
    connecting: Cell<Option<(Rc<Session>, Rc<Here>)>>,
    buffer: Cell<Option<Box<[u8]>>>,
    scratch: Cell<Vec<u8>>,
}

thread_local! {
    static WORKER: Worker = Worker::default();
}

/// A session begins; it is found by its connection's id, and by the hash that the policy sees.
pub(crate) fn add(session: &Rc<Session>) {
    WORKER.with(|worker| {
        if worker.number.get().is_none() {
            worker.number.set(Some(WORKERS.fetch_add(1, Ordering::Relaxed)));
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
    WORKER.with(|worker| {
        if worker.woken_by.get() == Some(session.id()) {
            worker.woken_by.set(None);
            worker.number.get().map(|number| wakers().remove(&number));
            // Its last wake may have come too late for it.
            let _ = worker.by_connection.borrow().values().any(|other| is_woken_by(worker, other, true));
        }
    });
}

/// A session has its filter: from now on its worker can be woken by it, unless it is by another.
pub(crate) fn can_wake(session: &Session) {
    WORKER.with(|worker| is_woken_by(worker, session, false));
}

/// Whether a worker is woken by this session from now on. `now`: it is at once.
fn is_woken_by(worker: &Worker, session: &Session, now: bool) -> bool {
    let (Some(number), None) = (worker.number.get(), worker.woken_by.get()) else { return false };
    let Some(waker) = session.waker() else { return false };
    if now {
        waker.wake();
    }
    worker.woken_by.set(Some(session.id()));
    wakers().insert(number, waker);
    true
}

pub(crate) fn session(connection: u64) -> Option<Rc<Session>> {
    WORKER.with(|worker| worker.by_connection.borrow().get(&connection).cloned())
}

pub(crate) fn session_by_hash(hash: u64) -> Option<Rc<Session>> {
    WORKER.with(|worker| worker.by_hash.borrow().get(&hash).cloned())
}

/// Runs `run` for each session. None may begin or end meanwhile.
pub(crate) fn each(run: impl Fn(&Rc<Session>)) {
    WORKER.with(|worker| worker.by_connection.borrow().values().for_each(run));
}

pub(crate) fn set_connecting(session: Rc<Session>, node: Rc<Here>) {
    WORKER.with(|worker| worker.connecting.set(Some((session, node))));
}

pub(crate) fn take_connecting() -> Option<(Rc<Session>, Rc<Here>)> {
    WORKER.with(|worker| worker.connecting.take())
}

/// Lends the worker's read buffer. A hook that runs inside another gets one of its own.
pub(crate) fn with_buffer<T>(run: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut buffer = WORKER.with(|worker| worker.buffer.take()).unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice());
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
