//! Wakes workers. Envoy can only wake a filter, so a worker is woken through one of its sessions.
//!
//! A worker that wakes itself runs its turn before it polls for events. Many such turns in a row would delay its
//! connections. So if work takes several turns, Envoy's main thread wakes the worker for the next one: see
//! [`NextTurn`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use envoy_abi::filter::{Filter, Waker};

/// The time of an event that never happens.
pub(crate) const NEVER: u64 = u64::MAX;

/// One waker for each worker that has sessions, by the id of the session through which it wakes the worker.
static WAKERS: LazyLock<Mutex<HashMap<u64, SharedWaker>>> = LazyLock::new(Mutex::default);

struct SharedWaker {
    /// The number of the worker.
    worker: usize,
    waker: Arc<Waker>,
    next_turn: Arc<NextTurn>,
}

/// When a worker has to be woken. The worker writes it, Envoy's main thread reads it.
#[derive(Debug)]
pub(crate) struct NextTurn {
    /// When the worker's first deadline is due, in milliseconds of `clock`.
    deadline: AtomicU64,
    /// The worker's last turn has left some work.
    has_work: AtomicBool,
    /// The main thread has woken the worker, and the wake-up has not arrived yet. A second wake-up would cause a second
    /// turn right after the first.
    is_woken: AtomicBool,
}

impl Default for NextTurn {
    fn default() -> Self {
        Self { deadline: AtomicU64::new(NEVER), has_work: AtomicBool::new(false), is_woken: AtomicBool::new(false) }
    }
}

impl NextTurn {
    pub(crate) fn set_deadline(&self, milliseconds: u64) {
        self.deadline.store(milliseconds, Ordering::Relaxed);
    }

    fn set_has_work(&self) {
        self.has_work.store(true, Ordering::Relaxed);
    }

    /// Must be called when the turn begins.
    fn begin(&self) {
        self.has_work.store(false, Ordering::Relaxed);
        self.is_woken.store(false, Ordering::Relaxed);
    }

    /// Whether the caller has to wake the worker. Returns true only once before the turn begins.
    fn take_wake(&self) -> bool {
        !self.is_woken.swap(true, Ordering::Relaxed)
    }

    /// Allows another wake-up, since the last one may not arrive.
    fn forget_wake(&self) {
        self.is_woken.store(false, Ordering::Relaxed);
    }

    pub(crate) fn is_due(&self, now: u64) -> bool {
        self.has_work.load(Ordering::Relaxed) || now >= self.deadline.load(Ordering::Relaxed)
    }
}

fn lock() -> MutexGuard<'static, HashMap<u64, SharedWaker>> {
    // Nothing panics while the lock is held.
    WAKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all workers that have sessions.
///
/// The lock is held all the time, and [`WorkerWaker::remove`] waits for it: so no filter is destroyed while it is being
/// woken.
pub(crate) fn wake_all() {
    lock().values().for_each(|shared| shared.waker.wake());
}

/// The numbers of the workers that have sessions, which can be woken.
pub(crate) fn workers() -> HashSet<usize> {
    lock().values().map(|shared| shared.worker).collect()
}

/// Wakes the workers whose next turn is due, each once before that turn. Returns whether there are such workers.
pub(crate) fn wake_due(now: u64) -> bool {
    let mut has_any = false;
    for shared in lock().values().filter(|shared| shared.next_turn.is_due(now)) {
        if shared.next_turn.take_wake() {
            shared.waker.wake();
        }
        has_any = true;
    }
    has_any
}

/// The session through which the worker is woken.
struct ChosenSession {
    id: u64,
    waker: Arc<Waker>,
}

/// The waker of one worker.
pub(crate) struct WorkerWaker {
    /// The number of the worker.
    worker: usize,
    /// The filters of the worker's sessions, by session id.
    filters: RefCell<BTreeMap<u64, Filter>>,
    chosen: RefCell<Option<ChosenSession>>,
    /// The worker has woken itself, and the wake-up has not arrived yet.
    is_waking: Cell<bool>,
    next_turn: Arc<NextTurn>,
}

impl WorkerWaker {
    /// `worker`: the number of the worker.
    pub(crate) fn new(worker: usize) -> Self {
        Self {
            worker,
            filters: RefCell::default(),
            chosen: RefCell::default(),
            is_waking: Cell::new(false),
            next_turn: Arc::default(),
        }
    }

    /// Adds a session through which the worker can be woken.
    pub(crate) fn add(&self, session: u64, filter: &Filter) {
        self.filters.borrow_mut().insert(session, filter.clone());
        if self.chosen.borrow().is_none() {
            self.choose();
        }
    }

    /// Removes a session that has ended. Must be called before its filter is destroyed.
    pub(crate) fn remove(&self, session: u64) {
        self.filters.borrow_mut().remove(&session);
        if self.chosen.borrow().as_ref().is_some_and(|chosen| chosen.id == session) {
            lock().remove(&session);
            self.chosen.replace(None);
            self.is_waking.set(false);
            self.choose();
            // A wake-up through this session may be lost.
            self.wake();
        }
    }

    /// Chooses the oldest session, since the others are likely to end earlier.
    fn choose(&self) {
        let chosen = self.filters.borrow().iter().find_map(|(id, filter)| Some((*id, filter.waker()?)));
        if let Some((id, waker)) = chosen {
            // A wake-up through the previous session may be lost.
            self.next_turn.forget_wake();
            let waker = Arc::new(waker);
            let shared =
                SharedWaker { worker: self.worker, waker: Arc::clone(&waker), next_turn: Arc::clone(&self.next_turn) };
            self.chosen.replace(Some(ChosenSession { id, waker }));
            lock().insert(id, shared);
        }
    }

    /// Gives the worker a turn after the current event, and before its next poll for events.
    pub(crate) fn wake(&self) {
        if let Some(chosen) = &*self.chosen.borrow()
            && !self.is_waking.replace(true)
        {
            chosen.waker.wake();
        }
    }

    /// Gives the worker another turn after it has handled other events.
    pub(crate) fn continue_later(&self) {
        self.next_turn.set_has_work();
    }

    /// Must be called when the worker is woken.
    pub(crate) fn on_woken(&self) {
        self.is_waking.set(false);
        self.next_turn.begin();
    }

    pub(crate) fn next_turn(&self) -> &Arc<NextTurn> {
        &self.next_turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_is_due_at_the_first_deadline_or_when_work_is_left() {
        let next = NextTurn::default();
        assert!(!next.is_due(NEVER - 1));
        next.set_deadline(5);
        assert!(!next.is_due(4) && next.is_due(5));
        next.set_deadline(NEVER);
        next.set_has_work();
        assert!(next.is_due(0));
        next.begin();
        assert!(!next.is_due(5));
    }

    #[test]
    fn worker_is_woken_once_for_each_turn() {
        let next = NextTurn::default();
        assert!(next.take_wake() && !next.take_wake());
        next.begin();
        assert!(next.take_wake() && !next.take_wake());
        next.forget_wake();
        assert!(next.take_wake());
    }
}
