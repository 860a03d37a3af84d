//! How other threads wake a worker: by a session of it, since only filters can be woken.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use abi::filter::Waker;

use crate::session::Session;
use crate::worker;

/// One of each worker that has a session, by the id of that session.
static WAKERS: LazyLock<Mutex<HashMap<u64, Waker>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// The session by which this worker is woken.
    static CHOSEN: Cell<Option<u64>> = const { Cell::new(None) };
}

fn lock() -> MutexGuard<'static, HashMap<u64, Waker>> {
    // Nothing panics while it is held.
    WAKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session can be woken from now on.
pub(crate) fn begun(session: &Session) {
    if CHOSEN.get().is_none()
        && let Some(waker) = session.waker()
    {
        CHOSEN.set(Some(session.id()));
        lock().insert(session.id(), waker);
    }
}

/// A session has ended; its filter goes behind this.
pub(crate) fn ended(session: &Session) {
    if CHOSEN.get() != Some(session.id()) {
        return;
    }
    CHOSEN.set(None);
    let another = worker::find(|other| Some((other.id(), other.waker()?)).filter(|(id, _)| *id != session.id()));
    let mut wakers = lock();
    wakers.remove(&session.id());
    if let Some((id, waker)) = another {
        CHOSEN.set(Some(id));
        // The session that ends may have been woken a moment ago, and nobody looked.
        waker.wake();
        wakers.insert(id, waker);
    }
}

/// Wakes all workers that have a session.
///
/// All the time the lock is held: no filter can go while it is being woken, as [`ended`] waits for the lock.
pub(crate) fn wake_all() {
    lock().values().for_each(Waker::wake);
}

/// Wakes this worker again, behind what it does now.
pub(crate) fn wake_here() {
    if let Some(id) = CHOSEN.get()
        && let Some(waker) = lock().get(&id)
    {
        waker.wake();
    }
}
