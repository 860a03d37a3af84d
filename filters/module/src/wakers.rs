//! How other threads wake a worker: through one of its sessions, since Envoy can only wake filters.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use envoy_abi::filter::Waker;

use crate::session::Session;
use crate::worker;

/// One waker for each worker that has sessions, by the id of the session that it is of.
static WAKERS: LazyLock<Mutex<HashMap<u64, Waker>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// The session through which this worker is woken.
    static CHOSEN: Cell<Option<u64>> = const { Cell::new(None) };
}

fn lock() -> MutexGuard<'static, HashMap<u64, Waker>> {
    // Nothing panics while it is held.
    WAKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called when a session can be woken.
pub(crate) fn add(session: &Session) {
    if CHOSEN.get().is_none()
        && let Some(waker) = session.waker()
    {
        CHOSEN.set(Some(session.id()));
        lock().insert(session.id(), waker);
    }
}

/// Called when a session has ended, before its filter is destroyed.
pub(crate) fn remove(session: &Session) {
    if CHOSEN.get() != Some(session.id()) {
        return;
    }
    CHOSEN.set(None);
    let another =
        worker::find_session(|other| Some((other.id(), other.waker()?)).filter(|(id, _)| *id != session.id()));
    let mut wakers = lock();
    wakers.remove(&session.id());
    if let Some((id, waker)) = another {
        CHOSEN.set(Some(id));
        // The session may have ended before a wake-up reached it.
        waker.wake();
        wakers.insert(id, waker);
    }
}

/// Wakes all workers that have sessions.
///
/// The lock is held all the time, and [`remove`] waits for it: so no filter is destroyed while it is being woken.
pub(crate) fn wake_all() {
    lock().values().for_each(Waker::wake);
}

/// Wakes this worker again, after other events.
pub(crate) fn wake_here() {
    if let Some(id) = CHOSEN.get()
        && let Some(waker) = lock().get(&id)
    {
        waker.wake();
    }
}
