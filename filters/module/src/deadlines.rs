//! Moments at which a session has to be woken: network filters have no timers, so Envoy's main thread looks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use envoy_abi::filter::Waker;

use crate::clock;

/// Never.
const NEVER: u64 = u64::MAX;

static NEXT: AtomicU64 = AtomicU64::new(0);
static WATCHED: LazyLock<Mutex<HashMap<u64, WatchedDeadline>>> = LazyLock::new(Mutex::default);

struct WatchedDeadline {
    deadline: Arc<AtomicU64>,
    waker: Waker,
}

/// A deadline of one session; dropped with it.
pub(crate) struct Deadline {
    /// One session may have several.
    id: u64,
    milliseconds: Arc<AtomicU64>,
}

impl Deadline {
    /// Watches over a session; `waker` is used when `after` has passed, again and again until it is set anew.
    pub(crate) fn new(waker: Waker, after: Duration) -> Self {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let deadline = Self { id, milliseconds: Arc::new(AtomicU64::new(NEVER)) };
        deadline.set(after);
        let watched = WatchedDeadline { deadline: Arc::clone(&deadline.milliseconds), waker };
        lock().insert(id, watched);
        deadline
    }

    /// The session has so much time from now on.
    pub(crate) fn set(&self, after: Duration) {
        let at = clock::now().saturating_add(after).as_millis();
        self.milliseconds.store(u64::try_from(at).unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// Whether it has passed. A waker may be late, and its reason over.
    pub(crate) fn has_passed(&self) -> bool {
        now() >= self.milliseconds.load(Ordering::Relaxed)
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        let _removed = lock().remove(&self.id);
    }
}

/// Wakes all sessions whose deadline has passed.
///
/// All the time the lock is held: a session ends its deadline before its filter goes, so no filter can go while it is
/// being woken.
pub(crate) fn wake_due() {
    let now = now();
    for watched in lock().values() {
        if now >= watched.deadline.load(Ordering::Relaxed) {
            watched.waker.wake();
        }
    }
}

fn now() -> u64 {
    u64::try_from(clock::now().as_millis()).unwrap_or(NEVER)
}

fn lock() -> std::sync::MutexGuard<'static, HashMap<u64, WatchedDeadline>> {
    // Nothing panics while it is held; were it so, the map would still be whole.
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}
